"""Expert load balancing on the FFN role: vLLM's own balancer, stepped by what is served.

Rearrangement, load window, map commit and weight transfer are vLLM's. What is decided here is when
to step, which rows count, and what a person gets to see.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from afd_shim.errors import ConfigError, LayerError, ServingLoopError
from afd_shim.ffn.placement import LayerPlacement, Rearrangement, format_placement

if TYPE_CHECKING:
    import torch

    from afd_shim.compat.eplb import Eplb
    from afd_shim.connectors.base import Batch
    from afd_shim.moe.layers import MoELayer

__all__ = ["EplbStats", "ExpertLoadBalancer", "real_attention_token_total"]

logger = init_logger("vllm.afd_shim")

_STALL_INTERVALS = 3
"""Intervals without any progress after which an asynchronous balancer is said to be stuck, each time."""

_DRAIN_TIMEOUT_S = 3.0  # vLLM gives a worker process 5 s in all, by default, before it sends SIGTERM


def real_attention_token_total(batch: Batch) -> int:
    """Rows of `batch` that are tokens of requests, over all its Attention ranks.

    Placeholders of idle ranks and padding are no tokens; tensor-parallel copies of a row are merged
    before they get here. These rows are the first ones of the batch, which is what vLLM's
    record kernel needs: it counts a prefix.
    """
    return batch.real_rows


@dataclass(slots=True)
class EplbStats:
    """Counters of one FFN rank."""

    steps: int = 0
    dummy_steps: int = 0
    rearrangements: int = 0
    rearrangement_seconds: float = 0.0
    """For which serving stood still, over all rearrangements."""


class ExpertLoadBalancer:
    """Owns vLLM's balancer on one FFN rank.

    Every FFN rank sees the same batches in the same order, and so steps equally often: otherwise the
    collectives of a rearrangement would wait for each other forever. Every rank also sees
    the same rows, so rank 0 alone counts them.

    Args:
        eplb: vLLM's balancer, the model registered with it.
        layers: the MoE layers of the model.
        rank: of this process among the FFN ranks.
        num_ranks: of them.
        log_placement: `log_balancedness` of vLLM's `--eplb-config`.

    Raises:
        ConfigError: the model's MoE layers are not those that are served.

    """

    def __init__(
        self, eplb: Eplb, layers: Sequence[MoELayer], *, rank: int, num_ranks: int, log_placement: bool
    ) -> None:
        self.stats = EplbStats()
        self._eplb = eplb
        self._rank = rank
        self._num_ranks = num_ranks
        self._log_placement = log_placement and rank == 0
        self._in_flight: set[int] = set()  # Attention groups within a real step
        self._began: int | None = None  # the step that began the asynchronous rearrangement under way
        self._arrived: int | None = None  # the layer of it that waited for the last step
        self._last_progress = 0  # the step that last showed the asynchronous worker at work
        indices = {id(layer.runner): layer.index for layer in layers}
        try:
            self._layers = [indices[id(runner)] for runner in eplb.model.model.moe_layers]
        except KeyError:
            raise ConfigError(
                "vLLM's expert load balancing knows MoE layers of this model that are not served here; "
                "leave --enable-eplb out and report the model's name.",
                key="enable_eplb",
            ) from None
        if rank == 0:
            self._tell_memory()

    def prepare_forward(self, batch: Batch) -> None:
        """Say which rows of the coming forward count.

        Raises:
            LayerError: for a micro-batch: its rows would be counted as another's.

        """
        if batch.stage != 0:
            raise LayerError(
                f"a request of micro-batch {batch.stage} arrived, and expert load balancing counts single-stage steps "
                "only; start the Attention server without dual-batch overlap."
            )
        self._eplb.prepare_forward(real_attention_token_total(batch) if self._rank == 0 else 0)

    def prepare_warm_up(self) -> None:
        """Count nothing of the coming forwards."""
        self._eplb.prepare_forward(0)

    def end_warm_up(self) -> None:
        """Move the largest rearrangement's worth of data once, and step as every warm-up does.

        A transport that cannot move experts fails here, not hours later.
        """
        self._eplb.step(is_dummy=True, is_profile=True)
        self._step(is_dummy=True)

    def eplb_step(self, batch: Batch) -> None:
        """Step once if `batch` ends a step; called for every batch, on every rank alike.

        A step is a dummy one if all its requests are and no real step is under way: a dummy step of
        vLLM's clears the load of all layers, also what a real step has recorded so far.
        """
        for group, header, _, _ in batch.members:
            if header.last_layer or header.dummy:
                self._in_flight.discard(group)
            else:
                self._in_flight.add(group)
        if batch.ends_step:
            self._step(is_dummy=batch.dummy and not self._in_flight)

    def close(self) -> None:
        """Let a transfer under way end, before vLLM closes its process groups; the serving loop has ended."""
        try:
            abandoned = self._eplb.drain(_DRAIN_TIMEOUT_S)
        except Exception as error:  # whatever it is, the shutdown goes on
            logger.warning(
                "AFD: FFN rank %d could not end the transfer of experts under way: %s: %s. The shutdown goes on; "
                "another FFN rank has probably ended: read its log.",
                self._rank,
                type(error).__name__,
                error,
                exc_info=error,
            )
            return
        if abandoned is not None:
            logger.warning(
                "AFD: FFN rank %d was still moving experts %g s after it stopped serving. Thread %s is abandoned, and "
                "process groups close under it; another FFN rank has probably ended: read its log.",
                self._rank,
                _DRAIN_TIMEOUT_S,
                abandoned.name,
            )

    def counters(self) -> dict[str, float]:
        """`EplbStats`, for `afd_stats`."""
        return asdict(self.stats)

    def _step(self, *, is_dummy: bool) -> None:
        self.stats.steps += 1
        self.stats.dummy_steps += is_dummy
        if not self._eplb.step_can_commit:
            self._eplb.step(is_dummy=is_dummy)
            return
        model = self._eplb.model
        before = model.physical_to_logical_map.clone()
        arrived = self._eplb.arrived_layer  # before the step, which takes it where all ranks have one
        started = time.perf_counter()
        try:
            self._eplb.step(is_dummy=is_dummy)
        except RuntimeError as error:
            raise ServingLoopError(
                f"FFN rank {self._rank} could not rearrange experts after {self.stats.steps} steps: {error}. "
                "Another FFN rank has probably ended: read its log, and restart the FFN server."
            ) from error
        self._watch(arrived)
        self._committed(before, model.physical_to_logical_map, time.perf_counter() - started)

    def _committed(self, before: torch.Tensor, after: torch.Tensor, seconds: float) -> None:
        """Tell what a step that could change the placement has changed.

        `before` and `after`: `[layers, physical experts]`, the logical expert in each slot.
        """
        changed = (before != after).any(dim=1).nonzero().flatten().tolist()
        if not changed:
            return
        self.stats.rearrangements += 1
        self.stats.rearrangement_seconds += seconds
        if self._rank == 0:
            logger.info(
                "AFD: experts rearranged in %d layers, serving stood still for %.2f s (%.2f s in all)",
                len(changed),
                seconds,
                self.stats.rearrangement_seconds,
            )
        if not self._log_placement:
            return
        # Rank 0 alone counts, so its window is the one of all ranks.
        load = self._eplb.model.expert_load_window.sum(dim=0)
        record = Rearrangement(
            number=self.stats.rearrangements,
            step=self.stats.steps,
            seconds=round(seconds, 6),
            num_ranks=self._num_ranks,
            layers=[
                LayerPlacement(self._layers[row], before[row].tolist(), after[row].tolist(), load[row].tolist())
                for row in changed
            ],
        )
        for line in format_placement(record):
            logger.info("AFD EPLB: %s", line)
        logger.info("%s", record.log_line())

    def _watch(self, arrived: int | None) -> None:
        """Warn about an asynchronous rearrangement that has come to a halt; vLLM says nothing then.

        One that ends, or brings another layer, is at work, whatever the placement that comes out. A layer
        that stays is no progress: a peer's worker has not brought its share.
        `arrived`: the layer that waited for the step.
        """
        in_cycle = self._eplb.steps_in_cycle
        began = None if in_cycle is None else self.stats.steps - in_cycle
        if began is None or (began, arrived) != (self._began, self._arrived):
            self._last_progress = self.stats.steps
        self._began, self._arrived = began, arrived
        silent = self.stats.steps - self._last_progress
        interval = self._eplb.state.expert_rearrangement_step_interval
        if silent and silent % (_STALL_INTERVALS * interval) == 0:
            logger.warning(
                "AFD: FFN rank %d has waited for experts that are being moved for %d steps (interval: %d); an "
                'asynchronous worker is probably stuck. Restart the FFN server, or set "use_async": false in '
                "--eplb-config.",
                self._rank,
                silent,
                interval,
            )

    def _tell_memory(self) -> None:
        model = self._eplb.model.model
        redundant = model.num_redundant_experts // self._num_ranks
        per_expert = sum(weight.nbytes // weight.shape[0] for layer in model.expert_weights for weight in layer)
        logger.info(
            "AFD: expert load balancing holds %d redundant experts in each of %d MoE layers on each FFN rank: "
            "%.1f MB more per rank",
            redundant,
            len(self._layers),
            redundant * per_expert / 1e6,
        )

"""vLLM's expert load balancer, the same on every release.

What differs is the signatures of two methods of `EPLBController` (0.32.0 moved `load_dummy_weights`
from registering to starting), and who has built the state: on a GPU vLLM's model runner registers
the model while it loads, on CPU nobody does. What is read here of an asynchronous rearrangement
(`rebalanced`, `pending_result`, `expert_rearrangement_step`) and `drain_async` are the same in 0.30.0,
0.31.0 and 0.32.0.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from packaging.version import Version

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.distributed.eplb.eplb_state import EplbModelState, EplbState
    from vllm.v1.worker.gpu.eplb_utils import EPLBController

__all__ = ["Eplb"]

_DUMMY_WEIGHTS_AT_START = Version("0.32.0")


class _Runner(Protocol):
    """The part of vLLM's model runners, of both generations, that is read here."""

    eplb_state: EplbState | None  # None on CPU; the newer runner has its `EPLBController` too, as `eplb`


class Eplb:
    """vLLM's `EPLBController` for one model.

    Upstream: `vllm/v1/worker/gpu/eplb_utils.py`, `EPLBController`, and
    `vllm/distributed/eplb/eplb_state.py`, `EplbState` (0.30.0-0.33.0).

    Args:
        parallel_config: with `enable_eplb`.
        model_config: of the model that is balanced.
        device: where its experts live.
        release: vLLM's release, without a local part.

    """

    def __init__(
        self, parallel_config: ParallelConfig, model_config: ModelConfig, device: torch.device, release: str
    ) -> None:
        from vllm.v1.worker.gpu.eplb_utils import EPLBController

        self._model_config = model_config
        self._device = device
        self._starts_with_dummy_weights = Version(release) >= _DUMMY_WEIGHTS_AT_START
        self._registered_by_runner = device.type != "cpu"
        self._controller = EPLBController(parallel_config, device)

    def prepare_load(self) -> None:
        """Build the empty state, before the model loads."""
        if not self._registered_by_runner:
            self._controller.prepare_load()

    def register(self, model: nn.Module, runner: _Runner) -> bool:
        """Take over a loaded model, and start the asynchronous worker where there is one.

        Returns:
            False where the model does not follow vLLM's `MixtureOfExperts` protocol.

        """
        if self._registered_by_runner:
            return self._adopt(runner)
        controller = self._controller
        if self._starts_with_dummy_weights:
            added = controller.maybe_register_model(model, self._model_config)
        else:
            added = controller.maybe_register_model(  # the signature of 0.30.0 and 0.31.0
                model,
                self._model_config,
                load_dummy_weights=False,  # type: ignore[call-arg]
            )
        controller.maybe_start_async_loop(added)
        return bool(added)

    def _adopt(self, runner: _Runner) -> bool:
        """Make the state that the runner has built while loading ours: a second one would balance twice."""
        own: EPLBController | None = getattr(runner, "eplb", None)
        if own is not None:
            self._controller = own
        else:
            self._controller.state = runner.eplb_state
            self._controller._has_registered_models = True  # noqa: SLF001 - what registering sets
        return self._controller.state is not None and bool(self._controller.state.model_states)

    def prepare_forward(self, num_unpadded_tokens: int) -> None:
        """Count the experts of the first `num_unpadded_tokens` rows of the coming forwards only."""
        self._controller.prepare_forward(self._model_config, num_unpadded_tokens)

    def step(self, *, is_dummy: bool = False, is_profile: bool = False) -> None:
        """Step vLLM's state: commit the load, and rearrange when it is time; see `EplbState.step`."""
        self._controller.step(is_dummy=is_dummy, is_profile=is_profile)

    @property
    def state(self) -> EplbState:
        """vLLM's state, once a model is registered."""
        state = self._controller.state
        assert state is not None  # asked after `register`
        return state

    @property
    def model(self) -> EplbModelState:
        """The state of the one model that is registered."""
        return next(iter(self.state.model_states.values()))

    @property
    def step_can_commit(self) -> bool:
        """Whether the next step may change the placement of experts."""
        state = self.state
        due = state.expert_rearrangement_step + 1 >= state.expert_rearrangement_step_interval
        return due or (state.is_async and self.model.rebalanced)

    @property
    def steps_in_cycle(self) -> int | None:
        """Steps since the asynchronous rearrangement under way began; None where none is.

        vLLM's step counter starts again with a rearrangement only, and an asynchronous one waits for
        the end of the last, be it in the same step. So a smaller number than before says that a
        rearrangement has ended, where `rebalanced` may never be seen to be False.
        """
        state = self.state
        return state.expert_rearrangement_step if state.is_async and self.model.rebalanced else None

    @property
    def arrived_layer(self) -> int | None:
        """The layer whose experts the asynchronous worker has brought and no step has taken yet, if any."""
        result = self.model.pending_result  # once: the worker sets it at any time
        return None if result is None else result.layer_idx

    def drain(self, timeout: float) -> threading.Thread | None:
        """Take from the asynchronous worker what it still brings, without applying it; every rank does so, or none.

        vLLM's worker is a daemon thread without an end, which cannot be joined. It offers one layer
        at a time to the thread that steps, so once nobody steps, only `drain_async` lets it
        finish. Then it waits for the next rearrangement, and touches no process group. `drain_async`
        waits for the other ranks without a bound, and so gets a thread of its own.

        Returns:
            The thread that still drains after `timeout` seconds, if it does.

        Raises:
            Exception: what vLLM raised while draining.

        """
        state = self.state
        if not (state.is_async and self.model.rebalanced):
            return None
        errors: list[Exception] = []
        given_up = threading.Event()

        def drain() -> None:
            from vllm.platforms import current_platform

            try:
                current_platform.set_device(self._device)  # each thread has its own; events are recorded on it
                state.drain_async()
            except Exception as error:
                errors.append(error)
                if given_up.is_set():
                    raise  # nobody waits any more: `threading.excepthook` tells

        thread = threading.Thread(target=drain, name="afd-eplb-drain", daemon=True)
        thread.start()
        thread.join(timeout)
        given_up.set()
        if errors:
            raise errors[0]
        return thread if thread.is_alive() else None

"""What tests ask of an FFN worker that balances experts, beside what `Inspection` tells."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

import msgspec

from afd_shim.testing.worker_extension import Inspection

if TYPE_CHECKING:
    from afd_shim.workers.ffn import FFNRole

__all__ = ["EplbInspection"]


class EplbInspection(Inspection):
    """Methods for `collective_rpc` of an FFN server; every one returns a JSON-able dictionary."""

    def inspect_hello(self) -> dict[str, Any]:
        """What this rank tells its peers of itself: a test that plays an Attention rank says the same."""
        fields: dict[str, Any] = msgspec.to_builtins(self._role()._hello())  # noqa: SLF001 - the test is a peer
        return fields

    def inspect_eplb(self) -> dict[str, object]:
        """vLLM's own state: this process, counters, placement, recorded load, and a checksum of every expert held here.

        `window` is the load window summed over its steps, `[layers][physical experts]`;
        `checksums` is `[layers][local experts]`.
        """
        balancer = self._role().balancer
        assert balancer is not None  # the server balances experts
        state, model = balancer._eplb.state, balancer._eplb.model  # noqa: SLF001 - that is what is inspected
        return {
            "pid": os.getpid(),
            "counters": balancer.counters(),
            "rearrangement_step": state.expert_rearrangement_step,
            "window": model.expert_load_window.sum(dim=0).tolist(),
            "placement": model.physical_to_logical_map.tolist(),
            "checksums": [
                [
                    hashlib.sha256(b"".join(weight[slot].numpy().tobytes() for weight in layer)).hexdigest()[:16]
                    for slot in range(layer[0].shape[0])
                ]
                for layer in model.model.expert_weights
            ],
        }

    def _role(self) -> FFNRole:
        return self  # type: ignore[return-value]  # vLLM mixes this class into the worker's

"""The one piece of process-wide state: which role this worker process has taken.

WARNING: global state. A worker process takes exactly one role, before its model is built, and keeps
it until it ends; the patches read it because the functions they replace carry no such argument. Two
engines in one process (vLLM's in-process executor) take it one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from afd_shim.errors import LayerError

if TYPE_CHECKING:
    import torch

    from afd_shim.config import AFDConfig
    from afd_shim.moe.checkpoint import CheckpointPlan
    from afd_shim.moe.layers import MoELayer
    from afd_shim.moe.proxy import RemoteFFNProxy

__all__ = ["Building", "RoleContext", "current", "release", "take"]


class Building(Enum):
    """What the patched builders do with a model under construction."""

    SKELETON = "skeleton"  # the whole model, untouched, on the meta device: to learn who owns what
    ROLE = "role"  # what this role owns


@dataclass(slots=True)
class RoleContext:
    """What the patches, the runners and the serving loop of this worker process share."""

    config: AFDConfig
    device: torch.device
    building: Building = Building.ROLE
    layers: list[MoELayer] = field(default_factory=list)  # in the order they were built
    plan: CheckpointPlan | None = None
    proxy: RemoteFFNProxy | None = None  # Attention only

    @contextmanager
    def build(self, what: Building) -> Iterator[list[MoELayer]]:
        """Build a model as `what`; yields the MoE layers it consists of, filled while building."""
        saved = self.building, self.layers
        self.building, self.layers = what, []
        try:
            yield self.layers
        finally:
            built, (self.building, self.layers) = self.layers, saved
            if what is Building.ROLE:
                self.layers = built


_current: RoleContext | None = None


def take(context: RoleContext) -> None:
    """Take a role in this process; the latest one counts."""
    global _current  # noqa: PLW0603 - the documented process-wide state
    _current = context


def release(context: RoleContext) -> None:
    """Give the role back, if it is still the one in force."""
    global _current  # noqa: PLW0603 - the documented process-wide state
    if _current is context:
        _current = None


def current() -> RoleContext:
    """The role of this process.

    Raises:
        LayerError: when no role has been taken: a patched builder ran outside an AFD worker.

    """
    if _current is None:
        raise LayerError(
            "a model is being built in a process that has taken no AFD role; "
            "AFD workers take theirs before building. Start the server with an 'afd' configuration."
        )
    return _current


def active() -> bool:
    """Whether this process has taken a role."""
    return _current is not None

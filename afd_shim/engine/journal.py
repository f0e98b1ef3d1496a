"""What was replaced, where, and by what: enough to put every owner back by identity."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import final

from afd_shim.engine.holders import Alias
from afd_shim.engine.patch import Patch
from afd_shim.engine.target import Located

__all__ = ["Entry", "State", "reaches"]


@final
class State(enum.Enum):
    """Where an installed replacement stands now."""

    OURS = "in place"
    COVERED = "under someone else's wrapper"
    LOST = "gone"


@final
@dataclass
class Entry:
    """One installed patch."""

    patch: Patch
    #: The target as it was found.
    located: Located
    #: What took its place.
    replacement: object
    #: The other namespaces that held the original and were rebound.
    aliases: list[Alias] = field(default_factory=list)
    #: The patch of the same set that owns the same target and was built just before this one.
    below: Entry | None = None
    #: Someone else's wrapper that was there before, described; empty when there was none.
    foreign: str = ""

    def install(self) -> None:
        """Put the replacement into the owner and into every alias."""
        setattr(self.located.owner, self.located.name, self.replacement)
        for module, name in self.aliases:
            setattr(module, name, self.replacement)

    def restore(self) -> list[str]:
        """Put the original back wherever the value is still ours.

        Returns:
            The places that hold something else by now and were left alone.
        """
        owner, name = self.located.owner, self.located.name
        left = []
        if vars(owner).get(name) is not self.replacement:
            if vars(owner).get(name) is not self.located.value:
                left.append(f"{owner.__name__}.{name}")
        elif self.located.own:
            setattr(owner, name, self.located.value)
        else:
            delattr(owner, name)  # It was inherited: an own attribute would outlive a change of the base.
        for module, alias in self.aliases:
            if vars(module).get(alias) is self.replacement:
                setattr(module, alias, self.located.value)
            elif vars(module).get(alias) is not self.located.value:
                left.append(f"{module.__name__}.{alias}")
        return left

    def state(self) -> State:
        """Look at the target as it is now, freshly found: its module may have been reloaded."""
        try:
            current = self.patch.target.locate().value
        except LookupError:
            return State.LOST
        if current is self.replacement:
            return State.OURS
        return State.COVERED if reaches(current, self.replacement) else State.LOST


def reaches(value: object, wanted: object) -> bool:
    """Tell whether following `__wrapped__` from `value` leads to `wanted`."""
    seen: set[int] = set()
    while id(value) not in seen:
        if value is wanted:
            return True
        seen.add(id(value))
        value = getattr(value, "__wrapped__", None)
    return False

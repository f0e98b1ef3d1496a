"""`Patch` and `PatchSet`: what to replace, how, why and until when, as data checked when declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, final

from afd_shim.engine.target import Target
from afd_shim.errors import DeclarationError

__all__ = ["Build", "Patch", "PatchSet", "Strategy"]

#: seam: upstream looks the name up in its owner at call time, so only the owner changes.
#: replace: a new function, or a subclass; every module that imported the old one is rebound.
#: wrap: a wrapt wrapper around whatever is there, ours or someone else's; rebound likewise.
Strategy = Literal["seam", "replace", "wrap"]

_STRATEGIES = frozenset(Strategy.__args__)  # type: ignore[attr-defined]  # typeshed hides a Literal's arguments

#: Takes what the target is now. Gives what to install or, for wrap, a wrapt wrapper function
#: `wrapper(wrapped, instance, args, kwargs)`. May raise to refuse: the whole set then rolls back.
Build = Callable[..., object]


@final
@dataclass(frozen=True)
class Patch:
    """One replacement of one upstream symbol.

    Raises:
        DeclarationError: something is missing or contradictory.
    """

    name: str
    target: Target
    strategy: Strategy
    #: A module-level function.
    build: Build
    #: Why it is needed, in words.
    why: str
    #: The upstream file, symbol and releases it was read in.
    upstream: str
    #: The releases it has been proven on.
    releases: tuple[str, ...]
    #: When it can go.
    until: str
    #: Names of patches of the same set that must be in place before this one.
    after: tuple[str, ...] = ()
    #: Compiled code reaches the target. Dynamo silently calls the original of a wrapt wrapper
    #: (torch 2.13, wrapt 1.17 and 2.5), so such a target is never wrapped.
    traced: bool = False
    #: Symbols that the patch subclasses or calls and does not replace: fingerprinted too.
    relies_on: tuple[Target, ...] = ()
    #: Classes of which no instance may exist yet: a patch that came after them would be half effective.
    instances: tuple[Target, ...] = ()
    #: The replacement calls whatever it replaced, so it may sit on top of someone else's wrapper.
    stacks: bool = False
    #: The set is still whole when the user skips this one.
    optional: bool = False

    def __post_init__(self) -> None:
        for flaw in (*self._missing(), *self._contradictions()):
            raise DeclarationError(f"Patch {self.name!r}: {flaw}. Correct its declaration.")

    def _missing(self) -> Iterator[str]:
        if not self.name.isidentifier():
            yield "the name must be an identifier"
        if self.strategy not in _STRATEGIES:
            yield f"strategy {self.strategy!r} does not exist, use one of {sorted(_STRATEGIES)}"
        if not callable(self.build) or not is_importable(self.build):
            yield "`build` must be a function defined at module level"
        for word in ("why", "upstream", "until"):
            if not getattr(self, word).strip():
                yield f"`{word}` is empty"
        if not self.releases:
            yield "`releases` is empty"

    def _contradictions(self) -> Iterator[str]:
        if self.strategy == "replace" and self.target.kind == "value":
            yield "a value is a seam: its holders cannot be found by identity"
        if self.strategy == "wrap" and self.target.kind in ("class", "property", "value"):
            yield f"a {self.target.kind} is replaced, never wrapped: a proxy changes its type"
        if self.strategy == "wrap" and self.traced:
            yield "compiled code bypasses a wrapt wrapper silently, so a traced target cannot be wrapped"
        if self.name in self.after:
            yield "it cannot come after itself"

    @property
    def targets(self) -> tuple[Target, ...]:
        """Every symbol whose source must be the expected one: the target and what it relies on."""
        return tuple(dict.fromkeys((self.target, *self.relies_on, *self.instances)))


@final
@dataclass(frozen=True)
class PatchSet:
    """Patches that stand or fall together, in the order in which they are applied.

    Raises:
        DeclarationError: a name or a target appears twice, or `after` cannot be satisfied.
    """

    name: str
    patches: tuple[Patch, ...]

    def __post_init__(self) -> None:
        names = [patch.name for patch in self.patches]
        for name in names:
            if names.count(name) > 1:
                raise DeclarationError(f"Set {self.name!r} lists patch {name!r} twice. Remove one.")
        for patch in self.patches:
            for before in patch.after:
                if before not in names:
                    raise DeclarationError(
                        f"Set {self.name!r}: {patch.name!r} comes after {before!r}, which is not in the set. Add it."
                    )
        object.__setattr__(self, "patches", self._ordered())
        self._refuse_two_owners()

    def _ordered(self) -> tuple[Patch, ...]:
        ordered: dict[str, Patch] = {}
        waiting = list(self.patches)
        while waiting:
            ready = next((patch for patch in waiting if set(patch.after) <= ordered.keys()), None)
            if ready is None:
                circle = ", ".join(patch.name for patch in waiting)
                raise DeclarationError(f"Set {self.name!r}: {circle} come after each other. Break the circle.")
            ordered[ready.name] = ready
            waiting.remove(ready)
        return tuple(ordered.values())

    def _refuse_two_owners(self) -> None:
        owners: dict[str, Patch] = {}
        for patch in self.patches:
            first = owners.get(patch.target.symbol)
            if first is not None and first.name not in patch.after:
                raise DeclarationError(
                    f"Set {self.name!r}: {first.name!r} and {patch.name!r} both own {patch.target}."
                    " Say with `after` which one comes on top, or merge them."
                )
            owners[patch.target.symbol] = patch

    def __iter__(self) -> Iterator[Patch]:
        return iter(self.patches)

    def __len__(self) -> int:
        return len(self.patches)


def is_importable(value: object) -> bool:
    """Tell whether pickle and a spawned process can find `value` by its module and qualified name."""
    qualname = getattr(value, "__qualname__", None)
    return isinstance(qualname, str) and "<" not in qualname

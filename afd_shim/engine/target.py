"""`Target`: one upstream symbol, by module and qualified name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, NamedTuple, final

from afd_shim.errors import DeclarationError

__all__ = ["Kind", "Located", "Target"]

#: What a target is in its source. A value is anything a module or class body assigns.
Kind = Literal["function", "method", "classmethod", "staticmethod", "property", "class", "value"]

_KINDS = frozenset(Kind.__args__)  # type: ignore[attr-defined]  # typeshed hides a Literal's arguments


class Located(NamedTuple):
    """Where a target lives in this process, and what is there now."""

    #: The module or class whose namespace is read and written.
    owner: ModuleType | type
    name: str
    #: The raw attribute: a function, not a bound method; a property, not its value.
    value: object
    #: False when a base class provides the value and `owner` only inherits it.
    own: bool


@final
@dataclass(frozen=True)
class Target:
    """An upstream symbol, written `module:qualname`, and what kind of thing it is.

    The module is the one that defines the symbol, never one that re-exports it: a fingerprint
    is read from the defining source file, and re-exports are found by identity.

    Raises:
        DeclarationError: the symbol is not `module:qualname`, or its kind does not exist.
    """

    symbol: str
    kind: Kind

    def __post_init__(self) -> None:
        module, colon, qualname = self.symbol.partition(":")
        names = [*module.split("."), *qualname.split(".")]
        if not colon or not all(name.isidentifier() for name in names):
            raise DeclarationError(f"{self.symbol!r} is no target. Write it as 'package.module:Qualified.name'.")
        if self.kind not in _KINDS:
            raise DeclarationError(f"{self.symbol}: kind {self.kind!r} does not exist. Use one of {sorted(_KINDS)}.")

    @property
    def module(self) -> str:
        """The defining module's dotted name."""
        return self.symbol.partition(":")[0]

    @property
    def qualname(self) -> str:
        """The symbol's qualified name within its module."""
        return self.symbol.partition(":")[2]

    @property
    def package(self) -> str:
        """The top-level package, the only one whose modules are searched for aliases."""
        return self.module.partition(".")[0]

    def is_imported(self) -> bool:
        """Tell whether the defining module has been executed to its end in this process."""
        module = sys.modules.get(self.module)
        spec = getattr(module, "__spec__", None)
        return module is not None and not getattr(spec, "_initializing", False)

    def locate(self) -> Located:
        """Find the symbol in this process without binding it; its module must have been imported.

        Raises:
            LookupError: the module is not imported, or the symbol is not in it.
        """
        module = sys.modules.get(self.module)
        if module is None:
            raise LookupError(f"{self.module} is not imported")
        owner: ModuleType | type = module
        *parents, name = self.qualname.split(".")
        for parent in parents:
            found = vars(owner).get(parent)
            if not isinstance(found, type):
                raise LookupError(f"{self.module} has no class {parent!r}")  # noqa: TRY004  # as for any symbol
            owner = found
        for number, place in enumerate([owner, *_bases(owner)]):
            if name in vars(place):
                return Located(owner, name, vars(place)[name], own=number == 0)
        raise LookupError(f"{self.module} has no {self.qualname!r}")

    def __str__(self) -> str:
        return self.symbol


def _bases(owner: ModuleType | type) -> tuple[type, ...]:
    return owner.__mro__[1:] if isinstance(owner, type) else ()

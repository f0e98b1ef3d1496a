"""Who holds a symbol: modules that imported it by name, and things that hide it from rebinding."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Collection, Iterable, Iterator
from types import CellType, FunctionType, ModuleType

__all__ = ["Alias", "find_aliases", "find_hidden_holders", "find_instances"]

#: A module namespace and the name under which it holds a symbol.
Alias = tuple[ModuleType, str]


def _modules(package: str) -> Iterator[ModuleType]:
    prefix = package + "."
    # A copy: another thread may be importing.
    for name, module in list(sys.modules.items()):
        if (name == package or name.startswith(prefix)) and isinstance(module, ModuleType):
            yield module


def find_aliases(package: str, symbols: Collection[object]) -> dict[int, list[Alias]]:
    """Find the module namespaces under `package` that hold each symbol, by identity.

    Returns:
        For the `id` of each symbol, its aliases, the defining module's own name included.
    """
    wanted: dict[int, list[Alias]] = {id(symbol): [] for symbol in symbols}
    for module in _modules(package):
        for name, value in list(vars(module).items()):
            sites = wanted.get(id(value))
            if sites is not None:
                sites.append((module, name))
    return wanted


def find_hidden_holders(package: str, symbols: Collection[object]) -> dict[int, list[str]]:
    """Find what under `package` holds a symbol where no rebinding reaches it.

    Looked at, in every module of the package: the attributes of classes, the defaults and
    closures of functions and methods, `functools.partial` objects and one level of dicts, lists
    and tuples.

    Returns:
        For the `id` of each symbol, descriptions of its holders.
    """
    wanted: dict[int, list[str]] = {id(symbol): [] for symbol in symbols}
    ids = set(wanted)
    for module in _modules(package):
        for name, value in list(vars(module).items()):
            # A worker process has 50 000 such values: the loops over them stay in C.
            for held, how in _held(value, module.__name__):
                if not ids.isdisjoint(map(id, held)):
                    for item in held:
                        if id(item) in ids:
                            wanted[id(item)].append(f"{module.__name__}:{name} ({how})")
    return wanted


_Held = Iterable[tuple[Collection[object], str]]


def _held(value: object, module: str) -> _Held:
    if type(value) is FunctionType:
        # What is defined elsewhere is looked at there.
        return _held_by_function(value) if value.__module__ == module else ()
    if isinstance(value, type):
        return _held_by_class(value) if value.__module__ == module else ()
    if isinstance(value, functools.partial):
        return [((value.func,), "functools.partial")]
    if isinstance(value, dict):
        return [(list(value.values()), "a dict's value")]
    if isinstance(value, (list, tuple)):
        return [(list(value), "a sequence's item")]
    return ()


def _held_by_class(cls: type) -> _Held:
    attributes = vars(cls)
    # A method is held by its class by right; a module-level symbol is not.
    held: list[tuple[Collection[object], str]] = [(list(attributes.values()), f"attribute of {cls.__name__}")]
    for attribute in attributes.values():
        if type(attribute) is FunctionType:
            held += _held_by_function(attribute)
    return held


def _held_by_function(function: FunctionType) -> list[tuple[Collection[object], str]]:
    held: list[tuple[Collection[object], str]] = []
    if function.__defaults__ is not None:
        held.append((function.__defaults__, f"default argument of {function.__name__}"))
    if function.__kwdefaults__ is not None:
        held.append((list(function.__kwdefaults__.values()), f"default argument of {function.__name__}"))
    if function.__closure__ is not None:
        held.append((_contents(function.__closure__), f"closure of {function.__name__}"))
    return held


def _contents(closure: tuple[CellType, ...]) -> list[object]:
    contents: list[object] = []
    for cell in closure:
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            continue  # An empty cell holds nothing.
    return contents


def find_instances(cls: type) -> int:
    """Count the living instances of a class and its subclasses."""
    classes: list[type] = [cls]
    for known in classes:
        # Not `known.__subclasses__()`: a metaclass needs the class as an argument.
        subclasses: list[type] = type.__subclasses__(known)
        classes += [subclass for subclass in subclasses if subclass not in classes]
    # An instance refers to its class, so one pass finds them all.
    return sum(type(holder) in classes for holder in gc.get_referrers(*classes))

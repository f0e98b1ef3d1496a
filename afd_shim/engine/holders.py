"""Who holds a symbol: modules that imported it by name, and things that hide it from rebinding."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType

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
    closures of functions, `functools.partial` objects and one level of dicts, lists and tuples.

    Returns:
        For the `id` of each symbol, descriptions of its holders.
    """
    wanted: dict[int, list[str]] = {id(symbol): [] for symbol in symbols}
    for module in _modules(package):
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", module.__name__) != module.__name__:
                continue  # Defined elsewhere, and looked at there.
            for held, how in _held(value):
                holders = wanted.get(id(held))
                if holders is not None:
                    holders.append(f"{module.__name__}:{name} ({how})")
    return wanted


def _held(value: object) -> Iterator[tuple[object, str]]:
    if isinstance(value, type):
        for name, attribute in list(vars(value).items()):
            # A method is held by its class by right; a module-level symbol is not.
            yield attribute, f"class attribute {name}"
            if isinstance(attribute, FunctionType):
                yield from _held_by_function(attribute)
    elif isinstance(value, FunctionType):
        yield from _held_by_function(value)
    elif isinstance(value, functools.partial):
        yield value.func, "functools.partial"
    elif isinstance(value, Mapping):
        for item in list(value.values()):
            yield item, "a mapping's value"
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in list(value):
            yield item, "a sequence's item"


def _held_by_function(function: FunctionType) -> Iterator[tuple[object, str]]:
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield default, f"default argument of {function.__name__}"
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents, f"closure of {function.__name__}"
        except ValueError:
            continue  # An empty cell holds nothing.


def find_instances(cls: type) -> int:
    """Count the living instances of a class and its subclasses."""
    classes: list[type] = [cls]
    for known in classes:
        # Not `known.__subclasses__()`: a metaclass needs the class as an argument.
        subclasses: list[type] = type.__subclasses__(known)
        classes += [subclass for subclass in subclasses if subclass not in classes]
    # An instance refers to its class, so one pass finds them all.
    return sum(type(holder) in classes for holder in gc.get_referrers(*classes))

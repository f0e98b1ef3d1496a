"""One attempt to apply patches: everything is built and checked first, then installed, or nothing stays."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from types import FunctionType
from typing import final

from afd_shim.engine.build import build_replacement
from afd_shim.engine.fingerprint import SourceTree
from afd_shim.engine.holders import Alias, find_aliases, find_hidden_holders, find_instances
from afd_shim.engine.journal import Entry
from afd_shim.engine.patch import Patch
from afd_shim.errors import ConflictError, LateActivationError

__all__ = ["Transaction", "refuse_instances"]


@final
class Transaction:
    """Applies patches in order.

    Args:
        package: the top-level package whose modules are searched for holders of the targets.
        tree: its source.
        applied: what other transactions have put in place.
    """

    def __init__(self, package: str, tree: SourceTree, applied: Collection[Entry]) -> None:
        self._package = package
        self._tree = tree
        self._applied = applied
        #: The patch at work, the one to blame when something raises.
        self.current: Patch | None = None
        #: What has been put in place so far.
        self.installed: list[Entry] = []

    def run(self, patches: Sequence[Patch]) -> list[Entry]:
        """Apply the patches, importing their modules; whatever is raised, every owner is as before.

        Raises:
            ConflictError: someone else replaced a target.
            LateActivationError: something holds a target where rebinding does not reach it.
            Exception: what a builder raised.
        """
        entries: list[Entry] = []
        try:
            for patch in patches:
                self.current = patch
                entries.append(self._prepare(patch, entries))
            self._find_holders(entries)
            for entry in entries:
                self.current = entry.patch
                # Before it is complete: a failure half-way is undone too.
                self.installed.append(entry)
                entry.install()
        except BaseException:  # An interrupt must not leave half a set either.
            for entry in reversed(self.installed):
                entry.restore()
            raise
        self.current = None
        return entries

    def _prepare(self, patch: Patch, earlier: Sequence[Entry]) -> Entry:
        importlib.import_module(patch.target.module)
        refuse_instances(patch, "applied")
        located = patch.target.locate()
        below = next((entry for entry in reversed(earlier) if entry.patch.target == patch.target), None)
        if below is not None:
            located = located._replace(value=below.replacement, own=True)
            return Entry(patch, located, build_replacement(patch, located.value), below=below)
        owner = next((entry.patch for entry in self._applied if entry.replacement is located.value), None)
        if owner is not None:
            raise ConflictError(
                f"{patch.target} is patched by {owner.name!r} of another set already. Put {patch.name!r} into the same"
                " set, after it."
            )
        foreign = self._foreign(patch, located.value)
        if foreign and not (patch.stacks or patch.strategy == "wrap"):
            raise ConflictError(
                f"{patch.target} was replaced by someone else before ({foreign}), so patch {patch.name!r} would not"
                " stand on the source it was proven on. Remove the other patch or plugin."
            )
        return Entry(patch, located, build_replacement(patch, located.value), foreign=foreign)

    def _foreign(self, patch: Patch, value: object) -> str:
        """Describe what someone put in a target's place; empty for upstream's own definition."""
        kind, module = patch.target.kind, importlib.import_module(patch.target.module)
        if kind == "value":
            return ""
        if kind == "class":
            same = (getattr(value, "__module__", ""), getattr(value, "__qualname__", ""))
            return "" if same == (patch.target.module, patch.target.qualname) else ":".join(same)
        function = getattr(value, "fget" if kind == "property" else "__func__", value)
        if isinstance(function, FunctionType) and function.__globals__ is vars(module):
            return ""
        if self._tree.is_decorated(patch.target) and kind != "property":
            return ""  # The outermost function is the decorator's, and no one can tell whose.
        if isinstance(function, FunctionType):
            return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        return f"a {type(function).__module__}.{type(function).__qualname__}"

    def _find_holders(self, entries: Sequence[Entry]) -> None:
        """Find the aliases to rebind; a holder that rebinding does not reach ends the transaction."""
        originals = [entry.located.value for entry in entries if _is_rebound(entry.patch)]
        aliases: dict[int, list[Alias]] = find_aliases(self._package, originals) if originals else {}
        hidden = find_hidden_holders(self._package, originals) if originals else {}
        for entry in entries:
            self.current = entry.patch
            if entry.below is not None:
                entry.aliases = list(entry.below.aliases)
                continue
            holders = hidden.get(id(entry.located.value))
            if holders:
                raise LateActivationError(
                    f"Patch {entry.patch.name!r} comes too late: {entry.patch.target} is already held by"
                    f" {', '.join(holders)}, where it cannot be rebound. Let the patches be applied before that is"
                    " imported."
                )
            own = (entry.located.owner, entry.located.name)
            entry.aliases = [alias for alias in aliases.get(id(entry.located.value), ()) if alias != own]


def refuse_instances(patch: Patch, what: str) -> None:
    """Refuse to apply or deactivate a patch while objects live that would keep the old behaviour.

    Raises:
        LateActivationError: there are instances of a class that the patch names.
    """
    for target in patch.instances:
        if not target.is_imported():
            continue
        cls = target.locate().value
        count = find_instances(cls) if isinstance(cls, type) else 0
        if count:
            raise LateActivationError(
                f"Patch {patch.name!r} cannot be {what} any more: {count} instance(s) of {target} exist and would keep"
                " the old behaviour. Do it before they are built."
            )


def _is_rebound(patch: Patch) -> bool:
    """Tell whether other modules may hold the target by name: then they are rebound with its owner."""
    return patch.strategy != "seam" and "." not in patch.target.qualname

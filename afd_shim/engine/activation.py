"""`Activation`: applies patch sets in this process, each whole or not at all, and takes them out again.

There is one per process and it is the only global state of the engine. A forked child inherits
it together with the patches; a spawned one starts a new one. All entry points are idempotent.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Collection
from types import FunctionType
from typing import final

from afd_shim.engine.build import build_replacement
from afd_shim.engine.fingerprint import SourceTree
from afd_shim.engine.holders import Alias, find_aliases, find_hidden_holders, find_instances
from afd_shim.engine.hooks import PostImportFinder
from afd_shim.engine.journal import Entry, State
from afd_shim.engine.patch import Patch, PatchSet
from afd_shim.engine.report import Outcome, PatchReport, Report
from afd_shim.errors import ConflictError, EngineError, LateActivationError, PatchFailedError

__all__ = ["Activation"]


@final
class Activation:
    """The patches of one upstream package in this process.

    Args:
        tree: the package's source, to tell upstream's own definitions from someone's wrappers.
        release: the installed release.
        row: the matrix row in force, empty when there is none.
        digest: what every process of one deployment must agree on.
        skip: names of patches the user left out.
    """

    def __init__(
        self, tree: SourceTree, *, release: str, row: str, digest: str, skip: Collection[str] = ()
    ) -> None:
        self.package = tree.package.name
        self.release = release
        self.row = row
        self.digest = digest
        self._tree = tree
        self._skip = frozenset(skip)
        self._lock = threading.RLock()
        self._finder = PostImportFinder(self._module_imported, self._cannot_watch)
        #: Applied patches by name: the marker, set last and by the engine alone.
        self._journal: dict[str, Entry] = {}
        #: What became of patches that are not in the journal.
        self._outcomes: dict[str, PatchReport] = {}
        self._armed: dict[str, PatchSet] = {}
        #: What went wrong inside an import hook, raised by `require`.
        self._recorded: dict[str, EngineError] = {}

    def arm(self, patch_set: PatchSet) -> None:
        """Commit the set as soon as all its modules are imported: now, or from a post-import hook.

        Nothing is imported. Never raises: what goes wrong is recorded, and `require` raises it.
        """
        with self._lock:
            self._armed[patch_set.name] = patch_set
            missing = [patch.target.module for patch in patch_set if not patch.target.is_imported()]
            for module in missing:
                self._finder.watch(module)
            if not missing:
                self._commit_armed(patch_set)

    def commit(self, patch_set: PatchSet) -> Report:
        """Apply every patch of the set, importing the modules they need; all or nothing.

        Patches that are in place already, from this set or another one, stay as they are. One whose
        module was reloaded since is applied again.

        Raises:
            ConflictError: someone else replaced a target, or the selection contradicts itself.
            LateActivationError: something holds a target where rebinding does not reach it.
            PatchFailedError: building or installing raised; everything was restored.
        """
        with self._lock:
            self._check_selection(patch_set)
            entries: list[Entry] = []
            current: Patch | None = None
            installed: list[Entry] = []
            try:
                for patch in patch_set:
                    current = patch
                    if patch.name not in self._skip and not self._in_place(patch):
                        entries.append(self._prepare(patch, entries))
                aliases, hidden = self._find_holders(entries)
                for entry in entries:
                    current = entry.patch
                    self._use_aliases(entry, aliases, hidden)
                for entry in entries:
                    current = entry.patch
                    installed.append(entry)
                    entry.install()
            except BaseException as error:  # An interrupt must not leave half a set either; it is raised again.
                self._roll_back(patch_set, installed, current, error)
                if isinstance(error, EngineError):
                    error.report = self.report(patch_set)
                    raise
                if not isinstance(error, Exception):
                    raise
                name = current.name if current is not None else patch_set.name
                failure = PatchFailedError(
                    f"Patch {name!r} of set {patch_set.name!r} could not be applied"
                    f" ({type(error).__name__}: {error}); every patch of the set was taken out again."
                    " Report this with the output of `afd-shim doctor --json`."
                )
                failure.report = self.report(patch_set)
                raise failure from error
            for entry in entries:
                self._journal[entry.patch.name] = entry
                self._outcomes.pop(entry.patch.name, None)
            self._recorded.pop(patch_set.name, None)
            return self.report(patch_set)

    def require(self, patch_set: PatchSet) -> Report:
        """Raise unless every patch of the set is in force in this process.

        Raises:
            EngineError: what a hook recorded, or the first patch that is not in force and why.
        """
        with self._lock:
            report = self.report(patch_set)
            if patch_set.name in self._recorded:
                raise self._recorded[patch_set.name]
            for patch in report.patches:
                if patch.outcome not in (Outcome.APPLIED, Outcome.SKIPPED, Outcome.SHADOWED):
                    failure = LateActivationError if patch.outcome is Outcome.LATE else PatchFailedError
                    reason = f": {patch.reason}" if patch.reason else ""
                    error = failure(
                        f"Patch {patch.patch!r} of set {patch_set.name!r} is {patch.outcome}, not applied{reason}."
                        " Restart the process; if it stays so, report it with `afd-shim doctor --json`."
                    )
                    error.report = report
                    raise error
            return report

    def report(self, patch_set: PatchSet) -> Report:
        """Tell what became of every patch of a set, looking at the targets as they are now."""
        with self._lock:
            return Report(
                set_name=patch_set.name,
                package=self.package,
                release=self.release,
                row=self.row,
                digest=self.digest,
                pid=os.getpid(),
                patches=tuple(self._patch_report(patch, armed=patch_set.name in self._armed) for patch in patch_set),
            )

    def deactivate(self) -> tuple[PatchReport, ...]:
        """Take every patch out, last one first, and forget what was armed.

        A patch under someone else's wrapper stays, with their wrapper: "shadowed".

        Raises:
            LateActivationError: objects built by the patched code exist and would keep it.
        """
        with self._lock:
            self._refuse_instances([entry.patch for entry in self._journal.values()], "deactivated")
            self._finder.unwatch()
            self._armed.clear()
            self._recorded.clear()
            reports = []
            for name, entry in reversed(list(self._journal.items())):
                if self._state(entry) is State.COVERED:
                    reports.append(self._patch_report(entry.patch, armed=False))
                    continue
                left = entry.restore()
                del self._journal[name]
                outcome = Outcome.SHADOWED if left else Outcome.ROLLED_BACK
                reason = f"left alone, someone else's: {', '.join(left)}" if left else "deactivated"
                self._outcomes[name] = PatchReport(name, entry.patch.target.symbol, outcome, reason)
                reports.append(self._outcomes[name])
            return tuple(reports)

    # Commit, step by step ------------------------------------------------------------------

    def _check_selection(self, patch_set: PatchSet) -> None:
        for patch in patch_set:
            entry = self._journal.get(patch.name)
            if entry is not None and entry.patch.target != patch.target:
                raise ConflictError(
                    f"Patch {patch.name!r} is applied to {entry.patch.target} already; set {patch_set.name!r}"
                    f" wants it on {patch.target}. Give the two patches different names."
                )
            if patch.name in self._skip and not patch.optional:
                raise ConflictError(
                    f"Patch {patch.name!r} is to be skipped, but set {patch_set.name!r} stands or falls as a whole."
                    " Do not skip it."
                )

    def _in_place(self, patch: Patch) -> bool:
        entry = self._journal.get(patch.name)
        if entry is None:
            return False
        if self._state(entry) is not State.LOST:
            return True
        entry.restore()  # Its module was reloaded: what is left are aliases of the old one.
        del self._journal[patch.name]
        return False

    def _prepare(self, patch: Patch, earlier: list[Entry]) -> Entry:
        importlib.import_module(patch.target.module)
        located = patch.target.locate()
        foreign = self._foreign(patch, located.value)
        below = next((entry for entry in reversed(earlier) if entry.patch.target == patch.target), None)
        if below is not None:
            located = located._replace(value=below.replacement, own=True)
        elif foreign and not (patch.stacks or patch.strategy == "wrap"):
            raise ConflictError(
                f"{patch.target} was replaced by someone else before afd-shim came ({foreign}), so patch"
                f" {patch.name!r} would not stand on the source it was proven on. Remove the other patch or plugin."
            )
        self._refuse_instances([patch], "applied")
        return Entry(patch, located, build_replacement(patch, located.value), below=below, foreign=foreign)

    def _foreign(self, patch: Patch, value: object) -> str:
        """Describe what someone put in a target's place; empty for upstream's own definition."""
        if any(entry.replacement is value for entry in self._journal.values()):
            return ""
        kind = patch.target.kind
        if kind == "value":
            return ""
        if kind == "class":
            same = (getattr(value, "__module__", ""), getattr(value, "__qualname__", ""))
            return "" if same == (patch.target.module, patch.target.qualname) else f"{same[0]}:{same[1]}"
        function = getattr(value, "fget" if kind == "property" else "__func__", value)
        module = importlib.import_module(patch.target.module)
        if isinstance(function, FunctionType) and function.__globals__ is vars(module):
            return ""
        if self._tree.is_decorated(patch.target):
            return ""  # The outermost function is the decorator's, and no one can tell whose.
        if isinstance(function, FunctionType):
            return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        return f"a {type(function).__module__}.{type(function).__qualname__}"

    def _find_holders(self, entries: list[Entry]) -> tuple[dict[int, list[Alias]], dict[int, list[str]]]:
        originals = [entry.located.value for entry in entries if _is_rebound(entry.patch)]
        if not originals:
            return {}, {}
        return find_aliases(self.package, originals), find_hidden_holders(self.package, originals)

    def _use_aliases(self, entry: Entry, aliases: dict[int, list[Alias]], hidden: dict[int, list[str]]) -> None:
        holders = hidden.get(id(entry.located.value))
        if holders:
            raise LateActivationError(
                f"Patch {entry.patch.name!r} comes too late: {entry.patch.target} is already held by"
                f" {', '.join(holders)}, where it cannot be rebound. Let the patches be applied before that is"
                " imported."
            )
        if entry.below is not None:
            entry.aliases = list(entry.below.aliases)
            return
        own = (entry.located.owner, entry.located.name)
        entry.aliases = [alias for alias in aliases.get(id(entry.located.value), ()) if alias != own]

    def _refuse_instances(self, patches: list[Patch], what: str) -> None:
        for patch in patches:
            for target in patch.instances:
                if not target.is_imported():
                    continue
                cls = target.locate().value
                count = find_instances(cls) if isinstance(cls, type) else 0
                if count:
                    raise LateActivationError(
                        f"Patch {patch.name!r} cannot be {what} any more: {count} instance(s) of {target} exist"
                        " and would keep the old behaviour. Do it before the model is built."
                    )

    def _roll_back(
        self, patch_set: PatchSet, installed: list[Entry], current: Patch | None, error: BaseException
    ) -> None:
        for entry in reversed(installed):
            entry.restore()
            name = entry.patch.name
            self._outcomes[name] = PatchReport(name, entry.patch.target.symbol, Outcome.ROLLED_BACK)
        for patch in patch_set:
            if patch is current:
                outcome = Outcome.LATE if isinstance(error, LateActivationError) else Outcome.FAILED
                reason = f"{type(error).__name__}: {error}"
                self._outcomes[patch.name] = PatchReport(patch.name, patch.target.symbol, outcome, reason)

    # Reports -------------------------------------------------------------------------------

    def _patch_report(self, patch: Patch, *, armed: bool) -> PatchReport:
        def because(outcome: Outcome, reason: str = "") -> PatchReport:
            return PatchReport(patch.name, patch.target.symbol, outcome, reason)

        entry = self._journal.get(patch.name)
        if entry is not None:
            state = self._state(entry)
            if state is State.OURS:
                return because(Outcome.APPLIED, f"on top of {entry.foreign}" if entry.foreign else "")
            if state is State.COVERED:
                return because(Outcome.SHADOWED, "someone wrapped it after us; their wrapper leads to ours")
            return because(Outcome.LATE, "its module was reloaded or the symbol was replaced after us")
        if patch.name in self._skip:
            return because(Outcome.SKIPPED, "left out by the user")
        if patch.name in self._outcomes:
            return self._outcomes[patch.name]
        if armed:
            return because(Outcome.PENDING, f"{patch.target.module} is not imported yet")
        return because(Outcome.INERT)

    def _state(self, entry: Entry) -> State:
        """Look at a patch; one that lies under another patch of ours is where that one is."""
        above = next((other for other in self._journal.values() if other.below is entry), None)
        return entry.state() if above is None else self._state(above)

    # Hooks ---------------------------------------------------------------------------------

    def _module_imported(self, module: str) -> None:
        with self._lock:
            for patch_set in list(self._armed.values()):
                modules = [patch.target.module for patch in patch_set]
                # The hook runs while the import system still calls the module "initializing".
                if module in modules and all(
                    name == module or patch.target.is_imported() for name, patch in zip(modules, patch_set, strict=True)
                ):
                    self._commit_armed(patch_set)

    def _cannot_watch(self, module: str, error: Exception) -> None:
        for patch_set in self._armed.values():
            if any(patch.target.module == module for patch in patch_set):
                failure = PatchFailedError(f"The import of {module} cannot be watched ({error}). Commit the set later.")
                failure.__cause__ = error
                self._recorded[patch_set.name] = failure

    def _commit_armed(self, patch_set: PatchSet) -> None:
        try:
            self.commit(patch_set)
        except EngineError as error:
            self._recorded[patch_set.name] = error


def _is_rebound(patch: Patch) -> bool:
    """Tell whether other modules may hold the target by name: then they are rebound with its owner."""
    return patch.strategy != "seam" and "." not in patch.target.qualname

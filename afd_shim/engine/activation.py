"""`Activation`: applies patch sets in this process, each whole or not at all, and takes them out again.

There is one per process and it is the only global state of the engine. A forked child inherits
it together with the patches; a spawned one starts a new one. All entry points are idempotent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from typing import final

from afd_shim.engine.fingerprint import SourceTree
from afd_shim.engine.hooks import PostImportFinder
from afd_shim.engine.journal import Entry, State
from afd_shim.engine.patch import Patch, PatchSet
from afd_shim.engine.report import Outcome, PatchReport, Report
from afd_shim.engine.transaction import Transaction, refuse_instances
from afd_shim.errors import ConflictError, EngineError, LateActivationError, PatchFailedError

__all__ = ["Activation"]


@final
class Activation:
    """The patches of one upstream package in this process.

    Args:
        tree: the package's source, to tell upstream's own definitions from someone's wrappers.
        release: the installed release, in words.
        row: the matrix row in force, empty when there is none.
        digest: what every process of one deployment must agree on.
    """

    def __init__(self, tree: SourceTree, *, release: str, row: str, digest: str) -> None:
        self.package = tree.package.name
        self.release = release
        self.row = row
        self.digest = digest
        self._tree = tree
        self._lock = threading.RLock()
        self._finder = PostImportFinder(self._module_imported, self._cannot_watch)
        #: Applied patches by name: the marker, set last and by the engine alone.
        self._journal: dict[str, Entry] = {}
        #: What became of patches that are not in the journal.
        self._outcomes: dict[str, PatchReport] = {}
        self._armed: dict[str, PatchSet] = {}
        #: What went wrong inside an import hook, raised by `require`.
        self._recorded: dict[str, EngineError] = {}

    def arm(self, patch_set: PatchSet) -> Report:
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
            return self.report(patch_set)

    def commit(self, patch_set: PatchSet, *, skip: Collection[str] = ()) -> Report:
        """Apply every patch of the set, importing the modules they need; all or nothing.

        Patches that are in place already, from this set or another one, stay as they are. One whose
        module was reloaded since is applied again.

        Args:
            patch_set: the set.
            skip: names of patches that the user leaves out; only optional ones can be.

        Raises:
            ConflictError: someone else replaced a target, or the selection contradicts itself.
            LateActivationError: something holds a target where rebinding does not reach it.
            PatchFailedError: building or installing raised; everything was restored.
        """
        with self._lock:
            self._check_selection(patch_set, skip)
            waiting = [patch for patch in patch_set if patch.name not in skip and not self._in_place(patch)]
            transaction = Transaction(self.package, self._tree, self._journal.values())
            try:
                entries = transaction.run(waiting)
            except EngineError as error:
                self._note_failure(transaction, error)
                error.report = self.report(patch_set)
                raise
            except Exception as error:
                self._note_failure(transaction, error)
                name = transaction.current.name if transaction.current else ""
                failure = PatchFailedError(
                    f"Patch {name!r} of set {patch_set.name!r} could not be applied"
                    f" ({type(error).__name__}: {error}); nothing of the set is in force. Report this with the output"
                    " of `afd-shim doctor --json`."
                )
                failure.report = self.report(patch_set)
                raise failure from error
            for entry in entries:
                self._journal[entry.patch.name] = entry
                self._outcomes.pop(entry.patch.name, None)
            for patch in patch_set:
                if patch.name in skip:
                    self._note(patch, Outcome.SKIPPED, "left out by the user")
            self._recorded.pop(patch_set.name, None)
            return self.report(patch_set)

    def require(self, patch_set: PatchSet) -> Report:
        """Raise unless every patch of the set is in force in this process.

        Raises:
            EngineError: what a hook recorded, or the first patch that is not in force and why.
        """
        with self._lock:
            report = self.report(patch_set)
            if report.ok:
                return report
            if patch_set.name in self._recorded:
                raise self._recorded[patch_set.name]
            patch = next(patch for patch in report.patches if not patch.outcome.good)
            failure = LateActivationError if patch.outcome is Outcome.LATE else PatchFailedError
            reason = f": {patch.reason}" if patch.reason else ""
            error = failure(
                f"Patch {patch.patch!r} of set {patch_set.name!r} is {patch.outcome}, not applied{reason}. Restart the"
                " process; if it stays so, report it with the output of `afd-shim doctor --json`."
            )
            error.report = report
            raise error

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
            for entry in self._journal.values():
                refuse_instances(entry.patch, "deactivated")
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
                self._note(entry.patch, outcome, f"someone else's, left alone: {', '.join(left)}" if left else "")
                reports.append(self._outcomes[name])
            return tuple(reports)

    def _check_selection(self, patch_set: PatchSet, skip: Collection[str]) -> None:
        for patch in patch_set:
            entry = self._journal.get(patch.name)
            if entry is not None and entry.patch.target != patch.target:
                raise ConflictError(
                    f"Patch {patch.name!r} is applied to {entry.patch.target} already; set {patch_set.name!r}"
                    f" wants it on {patch.target}. Give the two patches different names."
                )
            if patch.name in skip and not patch.optional:
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

    def _state(self, entry: Entry) -> State:
        """Look at a patch; one that lies under another patch of ours is where that one is."""
        above = next((other for other in self._journal.values() if other.below is entry), None)
        return entry.state() if above is None else self._state(above)

    def _note(self, patch: Patch, outcome: Outcome, reason: str = "") -> None:
        self._outcomes[patch.name] = PatchReport(patch.name, patch.target.symbol, outcome, reason)

    def _note_failure(self, transaction: Transaction, error: Exception) -> None:
        for entry in transaction.installed:
            self._note(entry.patch, Outcome.ROLLED_BACK, "another patch of the set failed")
        if transaction.current is not None:
            outcome = Outcome.LATE if isinstance(error, LateActivationError) else Outcome.FAILED
            self._note(transaction.current, outcome, f"{type(error).__name__}: {error}")

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
            return because(Outcome.LATE, "its module was reloaded, or someone replaced it after us")
        if patch.name in self._outcomes:
            return self._outcomes[patch.name]
        if armed:
            return because(Outcome.PENDING, f"{patch.target.module} is not imported yet")
        return because(Outcome.INERT)

    # Called from inside an import: these record and never raise.

    def _module_imported(self, module: str) -> None:
        with self._lock:
            for patch_set in list(self._armed.values()):
                others = {patch.target for patch in patch_set if patch.target.module != module}
                # The import system still calls `module` itself "initializing" here.
                if len(others) < len(patch_set) and all(target.is_imported() for target in others):
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

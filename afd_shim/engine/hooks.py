"""A post-import hook that never raises and leaves the loader as it found it.

wrapt's hook is not used: one that raises fails the import and is forgotten, so that the retry
imports a silently unpatched module; and it would cost every process the import of wrapt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final

__all__ = ["PostImportFinder"]


@final
class PostImportFinder(MetaPathFinder):
    """Calls back after a module has been executed, once for each watched module.

    Args:
        callback: called with the module's name; must not raise (it records instead).
        failed: called with the module's name and the error when a module cannot be watched.
    """

    def __init__(self, callback: Callable[[str], None], failed: Callable[[str, Exception], None]) -> None:
        self._callback = callback
        self._failed = failed
        self._watched: set[str] = set()

    def watch(self, module: str) -> None:
        """Call back once `module` has been imported."""
        self._watched.add(module)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def unwatch(self, module: str | None = None) -> None:
        """Forget one module, or all; the finder leaves `sys.meta_path` with the last."""
        self._watched = self._watched - {module} if module else set()
        if not self._watched and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as the other finders do, and make its loader report back."""
        if fullname not in self._watched:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            if not hasattr(finder, "find_spec"):
                continue  # A finder of the kind that Python 3.12 dropped.
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._report_back(fullname, spec.loader)
                return spec
        return None

    def _report_back(self, fullname: str, loader: Loader) -> None:
        if isinstance(loader, type):  # A built-in or frozen module's loader is shared by all of them.
            self._failed(fullname, TypeError(f"the loader of {fullname} is shared and cannot report back"))
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # An instance attribute hid the loader's own method; take it away first, so that
            # the loader is as it was whatever happens, and a failed import can be retried.
            del loader.exec_module
            execute(module)
            self.unwatch(fullname)
            self._callback(fullname)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]  # this instance only, see above
        except AttributeError as error:  # A loader with slots.
            self._failed(fullname, error)

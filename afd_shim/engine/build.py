"""Builds a patch's replacement and refuses one that would not hold."""

from __future__ import annotations

from afd_shim.engine.patch import Patch, is_importable
from afd_shim.errors import PatchFailedError

__all__ = ["build_replacement"]


def build_replacement(patch: Patch, original: object) -> object:
    """Call the patch's builder and check what it gives.

    Raises:
        PatchFailedError: nothing would change, a class is replaced by something that is no subclass
            of it, a descriptor changes its type, or the replacement cannot be found by its name
            (pickle and spawned processes need that).
    """

    def refuse(reason: str) -> PatchFailedError:
        return PatchFailedError(f"Patch {patch.name!r}: {reason}. Correct its `build`.")

    built = patch.build(original)
    if patch.strategy == "wrap":
        # wrapt costs 50 ms: only sets that wrap pay for it.
        import wrapt

        if not callable(built):
            raise refuse("a wrap builder gives the wrapper function `wrapper(wrapped, instance, args, kwargs)`")
        return wrapt.FunctionWrapper(original, built)  # type: ignore[arg-type]  # any descriptor will do
    if built is original:
        raise refuse("the builder gave the original back")
    kind = patch.target.kind
    if kind == "class" and not (isinstance(built, type) and isinstance(original, type) and issubclass(built, original)):
        raise refuse(f"a class is replaced only by a subclass of it, and {built!r} is none")
    if kind in ("classmethod", "staticmethod", "property") and not isinstance(built, type(original)):
        raise refuse(f"a {kind} is replaced only by a {kind}, and {built!r} is none")
    if kind in ("function", "method"):
        if not callable(built):
            raise refuse(f"{built!r} cannot be called")
        if is_importable(original) and not is_importable(built):
            raise refuse("the replacement has no importable name: define it at module level or use functools.wraps")
    return built

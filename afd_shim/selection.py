"""What the compat matrix selects: a row's patches, the proof of their source, and the digest of it all.

Nothing here touches vLLM or this process: it reads the matrix, imports patch modules (which import
neither vLLM nor torch) and reads vLLM's source as text.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from afd_shim.compat import Matrix, Release, ReleaseState, Row
from afd_shim.engine import Outcome, Patch, PatchReport, PatchSet, SourceTree
from afd_shim.engine.plan import Difference, differences
from afd_shim.errors import (
    ConfigError,
    DeclarationError,
    EngineError,
    UnsupportedVersionError,
    UntestedVersionError,
    UpstreamNotFoundError,
)

__all__ = [
    "ALLOW_UNTESTED",
    "ALWAYS",
    "GUARD",
    "Proof",
    "digest_of",
    "drifted",
    "guard_set",
    "load_patch",
    "load_set",
    "merged_set",
    "prove",
    "refusal_of",
    "skipped_patches",
    "source_tree",
    "untested_allowed",
]

#: The set every process arms where the release has a row, and the one where it has none.
ALWAYS = "always"
GUARD = "guard"

#: Environment variables, read when AFD is asked for.
ALLOW_UNTESTED = "AFD_SHIM_ALLOW_UNTESTED"
SKIP = "AFD_SHIM_SKIP"


class Proof(NamedTuple):
    """How a release's source compares with the matrix."""

    #: The row with the release's own number, else one that the source matches wholly, else None.
    row: Row | None
    #: `row`, or the one that differs least when there is none; None without a vLLM or with an empty matrix.
    compared: Row | None
    #: The release has no row of its own.
    untested: bool
    #: What differs from the row it was compared with.
    differences: tuple[Difference, ...]

    def outcomes(self) -> tuple[PatchReport, ...]:
        """Say what would become of each patch of that row here: pending, untested, unsupported or drifted."""
        if self.compared is None:
            return ()
        outcome = Outcome.UNSUPPORTED if self.row is None else Outcome.UNTESTED if self.untested else Outcome.PENDING
        return tuple(
            drifted(patch.name, patch.target.symbol, self.differences)
            or PatchReport(patch.name, patch.target.symbol, outcome)
            for patch in merged_set(self.compared, self.compared.sets)
        )


def load_patch(name: str) -> Patch:
    """Import one patch module and give its `PATCH`.

    Raises:
        DeclarationError: there is no such patch, or its module declares another one.
    """
    module_name = f"afd_shim.patches.{name}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise DeclarationError(f"There is no patch {name!r}: no module {module_name}. Correct the name.") from error
    patch: object = getattr(module, "PATCH", None)
    if not isinstance(patch, Patch) or patch.name != name:
        raise DeclarationError(f"{module_name} must export PATCH, a Patch called {name!r}. Correct it.")
    return patch


def load_set(row: Row, set_name: str) -> PatchSet:
    """Build one of a row's sets.

    Raises:
        DeclarationError: the row has no such set, or a patch does not serve the row's release.
    """
    if set_name not in row.sets:
        raise DeclarationError(f"Row {row.release} has no set {set_name!r}. Use one of {', '.join(row.sets)}.")
    patches = tuple(load_patch(name) for name in row.sets[set_name])
    for patch in patches:
        if row.release not in patch.releases:
            raise DeclarationError(
                f"Row {row.release} lists patch {patch.name!r}, which serves {', '.join(patch.releases)} only."
                " Prove the patch on that release and add it, or take it out of the row."
            )
    return PatchSet(set_name, patches)


def merged_set(row: Row, set_names: Iterable[str]) -> PatchSet:
    """Build several sets as one; a patch that is in more than one of them appears once."""
    sets = [load_set(row, name) for name in set_names]
    patches = {patch.name: patch for patch_set in sets for patch in patch_set}
    return PatchSet("+".join(patch_set.name for patch_set in sets), tuple(patches.values()))


def guard_set() -> PatchSet:
    """Build the set for releases without a row."""
    return PatchSet(GUARD, (load_patch(GUARD),))


def source_tree(release: Release) -> SourceTree:
    """Give the release's source; that of an absent vLLM defines nothing."""
    return SourceTree(release.package or Path("vllm"))


def prove(release: Release, matrix: Matrix) -> Proof:
    """Compare a release's source with its own row or, when it has none, with every row."""
    own = matrix.rows.get(release.row or "")
    nearest = own or matrix.nearest(release.base)
    if nearest is None or release.package is None:
        return Proof(None, None, untested=True, differences=())
    tree = source_tree(release)
    if own is not None:
        return Proof(own, own, untested=False, differences=_differences(own, tree))
    others = [matrix.rows[name] for name in reversed(matrix.releases) if name != nearest.release]
    best: Proof | None = None
    for row in (nearest, *others):
        found = _differences(row, tree)
        if not found:
            return Proof(row, row, untested=True, differences=())
        if best is None or len(found) < len(best.differences):
            best = Proof(None, row, untested=True, differences=found)
    return best or Proof(None, None, untested=True, differences=())


def _differences(row: Row, tree: SourceTree) -> tuple[Difference, ...]:
    return differences(merged_set(row, row.sets), tree, row.fingerprints, row.files)


def drifted(patch: str, target: str, found: Sequence[Difference]) -> PatchReport | None:
    """Report a patch as drifted if one of its symbols differs, naming the first."""
    for difference in found:
        if difference.patch == patch:
            return PatchReport(patch, target, Outcome.DRIFTED, f"{difference.symbol}: {difference.what}")
    return None


def refusal_of(release: Release, matrix: Matrix) -> EngineError:
    """Build the error for asking for AFD on a release that has no row."""
    supported = ", ".join(matrix.releases) or "none"
    if release.state in (ReleaseState.ABSENT, ReleaseState.SHADOWED):
        return UpstreamNotFoundError(
            f"vLLM is {release.state}: {release.note}. afd-shim supports {supported}. Run `afd-shim doctor`."
        )
    proof = prove(release, matrix)
    fix = f"pip install 'vllm=={matrix.releases[-1]}'" if matrix.rows else "pip install --upgrade afd-shim"
    if proof.row is not None:
        return UntestedVersionError(
            f"AFD was asked for on vLLM {release} ({release.state}), which has not been tested; supported: {supported}."
            f" Every patched symbol is as in {proof.row.release}: set {ALLOW_UNTESTED}=1 to run it all the same, or"
            f" install a supported one: {fix}."
        )
    detail = ""
    if proof.differences:
        first = proof.differences[0]
        detail = f" Its source is none of theirs, first at {first.symbol}: {first.what}."
    return UnsupportedVersionError(
        f"AFD was asked for, but afd-shim does not support vLLM {release} ({release.state}); supported: {supported}."
        f"{detail} Install a supported one: {fix}."
    )


def digest_of(release: Release, row: Row | None) -> str:
    """Hash the release, the patch names of all sets and the fingerprints expected of them."""
    content = {
        "release": release.public,
        "sets": {name: list(patches) for name, patches in row.sets.items()} if row else {},
        "fingerprints": {symbol: fingerprint.source for symbol, fingerprint in row.fingerprints.items()} if row else {},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def untested_allowed() -> bool:
    """Tell whether the user accepts a release without a row if its source matches one."""
    return os.environ.get(ALLOW_UNTESTED) == "1"


def skipped_patches(row: Row) -> frozenset[str]:
    """Read which patches the user leaves out.

    Raises:
        ConfigError: a name is not that of a patch of this row.
    """
    names = {name.strip() for name in os.environ.get(SKIP, "").split(",")} - {""}
    unknown = names - set(row.patches)
    if unknown:
        raise ConfigError(
            f"{SKIP} names unknown patches: {', '.join(sorted(unknown))}. Use names out of {', '.join(row.patches)}.",
            key=SKIP,
        )
    return frozenset(names)

"""Ties the engine, the compat matrix and the patches together: the activation of this process.

Stage 1, `arm`, runs in every vLLM process: it names the installed release and installs the set
`always` (the wrapper that sees the configuration), or the guard where the release has no row.
Stage 2, `commit`, runs where an AFD configuration is at hand: it proves the source of every symbol
first, touches nothing if one differs, and applies the set as a whole.

WARNING: `_process` is global state, on purpose: patches are global too. A forked child inherits
both; a spawned one runs the plugin again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from afd_shim.compat import Matrix, Release, ReleaseState, Row, probe
from afd_shim.engine import Activation, Outcome, Patch, PatchReport, PatchSet, Report, SourceTree
from afd_shim.engine.plan import Difference, differences
from afd_shim.errors import (
    ConfigError,
    ConflictError,
    DeclarationError,
    DriftError,
    EngineError,
    UnsupportedVersionError,
    UntestedVersionError,
    UpstreamNotFoundError,
)

__all__ = [
    "arm",
    "commit",
    "deactivate",
    "digest",
    "load_patch",
    "load_set",
    "refusal",
    "report",
    "require",
    "require_supported",
    "verify",
]

# A child of vLLM's logger, so that it obeys vLLM's logging configuration.
_logger = logging.getLogger("vllm.afd_shim")

#: The set every process with a supported release arms, and the one without.
ALWAYS = "always"
GUARD = "guard"

#: Environment variables, read when AFD is asked for.
ALLOW_UNTESTED = "AFD_SHIM_ALLOW_UNTESTED"
SKIP = "AFD_SHIM_SKIP"


@dataclass
class _Process:
    release: Release
    row: Row | None
    activation: Activation
    #: Sets whose source has been proven in this process.
    verified: set[str] = field(default_factory=set)


_lock = threading.RLock()
_process: _Process | None = None


def arm() -> None:
    """Install the wrapper that sees the configuration, or the guard; called in every vLLM process.

    Idempotent. Changes nothing else, imports nothing of vLLM's.

    Raises:
        EngineError: the wrapper cannot be installed and the command line asks for AFD.
    """
    with _lock:
        process = _current()
        first_set = load_set(process.row, ALWAYS) if process.row is not None else _guard()
        activation = process.activation
        activation.arm(first_set)
        report = activation.report(first_set)
        if report.count(Outcome.APPLIED) + report.count(Outcome.PENDING) == len(report.patches):
            _logger.debug("afd-shim: %s", report.summary())
            return
        try:
            activation.require(first_set)
        except EngineError as error:
            if any('"afd"' in argument for argument in sys.argv):
                raise
            _logger.warning("afd-shim cannot see the configuration, so AFD cannot be served here: %s", error)


def commit(set_name: str) -> Report:
    """Prove and apply a set, whole or not at all, importing the vLLM modules it patches; idempotent.

    Raises:
        UpstreamNotFoundError: no vLLM, or one that is hidden.
        UnsupportedVersionError: the installed release has no row in the matrix.
        UntestedVersionError: it has none, but its source matches one; `AFD_SHIM_ALLOW_UNTESTED=1` accepts that.
        DriftError: the installed source differs from the matrix.
        ConflictError, LateActivationError, PatchFailedError: as `Activation.commit` says.
    """
    with _lock:
        process = _current()
        verify(ALWAYS, set_name)
        patch_set = load_set(_row(process), set_name)
        already = process.activation.report(patch_set).ok
        result = process.activation.commit(patch_set)
        if not already:
            _logger.info("afd-shim: %s", result.summary())
        return result


def require(set_name: str, *, selected: str | None = None) -> Report:
    """Raise unless every patch of the set is in force in this process: the barrier before weights load.

    Args:
        set_name: the set.
        selected: the digest of the process that read the configuration; this one's must be the same.

    Raises:
        ConflictError: the digests differ: the processes run different releases, matrices or afd-shims.
        EngineError: as `Activation.require` says.
    """
    with _lock:
        process = _current()
        patch_set = load_set(_row(process), set_name)
        result = process.activation.require(patch_set)
        if selected is not None and selected != digest():
            error = ConflictError(
                f"This process (pid {os.getpid()}) has patch-set digest {digest()} on vLLM {process.release},"
                f" the process that read the configuration selected {selected}. Install the same vLLM and the same"
                " afd-shim for all of them."
            )
            error.report = result
            raise error
        return result


def verify(*set_names: str) -> Report:
    """Prove from source, without importing or touching anything, that the sets can be applied here.

    Returns:
        The outcomes a commit would start from.

    Raises:
        EngineError: see `commit`.
    """
    with _lock:
        process = _current()
        if process.row is None:
            raise refusal()
        row = process.row
        merged = _merged(row, set_names)
        if not process.verified.issuperset(set_names):
            found = differences(merged, _tree(process.release), row.fingerprints, row.files)
            if found:
                raise _drift(process, merged, found)
            process.verified.update(set_names)
        return process.activation.report(merged)


def require_supported() -> Report:
    """Prove every set of the installed release's row, so that a refusal comes before any worker starts.

    Raises:
        EngineError: see `commit`.
    """
    return verify(*_row(_current()).sets)


def refusal() -> EngineError:
    """Build the error for asking for AFD where the installed release has no row; the guard raises it."""
    with _lock:
        process = _current()
        release, matrix = process.release, Matrix.load()
        supported = ", ".join(matrix.releases) or "none"
        if release.state in (ReleaseState.ABSENT, ReleaseState.SHADOWED):
            return UpstreamNotFoundError(
                f"vLLM is {release.state}: {release.note}. afd-shim supports {supported}. Run `afd-shim doctor`."
            )
        row, found = _closest(release, matrix)
        fix = f"pip install 'vllm=={matrix.releases[-1]}'" if matrix.rows else "a newer afd-shim"
        if row is None:
            difference = found[0] if found else None
            detail = f" Its source differs first at {difference.symbol}: {difference.what}." if difference else ""
            error: EngineError = UnsupportedVersionError(
                f"AFD was asked for, but afd-shim does not support vLLM {release} ({release.state}); supported:"
                f" {supported}.{detail} Install a supported one: {fix}."
            )
            outcome = Outcome.UNSUPPORTED
        else:
            error = UntestedVersionError(
                f"AFD was asked for on vLLM {release} ({release.state}), which has not been tested; supported:"
                f" {supported}. Every patched symbol is as in {row.release}: set {ALLOW_UNTESTED}=1 to run it all the"
                f" same, or install a tested one: {fix}."
            )
            outcome = Outcome.UNTESTED
        nearest = row or matrix.nearest(release.base)
        if nearest is not None:
            merged = _merged(nearest, nearest.sets)
            drifted = {difference.patch: f"{difference.symbol}: {difference.what}" for difference in reversed(found)}
            error.report = process.activation.report(merged).with_patches(
                PatchReport(
                    patch.name,
                    patch.target.symbol,
                    Outcome.DRIFTED if patch.name in drifted else outcome,
                    drifted.get(patch.name, ""),
                )
                for patch in merged
            )
        return error


def report() -> tuple[Report, ...]:
    """Tell what became of every set in this process, as it is now."""
    with _lock:
        process = _current()
        if process.row is None:
            return (process.activation.report(_guard()),)
        return tuple(process.activation.report(load_set(process.row, name)) for name in process.row.sets)


def digest() -> str:
    """Hash the release, the patch names of all sets and the expected fingerprints.

    Equal in every process of a deployment and in both roles, whichever sets each one commits.
    """
    return _current().activation.digest


def deactivate() -> tuple[PatchReport, ...]:
    """Take every patch out of this process again; a later `arm` starts afresh."""
    global _process
    with _lock:
        if _process is None:
            return ()
        reports = _process.activation.deactivate()
        if all(patch.outcome is Outcome.ROLLED_BACK for patch in reports):
            _process = None
        return reports


def load_patch(name: str) -> Patch:
    """Import one patch module and give its `PATCH`.

    Raises:
        DeclarationError: there is no such patch, or its module declares another one.
    """
    try:
        module = importlib.import_module(f"afd_shim.patches.{name}")
    except ModuleNotFoundError as error:
        raise DeclarationError(f"The matrix names patch {name!r}, but there is no such module. Correct it.") from error
    patch: object = getattr(module, "PATCH", None)
    if not isinstance(patch, Patch) or patch.name != name:
        raise DeclarationError(f"{module.__name__} must export PATCH, a Patch called {name!r}. Correct it.")
    return patch


def load_set(row: Row, set_name: str) -> PatchSet:
    """Build one of a row's sets.

    Raises:
        DeclarationError: the row has no such set, or a patch does not serve the row's release.
    """
    if set_name not in row.sets:
        raise DeclarationError(f"Row {row.release} has no set {set_name!r}; it has {', '.join(row.sets)}.")
    patches = tuple(load_patch(name) for name in row.sets[set_name])
    for patch in patches:
        if row.release not in patch.releases:
            raise DeclarationError(
                f"Row {row.release} lists patch {patch.name!r}, which serves {', '.join(patch.releases)} only."
                " Prove the patch on that release and add it, or take it out of the row."
            )
    return PatchSet(set_name, patches)


# What this process stands on -----------------------------------------------------------------


def _current() -> _Process:
    global _process
    if _process is None:
        matrix = Matrix.load()
        release = probe()
        row = matrix.rows.get(release.row or "")
        if row is None and release.package is not None and os.environ.get(ALLOW_UNTESTED) == "1":
            row, _ = _closest(release, matrix)
        activation = Activation(
            _tree(release),
            release=str(release),
            row=row.release if row is not None else "",
            digest=_digest(release, row),
            skip=_skipped(matrix),
        )
        _process = _Process(release, row, activation)
    return _process


def _row(process: _Process) -> Row:
    if process.row is None:
        raise refusal()
    return process.row


def _guard() -> PatchSet:
    return PatchSet(GUARD, (load_patch(GUARD),))


def _tree(release: Release) -> SourceTree:
    return SourceTree(release.package or Path("vllm"))


def _merged(row: Row, set_names: Iterable[str]) -> PatchSet:
    sets = [load_set(row, name) for name in set_names]
    patches = {patch.name: patch for patch_set in sets for patch in patch_set}
    return PatchSet("+".join(patch_set.name for patch_set in sets), tuple(patches.values()))


def _closest(release: Release, matrix: Matrix) -> tuple[Row | None, tuple[Difference, ...]]:
    """Find the newest row that the installed source matches wholly; else what differs from the nearest."""
    found: tuple[Difference, ...] = ()
    nearest = matrix.nearest(release.base)
    if release.package is None or nearest is None:
        return None, found
    tree = _tree(release)
    for row in [nearest, *(matrix.rows[name] for name in reversed(matrix.releases) if name != nearest.release)]:
        differing = differences(_merged(row, row.sets), tree, row.fingerprints, row.files)
        if not differing:
            return row, ()
        found = found or differing
    return None, found


def _drift(process: _Process, patch_set: PatchSet, found: tuple[Difference, ...]) -> DriftError:
    first, *more = found
    others = f" (and {len(more)} more symbols)" if more else ""
    error = DriftError(
        f"The installed vLLM {process.release} is not the source that afd-shim was proven on: {first.symbol}:"
        f" {first.what}{others}. Nothing was patched. Reinstall vLLM, or run `afd-shim doctor` for the whole list.",
        symbol=first.symbol,
        difference=first.what,
    )
    drifted = {difference.patch: f"{difference.symbol}: {difference.what}" for difference in reversed(found)}
    report = process.activation.report(patch_set)
    error.report = report.with_patches(
        PatchReport(patch.patch, patch.target, Outcome.DRIFTED, drifted[patch.patch])
        if patch.patch in drifted
        else patch
        for patch in report.patches
    )
    return error


def _digest(release: Release, row: Row | None) -> str:
    content = {
        "release": release.public,
        "sets": {name: list(names) for name, names in row.sets.items()} if row is not None else {},
        "fingerprints": {
            symbol: [print_.kind, print_.parameters, print_.source] for symbol, print_ in row.fingerprints.items()
        }
        if row is not None
        else {},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _skipped(matrix: Matrix) -> frozenset[str]:
    names = {name.strip() for name in os.environ.get(SKIP, "").split(",")} - {""}
    known = {name for row in matrix.rows.values() for name in row.patches}
    if names - known:
        raise ConfigError(
            f"{SKIP} names unknown patches: {', '.join(sorted(names - known))}. Known: {', '.join(sorted(known))}.",
            key=SKIP,
        )
    return frozenset(names)

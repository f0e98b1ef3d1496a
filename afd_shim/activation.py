"""The activation of this process: which vLLM it stands on and what has been patched in it.

Stage 1, `arm`, runs in every vLLM process: it names the installed release and installs the set
`always` (the wrapper that sees the configuration), or the guard where the release has no row.
Stage 2, `commit`, runs where an AFD configuration is at hand: it proves the source of every symbol
first, touches nothing if one differs, and applies the set as a whole.

WARNING: `_process` is global state, on purpose: patches are global too. A forked child inherits
both; a spawned one runs the plugin again.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from afd_shim.compat import Matrix, Release, Row, probe
from afd_shim.engine import Activation, Outcome, PatchReport, PatchSet, Report
from afd_shim.engine.plan import Difference, differences
from afd_shim.errors import ConflictError, DriftError, EngineError
from afd_shim.selection import (
    ALWAYS,
    digest_of,
    drifted,
    guard_set,
    load_set,
    merged_set,
    prove,
    refusal_of,
    skipped_patches,
    source_tree,
    untested_allowed,
)

__all__ = ["arm", "commit", "deactivate", "digest", "refusal", "report", "require", "require_supported", "verify"]

# A child of vLLM's logger, so that it obeys vLLM's logging configuration.
_logger = logging.getLogger("vllm.afd_shim")


@dataclass
class _Process:
    release: Release
    #: None: the guard's realm.
    row: Row | None
    activation: Activation
    #: Sets whose source has been proven in this process.
    verified: set[str] = field(default_factory=set)

    @property
    def supported_row(self) -> Row:
        if self.row is None:
            raise refusal()
        return self.row


_lock = threading.RLock()
_process: _Process | None = None


def arm() -> None:
    """Install the wrapper that sees the configuration, or the guard; called in every vLLM process.

    Idempotent. Touches no other symbol and imports nothing of vLLM's.

    Raises:
        EngineError: the wrapper cannot be installed and the command line asks for AFD.
    """
    with _lock:
        process = _current()
        first_set = load_set(process.row, ALWAYS) if process.row is not None else guard_set()
        result = process.activation.arm(first_set)
        if all(patch.outcome.good or patch.outcome is Outcome.PENDING for patch in result.patches):
            _logger.debug("afd-shim: %s", result.summary())
            return
        try:
            process.activation.require(first_set)
        except EngineError as error:
            if any('"afd"' in argument or "additional-config.afd" in argument for argument in sys.argv):
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
        patch_set = load_set(process.supported_row, set_name)
        already = process.activation.report(patch_set).ok
        result = process.activation.commit(patch_set, skip=skipped_patches(process.supported_row))
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
        result = process.activation.require(load_set(process.supported_row, set_name))
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
        row = process.supported_row
        merged = merged_set(row, set_names)
        if not process.verified.issuperset(set_names):
            found = differences(merged, source_tree(process.release), row.fingerprints, row.files)
            if found:
                raise _drift(process, merged, found)
            process.verified.update(set_names)
        return process.activation.report(merged)


def require_supported() -> Report:
    """Prove every set of the installed release's row, so that a refusal comes before any worker starts.

    Raises:
        EngineError: see `commit`.
    """
    return verify(*_current().supported_row.sets)


def refusal() -> EngineError:
    """Build the error for asking for AFD where the installed release has no row; the guard raises it."""
    with _lock:
        process, matrix = _current(), Matrix.load()
        error = refusal_of(process.release, matrix)
        error.report = process.activation.report(guard_set()).with_patches(prove(process.release, matrix).outcomes())
        return error


def report() -> tuple[Report, ...]:
    """Tell what became of every set in this process, as it is now."""
    with _lock:
        process = _current()
        if process.row is None:
            return (process.activation.report(guard_set()),)
        return tuple(process.activation.report(load_set(process.row, name)) for name in process.row.sets)


def digest() -> str:
    """Give the hash of the release, the patch names of all sets and the expected fingerprints.

    Equal in every process of a deployment and in both roles, whichever sets each one commits.
    """
    with _lock:
        return _current().activation.digest


def deactivate() -> tuple[PatchReport, ...]:
    """Take every patch out of this process again; a later `arm` starts afresh.

    Raises:
        LateActivationError: objects built by the patched code exist.
    """
    global _process  # noqa: PLW0603 - the documented process-wide state
    with _lock:
        if _process is None:
            return ()
        reports = _process.activation.deactivate()
        if all(patch.outcome is Outcome.ROLLED_BACK for patch in reports):
            _process = None
        return reports


def _current() -> _Process:
    global _process  # noqa: PLW0603 - the documented process-wide state
    if _process is None:
        matrix, release = Matrix.load(), probe()
        row = matrix.rows.get(release.row or "")
        words = str(release)
        if row is None and untested_allowed():
            row = prove(release, matrix).row
            words += f", untested, source as in {row.release}" if row is not None else ""
        activation = Activation(
            source_tree(release),
            release=words,
            row=row.release if row is not None else "",
            digest=digest_of(release, row),
        )
        _process = _Process(release, row, activation)
    return _process


def _drift(process: _Process, patch_set: PatchSet, found: Sequence[Difference]) -> DriftError:
    first, *more = found
    others = f" (and {len(more)} more)" if more else ""
    error = DriftError(
        f"The installed vLLM {process.release} is not the source that afd-shim was proven on: {first.symbol}:"
        f" {first.what}{others}. Nothing was patched. Reinstall vLLM, or run `afd-shim doctor` for the whole list.",
        symbol=first.symbol,
        difference=first.what,
    )
    result = process.activation.report(patch_set)
    error.report = result.with_patches(drifted(patch.patch, patch.target, found) or patch for patch in result.patches)
    return error

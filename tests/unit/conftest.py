"""A stub vLLM with a matrix that fits it: the release matrix is the one thing that fakes stand in for."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from afd_shim import activation, selection
from afd_shim.compat import Matrix, Row
from afd_shim.engine import Patch, SourceTree, Target

ARG_UTILS = """
class EngineArgs:
    def __init__(self, additional_config=None):
        self.additional_config = additional_config or {}

    def create_engine_config(self, usage_context=None, headless=False):
        return self
"""

LAYER = """
def factory(num_experts, top_k):
    return (num_experts, top_k)
"""


def build_factory(original: Callable[..., object]) -> Callable[..., object]:
    """Replace the factory."""

    @functools.wraps(original)
    def factory(*args: object) -> tuple[object, ...]:
        return ("ours", original(*args))

    return factory


FACTORY = Patch(
    name="moe_factory",
    target=Target("vllm.layer:factory", kind="function"),
    strategy="replace",
    build=build_factory,
    why="a test",
    upstream="vllm/layer.py",
    releases=("0.31.0", "0.32.0"),
    until="the test ends",
)


class World:
    """An import path with one stub vLLM, and a matrix of two rows that fits it."""

    arg_utils = ARG_UTILS
    layer = LAYER

    def __init__(self, site: Path, matrix: Path) -> None:
        self.site = site
        self.package = site / "vllm"
        self.matrix = matrix

    def install(self, version: str, layer: str = LAYER, arg_utils: str = ARG_UTILS) -> None:
        """Write the package and its metadata."""
        (self.package / "engine").mkdir(parents=True)
        for name, source in {
            "__init__": "",
            "engine/__init__": "",
            "engine/arg_utils": arg_utils,
            "layer": layer,
            "model": "from vllm.layer import factory\n",
        }.items():
            (self.package / f"{name}.py").write_text(source, encoding="utf-8")
        info = self.site / f"vllm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
        (info / "RECORD").write_text("vllm/__init__.py,,\n", encoding="utf-8")
        importlib.invalidate_caches()

    def record(self) -> None:
        """Write the rows 0.31.0 and 0.32.0 as `fingerprint --write` would for the stub."""
        self.install("0.32.0")
        tree = SourceTree(self.package)
        sets = {"always": ("engine_config",), "attention_worker": ("moe_factory",)}
        targets = {selection.load_patch(name).target for names in sets.values() for name in names}
        rows = {
            release: Row(
                release,
                ">=3.10",
                ("static",),
                sets,
                {target.module: tree.file_hash(target.module) for target in targets},
                {target.symbol: tree.fingerprint(target) for target in targets},
            )
            for release in ("0.31.0", "0.32.0")
        }
        Matrix(rows).save()
        self.uninstall()

    def uninstall(self) -> None:
        """Take the package and its metadata away."""
        shutil.rmtree(self.package)
        for info in self.site.glob("*.dist-info"):
            shutil.rmtree(info)

    def module(self, name: str) -> Any:
        """Import a module of the stub."""
        return importlib.import_module(f"vllm.{name}")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world without any other vLLM, restored afterwards."""
    activation.deactivate()
    site = tmp_path / "site"
    site.mkdir()
    stashed = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "vllm" or name.startswith("vllm.")}
    monkeypatch.syspath_prepend(str(site))
    # A real vLLM may be installed next to these tests: the probe must not see it.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: PathFinder.find_spec(name, [str(site)]))
    monkeypatch.setattr(metadata, "distributions", functools.partial(metadata.distributions, path=[str(site)]))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "argv", ["vllm"])
    monkeypatch.delenv(selection.ALLOW_UNTESTED, raising=False)
    monkeypatch.delenv(selection.SKIP, raising=False)
    fake = ModuleType("afd_shim.patches.moe_factory")
    fake.PATCH = FACTORY  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    result = World(site, tmp_path / "matrix.json")
    for method in (Matrix.load.__func__, Matrix.save):  # type: ignore[attr-defined]  # a classmethod's function
        monkeypatch.setattr(method, "__defaults__", (result.matrix,))
    result.record()
    yield result
    activation.deactivate()
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]
    sys.modules.update(stashed)

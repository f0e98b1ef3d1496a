"""What compiled code sees of a patch: a replacement, never a wrapt wrapper."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from afd_shim.compat import Matrix
from afd_shim.engine import Activation, Patch, PatchSet, SourceTree, Target
from afd_shim.selection import load_patch

UPSTREAM = """
def scale(x):
    return x * 2


class Runner:
    def inner(self, x):
        return scale(x) + 1

    def forward(self, x):
        return self.inner(x) * 3
"""


class Negate:
    """Builders with importable names."""

    @staticmethod
    def build(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Replace by the negative."""

        @functools.wraps(original)
        def negated(*args: Any) -> torch.Tensor:
            return -original(*args)

        return negated

    @staticmethod
    def wrapper(original: object) -> Callable[..., torch.Tensor]:
        """Wrap by the negative."""
        return Negate.wrap

    @staticmethod
    def wrap(
        wrapped: Callable[..., torch.Tensor], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Give the negative."""
        return -wrapped(*args, **kwargs)


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with code that is compiled."""
    package = tmp_path / "traced_upstream"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "layer.py").write_text(UPSTREAM, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    torch._dynamo.reset()
    yield package
    for name in [name for name in sys.modules if name.startswith("traced_upstream")]:
        del sys.modules[name]


def both(package: Path, symbol: str, kind: Any, strategy: Any, build: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Patch a symbol and run the layer eager and compiled."""
    patch = Patch(
        name="negate",
        target=Target(f"traced_upstream.layer:{symbol}", kind=kind),
        strategy=strategy,
        build=build,
        why="a test",
        upstream="this file",
        releases=("1",),
        until="the test ends",
        traced=strategy != "wrap",
    )
    activation = Activation(SourceTree(package), release="1", row="1", digest="d")
    activation.commit(PatchSet("s", (patch,)))
    runner = importlib.import_module("traced_upstream.layer").Runner()
    x = torch.arange(4.0)
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(runner.forward, backend="eager", fullgraph=True)
    return runner.forward(x), compiled(x)


@pytest.mark.parametrize(("symbol", "kind"), [("scale", "function"), ("Runner.inner", "method")])
def test_replaced_target_runs_in_compiled_code(upstream: Path, symbol: str, kind: str) -> None:
    """A replacement that Dynamo traces gives the same result eager and compiled."""
    eager, compiled = both(upstream, symbol, kind, "replace", Negate.build)

    assert torch.equal(eager, compiled)
    assert not torch.equal(eager, (torch.arange(4.0) * 2 + 1) * 3)


def test_wrapped_target_is_bypassed_in_compiled_code(upstream: Path) -> None:
    """Why a traced target may not be wrapped: Dynamo calls the original, without a word."""
    eager, compiled = both(upstream, "Runner.inner", "method", "wrap", Negate.wrapper)

    assert torch.equal(compiled, (torch.arange(4.0) * 2 + 1) * 3)
    assert not torch.equal(eager, compiled)


def test_no_patch_of_the_matrix_is_traced() -> None:
    """Compiled code reaches none of them; the first that it reaches needs a test of eager against compiled outputs."""
    names = {name for row in Matrix.load().rows.values() for name in row.patches}

    assert [name for name in sorted(names) if load_patch(name).traced] == []

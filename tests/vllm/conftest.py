"""Stock vLLM in this process, its models native and split."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from afd_shim.testing.checkpoints import Checkpoint, write_checkpoint

MakeCheckpoint = Callable[..., Checkpoint]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Write a tiny checkpoint, once for the whole run: `checkpoint("qwen3-moe", tied_embeddings=True)`."""
    made: dict[tuple[str, tuple[tuple[str, object], ...]], Checkpoint] = {}

    def make(family: str, **options: object) -> Checkpoint:
        key = family, tuple(sorted(options.items()))
        if key not in made:
            made[key] = write_checkpoint(family, tmp_path_factory.mktemp(family), **options)  # type: ignore[arg-type]  # checked by itself
        return made[key]

    return make


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """vLLM's distributed world of one rank, for as long as a module needs it."""
    from afd_shim.testing.local_roles import local_world

    with local_world():
        yield

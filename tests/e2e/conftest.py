"""End-to-end tests: real server processes of the installed vLLM, one per role.

Everything here starts servers, 20 to 60 s each: a test asks for a deployment that others share
wherever it leaves the deployment as it was.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from afd_shim.testing.checkpoints import Checkpoint, write_checkpoint
from afd_shim.testing.tensors import Dtype

# A runner that is told to end must stop its servers: they live in process groups of their own.
signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))

WriteCheckpoint = Callable[..., Checkpoint]


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> WriteCheckpoint:
    """Writes the checkpoint of a family once: `checkpoint_of("deepseek-v2", dtype="float32")`."""

    @cache
    def write(family: str, *, dtype: Dtype = "bfloat16", tied_embeddings: bool = False) -> Checkpoint:
        path = tmp_path_factory.mktemp(f"{family}-{dtype}")
        return write_checkpoint(family, path, dtype=dtype, tied_embeddings=tied_embeddings)

    return write


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Where a test's servers log; pytest keeps the last runs' directories."""
    return tmp_path / "logs"

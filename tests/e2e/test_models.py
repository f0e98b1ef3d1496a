"""Other model families, each with what makes it different."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.comparison import run_split, run_unsplit

pytestmark = [pytest.mark.newest_release, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("family", "tied_embeddings", "compute_gate_on_attention"),
    [
        pytest.param("deepseek-v3", False, True, id="deepseek-v3: grouped top-k, bias on FFN and gate on Attention"),
        pytest.param("qwen3-next", False, False, id="qwen3-next: linear attention, gated shared expert"),
        pytest.param("granitemoe", False, False, id="granitemoe: external gate, fused tensors"),
        pytest.param("qwen3-moe", True, False, id="qwen3-moe: tied embeddings"),
    ],
)
def test_a_family_is_split_exactly(
    family: str,
    tied_embeddings: bool,
    compute_gate_on_attention: bool,
    checkpoint_of: Callable[..., Checkpoint],
    log_dir: Path,
) -> None:
    """Same tokens as unsplit, every exchange accounted for, and each role reads only what it owns."""
    checkpoint = checkpoint_of(family, tied_embeddings=tied_embeddings)
    expected = run_unsplit(checkpoint, log_dir)

    run = run_split(checkpoint, log_dir, expected=expected, compute_gate_on_attention=compute_gate_on_attention)

    assert run.failures() == []

"""Compiled mode, vLLM's default: the exchange must stay out of the traced graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.comparison import run_split, run_unsplit

pytestmark = pytest.mark.timeout(1200)

# Nothing compiled by an earlier run may stand in for what is tested.
NO_CACHE = {"VLLM_DISABLE_COMPILE_CACHE": "1"}


@pytest.mark.parametrize(
    ("family", "gate_on_attention", "shared_on_attention"),
    [
        pytest.param("qwen3-moe", False, False, id="gate on FFN"),
        pytest.param("qwen3-moe", True, False, id="gate on Attention", marks=pytest.mark.newest_release),
        pytest.param("deepseek-v2", False, True, id="shared experts on Attention", marks=pytest.mark.newest_release),
    ],
)
def test_compiled_tokens_equal_the_unsplit_ones(
    family: str,
    gate_on_attention: bool,
    shared_on_attention: bool,
    checkpoint_of: Callable[..., Checkpoint],
    log_dir: Path,
) -> None:
    """float32, because Inductor keeps float32 between operations of an inlined bfloat16 MoE."""
    checkpoint = checkpoint_of(family, dtype="float32")
    expected = run_unsplit(checkpoint, log_dir, eager=False, env=NO_CACHE)

    run = run_split(
        checkpoint,
        log_dir,
        expected=expected,
        compute_gate_on_attention=gate_on_attention,
        shared_experts_on_attention=shared_on_attention,
        eager=False,
        env=NO_CACHE,
    )

    assert run.failures() == []

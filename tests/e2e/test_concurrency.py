"""Concurrent clients: merged steps, and every client still gets its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.comparison import MAX_TOKENS, run_unsplit
from afd_shim.testing.deployments import start_split

pytestmark = [pytest.mark.newest_release, pytest.mark.timeout(900)]

PROMPTS = tuple(
    f"Client {number} asks about {topic}"
    for number, topic in enumerate(
        ("rivers", "prime numbers", "tea", "Mars", "chess", "granite", "whales", "bread", "violins", "snow")
    )
)


def test_ten_clients_get_the_tokens_of_one_alone(checkpoint_of: Callable[..., Checkpoint], log_dir: Path) -> None:
    """float32, where the batch a kernel sees does not decide a token; steps must really have been merged.

    Not a model with MLA: stock vLLM's CPU prefill of several such requests at once differs from the
    prefill of each alone (first-token log-probabilities by up to 0.6 on 0.32.0, without any plugin).
    """
    checkpoint = checkpoint_of("qwen3-moe", dtype="float32")
    expected = run_unsplit(checkpoint, log_dir, prompts=PROMPTS)

    with start_split(checkpoint, log_dir) as deployment, ThreadPoolExecutor(len(PROMPTS)) as clients:
        deployment.wait_ready()
        outputs = tuple(
            clients.map(lambda prompt: deployment.attention.complete(prompt, max_tokens=MAX_TOKENS), PROMPTS)
        )
        (attention,) = deployment.attention.rpc("afd_stats")
        (ffn,) = deployment.ffn.rpc("afd_stats")

    assert outputs == expected
    # Ten clients one after the other would need a forward for each of their tokens.
    assert cast("int", attention["forwards"]) < len(PROMPTS) * MAX_TOKENS / 2
    assert cast("int", ffn["real_rows"]) > cast("int", ffn["exchanges"])
    assert attention["exchanges"] == ffn["exchanges"] == len(checkpoint.moe_layers) * cast("int", attention["forwards"])

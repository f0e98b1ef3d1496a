"""Experts move between two FFN ranks while requests are served."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afd_shim.ffn.placement import read_rearrangements
from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.comparison import MAX_TOKENS, PROMPTS, run_unsplit
from afd_shim.testing.deployments import Split, start_split
from afd_shim.testing.peers import FFN_INSPECTION, PlayedAttention, expert_checksums, inspect_eplb, is_running, meet

pytestmark = [pytest.mark.newest_release, pytest.mark.timeout(600)]

# vLLM starts at three quarters of the first interval: with a forward for each token, experts move first
# in the second completion and then in the sixth.
INTERVAL = 140
EPLB_CONFIG = {
    "use_async": False,
    "num_redundant_experts": 2,
    "window_size": INTERVAL,
    "step_interval": INTERVAL,
    "log_balancedness": True,
}


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[..., Checkpoint]) -> Checkpoint:
    """float32: another placement adds the experts' outputs in another order."""
    return checkpoint_of("deepseek-v2", dtype="float32")


@pytest.fixture(scope="module")
def split(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    """One Attention and two FFN ranks; the first test sees every step since their start."""
    with start_split(
        checkpoint,
        tmp_path_factory.mktemp("logs"),
        num_ffn_ranks=2,
        extra_args=("--shutdown-timeout", "20"),  # by default vLLM kills workers before they can say goodbye
        ffn_args=(
            *("--worker-extension-cls", FFN_INSPECTION),
            *("--enable-eplb", "--eplb-config", json.dumps(EPLB_CONFIG)),
        ),
    ) as deployment:
        deployment.wait_ready()
        yield deployment


def test_tokens_are_the_unsplit_ones_before_between_and_after_rearrangements(
    checkpoint: Checkpoint, split: Split, tmp_path: Path
) -> None:
    """Every token of six completions, while each expert's weights go where the map says, redundant ones too."""
    before = inspect_eplb(split.ffn)
    outputs, rearrangements = [], []
    for prompt in PROMPTS * 2:
        outputs.append(split.attention.complete(prompt, max_tokens=MAX_TOKENS))
        rearrangements.append(len(read_rearrangements(split.ffn.log_path)))
    after = inspect_eplb(split.ffn)

    assert rearrangements[0] == 0
    assert rearrangements[2] > 0
    assert rearrangements[-1] > rearrangements[2]
    assert tuple(outputs) == run_unsplit(checkpoint, tmp_path) * 2
    assert before[0]["placement"] != after[0]["placement"] == after[1]["placement"]
    assert expert_checksums(before) == expert_checksums(after)
    assert all(len(alike) == 1 for layer in expert_checksums(after) for alike in layer.values())


def test_a_shutdown_during_a_rearrangement_ends_every_process(split: Split) -> None:
    """One rank waits in the rearrangement for the other, which is late, when the server is told to end."""
    split.attention.stop()
    assert "every Attention rank has said goodbye" in split.ffn.log()
    with PlayedAttention(split.ffn, *meet(split.ffn, split.ffn_config)) as played:
        ranks = [rank["pid"] for rank in played.advance_to_rearrangement(INTERVAL)]
        os.kill(ranks[1], signal.SIGSTOP)
        try:
            played.tick(rows=0)
            time.sleep(0.5)
            split.ffn.process.terminate()
            time.sleep(0.5)
        finally:
            os.kill(ranks[1], signal.SIGCONT)
        split.ffn.wait_exit(30)

    assert not any(map(is_running, ranks))
    assert "CRITICAL" not in split.ffn.log()

"""SIGKILL, busy or idle, on either side: an error that names the peer, within seconds."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest

rank_process: Any = importlib.import_module("rank_process")
Work = rank_process.Work

HEARD_WITHIN_S = 5.0


def test_killed_ffn_busy(deploy: Any) -> None:
    """Attention's exchange fails, naming the FFN rank, its address and what was in flight."""
    deployment = deploy(1, 1)
    (attention,), (ffn,) = deployment.attention, deployment.ffn
    ffn.order("serve", 30.0)
    attention.order("attend", Work(steps=1, seed=1, max_rows=32))
    time.sleep(0.5)

    ffn.kill()
    killed = time.time()

    kind, text, when = attention.expect("error")
    assert kind == "PeerLostError"
    assert f"FFN rank 0 at 127.0.0.1:{ffn.port} is gone: its process ended" in text
    assert "in flight on Attention rank 0: step 0, layer 1, stage 0" in text
    assert when - killed < HEARD_WITHIN_S
    attention.expect_lost()
    assert len(attention.lost) == 1


def test_killed_attention_busy(deploy: Any) -> None:
    """The FFN computes for a rank that dies: its answer fails, naming the rank; all others are told."""
    deployment = deploy(2, 1)
    (ffn,) = deployment.ffn
    ffn.order("serve", 3.0)
    deployment.attention[0].order("attend", Work(steps=1, seed=1, max_rows=32))
    time.sleep(0.5)

    deployment.attention[0].kill()
    killed = time.time()

    kind, text, when = ffn.expect("error")
    assert kind == "PeerLostError"
    assert "Attention rank 0 at 127.0.0.1:" in text
    assert when - killed < HEARD_WITHIN_S
    ffn.expect_lost()
    (lost_text, _, lost_when) = ffn.lost[0]
    assert "in flight on FFN rank 0: layer 1, stage 0" in lost_text
    assert lost_when - killed < 2.0  # while it computes
    ffn.order("end")
    _, reason, clean, _ = deployment.attention[1].pipe.recv()
    assert "it ended with: Attention rank 0 at 127.0.0.1:" in reason
    assert not clean


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_killed_peer_idle(deploy: Any, role: str) -> None:
    """Nothing is in flight, no request comes: the survivor hears it all the same."""
    deployment = deploy(1, 1)
    (attention,), (ffn,) = deployment.attention, deployment.ffn
    ffn.order("serve", 0.0)
    attention.order("attend", Work(steps=2, seed=1, max_rows=8))
    attention.result()
    victim, survivor = (attention, ffn) if role == "attention" else (ffn, attention)

    victim.kill()
    killed = time.time()

    answers = [survivor.pipe.recv() for _ in range(2) if survivor.pipe.poll(HEARD_WITHIN_S)]
    # The FFN's receive fails beside the callback, in a thread of its own: either may be told first.
    ((_, text, clean, when),) = [answer for answer in answers if answer[0] == "lost"]
    assert not clean
    assert f"{'Attention' if role == 'attention' else 'FFN'} rank 0 at 127.0.0.1:" in text
    assert when - killed < HEARD_WITHIN_S


def test_killed_ffn_rank_is_named_to_attention(deploy: Any) -> None:
    """FFN rank 1 dies under load: Attention, answered by rank 0, learns which rank it was."""
    deployment = deploy(2, 2)
    for rank in deployment.ffn:
        rank.order("serve", 0.001)
    for seed, rank in enumerate(deployment.attention):
        rank.order("attend", Work(steps=10_000, seed=seed, max_rows=32))
    time.sleep(0.5)

    deployment.ffn[1].kill()
    killed = time.time()

    _, text, when = deployment.ffn[0].expect("error")
    assert "FFN rank 1 at 127.0.0.1:" in text
    assert when - killed < HEARD_WITHIN_S
    deployment.ffn[0].order("end")
    for rank in deployment.attention:
        _, text, when = rank.expect("error")
        assert "FFN rank 1 at 127.0.0.1:" in text
        assert when - killed < HEARD_WITHIN_S

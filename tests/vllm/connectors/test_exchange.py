"""Rows come back as the MoE layer of their own group made them, in every layout and dtype."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest

rank_process: Any = importlib.import_module("rank_process")
Work = rank_process.Work


def run(deployment: Any, works: list[Any], delay_s: float = 0.0) -> tuple[list[Any], list[list[Any]]]:
    """Run each Attention rank's work; (their counts, what each FFN rank served)."""
    for rank, work in zip(deployment.attention, works, strict=True):
        rank.order("attend", work)
    time.sleep(0.3)  # the first requests arrive together
    for rank in deployment.ffn:
        rank.order("serve", delay_s)
    counts = [rank.result() for rank in deployment.attention]
    for rank in deployment.attention:
        rank.order("close")
    return counts, [rank.result() for rank in deployment.ffn]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("gate_on_attention", "logits_dtype"), [(False, "float32"), (True, "float32"), (True, "bfloat16")]
)
def test_rows_come_back_in_every_dtype(deploy: Any, dtype: str, gate_on_attention: bool, logits_dtype: str) -> None:
    """Hidden states in the model's dtype and router logits in the gate's, 0 to max_num_tokens rows."""
    deployment = deploy(
        1, 1, dtype=dtype, gate_on_attention=gate_on_attention, logits_dtype=logits_dtype, hidden_size=33
    )

    (counts,), (served,) = run(deployment, [Work(steps=40, seed=1, max_rows=32)])

    assert counts["exchanges"] == len(served) == 120
    assert sum(batch.rows for batch in served) == counts["rows"]
    assert {batch.rows for batch in served} >= {0, 32}


@pytest.mark.parametrize(("attention", "ffn"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_independent_servers_share_the_ffn(deploy: Any, attention: int, ffn: int) -> None:
    """Unsynchronised Attention servers, merged as they come, all get their own rows; counts are exact.

    Every FFN rank runs the same batches in the same order, ticks the same number of times, and sees
    each real row of every rank exactly once: the load of every expert is what the Attention ranks count by hand.
    """
    deployment = deploy(attention, ffn, gate_on_attention=True)
    works = [Work(steps=25 + 10 * rank, seed=rank, max_rows=16) for rank in range(attention)]

    counts, served = run(deployment, works, delay_s=0.002)

    assert all(batches == served[0] for batches in served)
    batches = served[0]
    for group, count in enumerate(counts):
        assert sum(group in batch.groups for batch in batches) == count["exchanges"]
    assert sum(batch.rows for batch in batches) == sum(count["rows"] for count in counts)
    assert sum(batch.real_rows for batch in batches) == sum(count["real_rows"] for count in counts)
    assert [sum(tokens) for tokens in zip(*(batch.load for batch in batches), strict=True)] == [
        sum(tokens) for tokens in zip(*(count["load"] for count in counts), strict=True)
    ]
    assert max(batch.rows for batch in batches) <= 32
    assert all(batch.ends_step == (batch.layer == 3) for batch in batches)
    ticks = [sum(batch.ends_step for batch in batches[:index]) for index in range(len(batches))]
    assert [batch.step for batch in batches] == ticks
    if attention > 1:
        assert any(len(batch.groups) > 1 for batch in batches)


def test_nobody_waits_for_an_idle_server(deploy: Any) -> None:
    """One Attention server works while two others, connected, never send anything."""
    deployment = deploy(3, 2)
    deployment.ffn[0].order("serve", 0.0)
    deployment.ffn[1].order("serve", 0.0)
    deployment.attention[1].order("attend", Work(steps=20, seed=1, max_rows=32))

    assert deployment.attention[1].result()["exchanges"] == 60


def test_server_that_says_goodbye_leaves_the_others_served(deploy: Any) -> None:
    """The FFN serves on when one Attention server is shut down, and ends after the last."""
    deployment = deploy(2, 2)
    for rank in deployment.ffn:
        rank.order("serve", 0.0)
    first, second = deployment.attention
    first.order("attend", Work(steps=3, seed=0, max_rows=8))
    first.result()
    first.order("close")
    first.result()

    second.order("attend", Work(steps=10, seed=1, max_rows=8))
    assert second.result()["exchanges"] == 30
    second.order("close")

    assert [len(rank.result()) for rank in deployment.ffn] == [39, 39]
    assert all(rank.lost == [] for rank in deployment.ranks)


@pytest.mark.parametrize(("attention", "ffn"), [(2, 1), (2, 2), (4, 3)])
def test_tensor_parallel_ranks_send_their_rows_once(deploy: Any, attention: int, ffn: int) -> None:
    """Ranks of one group hold the same rows: the FFN counts them once, the first gets the answer, others zeros."""
    deployment = deploy(attention, ffn, tp=2)
    works = [Work(steps=20, seed=rank // 2, max_rows=16, tp_rank=rank % 2) for rank in range(attention)]

    counts, served = run(deployment, works)

    assert all(batches == served[0] for batches in served)
    expected = sum(count["real_rows"] for count in counts[::2])
    assert sum(batch.real_rows for batch in served[0]) == expected


def test_large_messages_pass_both_ways(deploy: Any) -> None:
    """33 MB requests of three servers at once, far beyond any socket buffer, neither block nor mix."""
    deployment = deploy(3, 1, hidden_size=2048, max_num_tokens=8192, moe_layers=(3,))
    works = [Work(steps=1, seed=rank, max_rows=8192) for rank in range(3)]

    counts, (served,) = run(deployment, works)

    assert [count["exchanges"] for count in counts] == [1, 1, 1]
    assert [batch.rows for batch in served] == [8192, 8192, 8192]


def test_bytes_are_counted(deploy: Any) -> None:
    """Both ends count what crossed: 64 bytes of header, the rows, and the router logits."""
    deployment = deploy(1, 1, gate_on_attention=True)
    (counts,), (served,) = run(deployment, [Work(steps=10, seed=3, max_rows=32)])
    stats = deployment.attention[0].result()
    deployment.ffn[0].order("close")
    ffn_stats = deployment.ffn[0].result()

    rows, exchanges = counts["rows"], len(served)
    assert stats.bytes_sent == ffn_stats.bytes_received == 64 * exchanges + rows * (64 * 2 + 8 * 4)
    assert stats.bytes_received == ffn_stats.bytes_sent == 64 * exchanges + rows * 64 * 2
    assert (stats.exchanges, stats.rows, stats.real_rows) == (exchanges, rows, counts["real_rows"])
    assert 0 < ffn_stats.exchange_seconds < stats.exchange_seconds

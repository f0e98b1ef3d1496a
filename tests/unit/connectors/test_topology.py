"""Who sends to whom: every FFN rank gets every row once, and one rank of a group is answered."""

from __future__ import annotations

import pytest

from afd_shim.connectors.topology import Topology, check_rank
from afd_shim.errors import ConfigError

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (3, 2, 1), (1, 4, 1), (2, 1, 2), (4, 3, 2), (8, 2, 4), (6, 5, 3)]


@pytest.mark.parametrize(("attention", "ffn", "tp"), LAYOUTS)
def test_every_ffn_rank_gets_every_group_once(attention: int, ffn: int, tp: int) -> None:
    """Whatever the ratio, no row is missing and none comes twice."""
    topology = Topology(attention, ffn, tp)

    received: dict[int, list[int]] = {rank: [] for rank in range(ffn)}
    for rank in range(attention):
        for target in topology.ffn_ranks_fed_by(rank):
            received[target].append(topology.group_of(rank))

    assert received == {rank: list(range(topology.num_groups)) for rank in range(ffn)}


@pytest.mark.parametrize(("attention", "ffn", "tp"), LAYOUTS)
def test_sender_is_who_feeds(attention: int, ffn: int, tp: int) -> None:
    """What an FFN rank awaits is what an Attention rank sends."""
    topology = Topology(attention, ffn, tp)

    for group in range(topology.num_groups):
        for rank in range(ffn):
            sender = topology.sender(group, rank)
            assert topology.group_of(sender) == group
            assert rank in topology.ffn_ranks_fed_by(sender)


@pytest.mark.parametrize(("attention", "ffn", "tp"), LAYOUTS)
def test_one_rank_of_a_group_is_answered(attention: int, ffn: int, tp: int) -> None:
    """FFN rank 0 answers the rank that it received from, and no other of the group."""
    topology = Topology(attention, ffn, tp)

    answered = [rank for rank in range(attention) if topology.is_answered(rank)]

    assert answered == [topology.sender(group, 0) for group in range(topology.num_groups)]


@pytest.mark.parametrize(
    ("counts", "key"),
    [((0, 1, 1), "num_attention_ranks"), ((1, 0, 1), "num_ffn_ranks"), ((3, 1, 2), "num_attention_ranks")],
)
def test_impossible_counts_name_their_key(counts: tuple[int, int, int], key: str) -> None:
    """An incomplete group would leave FFN ranks without its rows."""
    with pytest.raises(ConfigError) as caught:
        Topology(*counts)

    assert caught.value.key == key


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_without_a_place_is_refused(rank: int) -> None:
    """Independent servers must count all their ranks together."""
    check_rank("attention", 1, 2)
    with pytest.raises(ConfigError, match="num_attention_ranks: 2, so attention rank"):
        check_rank("attention", rank, 2)

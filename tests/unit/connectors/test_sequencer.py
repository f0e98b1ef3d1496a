"""Which requests run together, in which order, and where their rows are."""

from __future__ import annotations

import random

from afd_shim.connectors.base import ExchangeHeader, Member, Reply
from afd_shim.connectors.sequencer import Plan, Sequencer, place
from afd_shim.connectors.wire import PlanEntry


def entry(group: int, rows: int = 1, layer: int = 1, **fields: object) -> PlanEntry:
    """Build a request of `group`."""
    header = ExchangeHeader(
        step=0, layer=layer, stage=0, rows=rows, real_rows=rows, reply=Reply.FINISHED, dummy=False, last_layer=False
    )
    logits = str(fields.pop("logits_dtype", ""))
    return PlanEntry(group, header._replace(**fields), logits)  # type: ignore[arg-type]  # fields of any type


def plans(sequencer: Sequencer) -> list[Plan]:
    """Take every plan there is."""
    found = []
    while (plan := sequencer.next_plan()) is not None:
        found.append(plan)
    return found


def test_nobody_waits_for_a_silent_group() -> None:
    """One request runs at once, though other groups exist."""
    sequencer = Sequencer(max_rows=8)
    sequencer.arrive(entry(2))

    assert [plan.entries for plan in plans(sequencer)] == [(entry(2),)]


def test_alike_requests_run_together_in_order_of_arrival() -> None:
    """Those of one layer and stage form one batch; others follow in theirs."""
    sequencer = Sequencer(max_rows=8)
    for arrived in (entry(3), entry(0, layer=2), entry(1), entry(4, stage=1)):
        sequencer.arrive(arrived)

    batches = [plan.entries for plan in plans(sequencer)]

    assert batches == [(entry(3), entry(1)), (entry(0, layer=2),), (entry(4, stage=1),)]


def test_batch_holds_no_more_than_its_bound() -> None:
    """What does not fit runs next; a smaller later one may fill the gap."""
    sequencer = Sequencer(max_rows=8)
    for arrived in (entry(0, rows=6), entry(1, rows=3), entry(2, rows=2), entry(3, rows=0)):
        sequencer.arrive(arrived)

    groups = [[member.group for member in plan.entries] for plan in plans(sequencer)]

    assert groups == [[0, 2, 3], [1]]


def test_router_logits_of_different_dtypes_do_not_mix() -> None:
    """One batch has one tensor of router logits."""
    sequencer = Sequencer(max_rows=8)
    sequencer.arrive(entry(0, logits_dtype="float32"))
    sequencer.arrive(entry(1, logits_dtype="bfloat16"))

    assert [len(plan.entries) for plan in plans(sequencer)] == [1, 1]


def test_step_counts_batches_that_end_a_step() -> None:
    """Two last layers in one batch are one tick; in two batches they are two."""
    sequencer = Sequencer(max_rows=8)
    steps = []
    for arrivals in (
        [entry(0)],
        [entry(0, layer=3, last_layer=True), entry(1, layer=3, last_layer=True)],
        [entry(0, layer=3, last_layer=True), entry(1, layer=1)],
        [entry(0)],
    ):
        for arrived in arrivals:
            sequencer.arrive(arrived)
        steps += [plan.step for plan in plans(sequencer)]

    assert steps == [0, 0, 1, 2, 2]


def test_every_request_runs_exactly_once() -> None:
    """Ten thousand random requests: none is lost, doubled, starved or put into an overfull batch."""
    choose = random.Random(0)  # noqa: S311 - not for secrets
    sequencer = Sequencer(max_rows=16)
    waiting: dict[int, int] = {}
    served = 0
    for turn in range(10_000):
        free = [group for group in range(5) if group not in waiting]
        for group in choose.sample(free, choose.randint(0, len(free))):
            sequencer.arrive(entry(group, rows=choose.randint(0, 16), layer=choose.randint(1, 3)))
            waiting[group] = turn
        plan = sequencer.next_plan()
        if plan is None:
            assert not waiting
            continue
        assert sum(member.header.rows for member in plan.entries) <= 16
        assert len({(member.header.layer, member.header.stage) for member in plan.entries}) == 1
        for member in plan.entries:
            assert turn - waiting.pop(member.group) < 5  # no more than one turn for each other group
            served += 1
    assert served > 10_000


def test_real_rows_come_first() -> None:
    """Real rows of all members, then the padding of all members, both in the members' order."""
    first, second, third = entry(0, rows=4, real_rows=3), entry(1, rows=2, real_rows=0), entry(2, rows=5, real_rows=4)

    assert place([first, second, third]) == (
        Member(0, first.header, 0, 7),
        Member(1, second.header, 3, 8),
        Member(2, third.header, 3, 10),
    )


def test_single_request_keeps_its_order() -> None:
    """One member's rows are where they were: its own memory is the batch."""
    only = entry(1, rows=4, real_rows=3)

    assert place([only]) == (Member(1, only.header, 0, 3),)

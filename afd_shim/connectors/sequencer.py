"""FFN rank 0 decides which requests run together, and in which order.

Only what has arrived counts: nobody waits for a peer that has nothing to send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from afd_shim.connectors.base import Member
from afd_shim.connectors.wire import PlanEntry


class Plan(NamedTuple):
    """One batch: its requests, in the order in which their rows are merged."""

    step: int
    entries: tuple[PlanEntry, ...]


class Sequencer:
    """Requests that have arrived, oldest first; `next_plan` merges those of one (layer, stage)."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._arrived: deque[PlanEntry] = deque()
        self._step = 0

    def arrive(self, entry: PlanEntry) -> None:
        """A request of a group (at most one of it at a time) is complete."""
        self._arrived.append(entry)

    def next_plan(self) -> Plan | None:
        """The batch of the oldest request, with all later ones of its (layer, stage) that fit.

        None if no request has arrived. The oldest request is always taken, so that none starves.
        """
        arrived = self._arrived
        if not arrived:
            return None
        entries = [arrived.popleft()] if len(arrived) == 1 else self._take_alike()
        plan = Plan(self._step, tuple(entries))
        for entry in entries:
            if entry.header.last_layer:
                self._step += 1
                break
        return plan

    def _take_alike(self) -> list[PlanEntry]:
        oldest = self._arrived[0]
        room = self._max_rows
        taken: list[PlanEntry] = []
        left: deque[PlanEntry] = deque()
        for entry in self._arrived:
            if _kind(entry) == _kind(oldest) and entry.header.rows <= room:
                taken.append(entry)
                room -= entry.header.rows
            else:
                left.append(entry)
        self._arrived = left
        return taken


def _kind(entry: PlanEntry) -> tuple[int, int, str]:
    """What requests must have in common to run together."""
    return entry.header.layer, entry.header.stage, entry.logits_dtype


def place(entries: Sequence[PlanEntry]) -> tuple[Member, ...]:
    """Where each request's rows are in the batch: all real rows first, then all others."""
    if len(entries) == 1:
        group, header, _ = entries[0]
        return (Member(group, header, 0, header.real_rows),)
    real = 0
    padding = sum(entry.header.real_rows for entry in entries)
    members = []
    for group, header, _ in entries:
        members.append(Member(group, header, real, padding))
        real += header.real_rows
        padding += header.rows - header.real_rows
    return tuple(members)

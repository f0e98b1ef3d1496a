"""FFN rank 0 decides which requests run together, and in which order.

Only what has arrived counts: nobody waits for a peer that has nothing to send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from afd_shim.connectors.base import ExchangeHeader, Member
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

    def arrive(self, group: int, header: ExchangeHeader) -> None:
        """A request of `group` (at most one at a time) is complete."""
        self._arrived.append(PlanEntry(group, header))

    def next_plan(self) -> Plan | None:
        """The batch of the oldest request, with all later ones of its (layer, stage) that fit.

        None if no request has arrived. The oldest request is always taken, so that none starves.
        """
        arrived = self._arrived
        if not arrived:
            return None
        if len(arrived) == 1:
            entries = [arrived.popleft()]
        else:
            entries = self._take_alike()
        plan = Plan(self._step, tuple(entries))
        if any(entry.header.last_layer for entry in entries):
            self._step += 1
        return plan

    def _take_alike(self) -> list[PlanEntry]:
        oldest = self._arrived[0].header
        room = self._max_rows
        taken: list[PlanEntry] = []
        left: deque[PlanEntry] = deque()
        for entry in self._arrived:
            header = entry.header
            alike = header.layer == oldest.layer and header.stage == oldest.stage
            if alike and header.rows <= room:
                taken.append(entry)
                room -= header.rows
            else:
                left.append(entry)
        self._arrived = left
        return taken


def place(entries: Sequence[PlanEntry]) -> tuple[Member, ...]:
    """Where each request's rows are in the batch: all real rows first, then all others."""
    real = 0
    padding = sum(entry.header.real_rows for entry in entries)
    members = []
    for group, header in entries:
        members.append(Member(group, header, real, padding))
        real += header.real_rows
        padding += header.rows - header.real_rows
    return tuple(members)

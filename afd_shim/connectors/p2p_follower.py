"""FFN ranks above 0 over NCCL: run what FFN rank 0's plans say, in their order."""

from __future__ import annotations

import torch

from afd_shim.connectors.base import Batch, ExchangeStats
from afd_shim.connectors.batches import Rows, make_batch
from afd_shim.connectors.framing import ConnectionEndedError, recv_rest
from afd_shim.connectors.joiner import HUB
from afd_shim.connectors.membership import Membership, peer_name
from afd_shim.connectors.p2p_leader import receive_rows
from afd_shim.connectors.pairs import Pairs
from afd_shim.connectors.sequencer import place
from afd_shim.connectors.wire import PlanCodec


class P2pFollower:
    """The serving thread's half of an FFN rank above 0; see `FFNConnector`."""

    def __init__(self, members: Membership, device: torch.device, stats: ExchangeStats, pairs: Pairs) -> None:
        agreement = members.agreement
        self._members = members
        self._stats = stats
        self._pairs = pairs
        self._plans = PlanCodec(agreement)
        self._plan = bytearray(self._plans.size)
        groups = range(members.topology.num_groups)
        self._rows = [Rows(agreement, device) for _ in groups]
        self._merged = Rows(agreement, device) if len(groups) > 1 else None

    def next_batch(self) -> Batch | None:
        """Wait for the next plan and receive its rows; None when closing, or when rank 0 said goodbye."""
        try:
            recv_rest(self._members.data[HUB], [self._plan], 0, self._plans.size)
        except ConnectionEndedError:
            if not self._members.closing.is_set:
                self._members.check_goodbye(HUB)
            return None
        step, entries = self._plans.decode(self._plan)
        self._stats.bytes_received += self._plans.size
        topology, rank = self._members.topology, self._members.hello.rank
        for entry in entries:
            peer = peer_name("attention", topology.sender(entry.group, rank))
            self._stats.bytes_received += receive_rows(self._pairs, self._members, peer, self._rows[entry.group], entry)
        members = place(entries)
        if len(members) == 1:
            return make_batch(step, members, self._rows[members[0].group])
        assert self._merged is not None  # one group alone never has two requests in a plan
        self._merged.use_logits(entries[0].logits_dtype)
        for group, header, first_real, first_padding in members:
            source = self._rows[group]
            self._merged.copy_from(source, 0, header.real_rows, first_real)
            self._merged.copy_from(source, header.real_rows, header.rows, first_padding)
        return make_batch(step, members, self._merged)

    def answer(self, batch: Batch, output: torch.Tensor) -> None:
        """FFN rank 0 alone answers."""

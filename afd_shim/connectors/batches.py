"""The tensors of a batch: merged where several requests run together, else the request's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from afd_shim.connectors.base import Batch, Member
from afd_shim.connectors.staging import writable_bytes
from afd_shim.connectors.wire import Agreement


class Rows:
    """Room for `max_rows` rows of hidden states, and of router logits where they travel."""

    def __init__(self, agreement: Agreement, device: torch.device, *, pinned: bool = False) -> None:
        self._agreement = agreement
        self.hidden = torch.empty(
            agreement.max_rows,
            agreement.hidden_size,
            dtype=getattr(torch, agreement.dtype),
            device=device,
            pin_memory=pinned,
        )
        self.logits_memory = torch.empty(
            agreement.max_rows * agreement.num_experts * 4,
            dtype=torch.uint8,
            device=device,
            pin_memory=pinned,
        )
        self.logits: torch.Tensor | None = None
        self._first_rows = self.hidden

    def first(self, count: int) -> torch.Tensor:
        """The first `count` rows of hidden states; all layers of a step ask for the same view."""
        if self._first_rows.shape[0] != count:
            self._first_rows = self.hidden[:count]
        return self._first_rows

    def use_logits(self, dtype: str) -> None:
        """Make `logits` what router logits of `dtype` need; None for ""."""
        self.logits = self._logits_at(0, self._agreement.max_rows, dtype) if dtype else None

    def _logits_at(self, start: int, rows: int, dtype: str) -> torch.Tensor:
        """`rows` rows of router logits, from byte `start` of their memory."""
        size = rows * self._agreement.logits_row_bytes(dtype)
        flat = self.logits_memory[start : start + size].view(getattr(torch, dtype))
        return flat.view(rows, self._agreement.num_experts)

    def copy_from(self, source: Rows, start: int, end: int, to: int) -> None:
        """Copy rows [start, end) of `source` to row `to` and on."""
        if start == end:
            return
        after = to + end - start
        self.hidden[to:after].copy_(source.hidden[start:end], non_blocking=True)
        if self.logits is not None and source.logits is not None:
            self.logits[to:after].copy_(source.logits[start:end], non_blocking=True)


class Request(Rows):
    """Host memory for one request as it travels: hidden states, then router logits.

    `payload` is that memory; `hidden` and `logits` are views of it.
    """

    def __init__(self, agreement: Agreement, *, pinned: bool) -> None:
        self._agreement = agreement
        memory = torch.empty(agreement.max_payload_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.payload = writable_bytes(memory)
        rows, width = agreement.max_rows, agreement.hidden_size
        flat = memory[: rows * agreement.row_bytes].view(getattr(torch, agreement.dtype))
        self.hidden = flat.view(rows, width)
        self.logits_memory = memory
        self.logits = None
        self._first_rows = self.hidden

    def arrived(self, rows: int, logits_dtype: str) -> None:
        """`rows` rows are complete: the router logits start right after them."""
        if logits_dtype:
            start = self._agreement.logits_offset(rows)
            self.logits = self._logits_at(start, rows, logits_dtype)


def make_batch(step: int, members: Sequence[Member], rows: Rows) -> Batch:
    """The Batch of `members`, whose rows are the first ones of `rows`."""
    first = members[0].header
    count, real_rows = first.rows, first.real_rows
    dummy, ends_step = first.dummy, first.last_layer
    for member in members[1:]:
        header = member.header
        count += header.rows
        real_rows += header.real_rows
        dummy = dummy and header.dummy
        ends_step = ends_step or header.last_layer
    return Batch(
        layer=first.layer,
        stage=first.stage,
        step=step,
        hidden_states=rows.first(count),
        router_logits=None if rows.logits is None else rows.logits[:count],
        real_rows=real_rows,
        dummy=dummy,
        ends_step=ends_step,
        reply=first.reply,
        members=tuple(members),
    )

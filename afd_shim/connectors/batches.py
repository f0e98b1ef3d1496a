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
        dtype: torch.dtype = getattr(torch, agreement.dtype)
        self.hidden = torch.empty(
            agreement.max_rows, agreement.hidden_size, dtype=dtype, device=device, pin_memory=pinned
        )
        self.logits: torch.Tensor | None = None
        if agreement.num_experts:
            self.logits = torch.empty(
                agreement.max_rows,
                agreement.num_experts,
                dtype=getattr(torch, agreement.router_logits_dtype),
                device=device,
                pin_memory=pinned,
            )

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
        self._memory = torch.empty(
            agreement.max_payload_bytes, dtype=torch.uint8, pin_memory=pinned
        )
        self.payload = writable_bytes(self._memory)
        rows, width = agreement.max_rows, agreement.hidden_size
        self.hidden = (
            self._memory[: rows * agreement.row_bytes]
            .view(getattr(torch, agreement.dtype))
            .view(rows, width)
        )
        self.logits = None

    def arrived(self, rows: int) -> None:
        """`rows` rows are complete: the router logits start right after them."""
        agreed = self._agreement
        if agreed.num_experts:
            start = agreed.logits_offset(rows)
            self.logits = (
                self._memory[start : start + rows * agreed.logits_row_bytes]
                .view(getattr(torch, agreed.router_logits_dtype))
                .view(rows, agreed.num_experts)
            )


def make_batch(step: int, members: Sequence[Member], rows: Rows) -> Batch:
    """The Batch of `members`, whose rows are the first ones of `rows`."""
    headers = [member.header for member in members]
    count = sum(header.rows for header in headers)
    first = headers[0]
    return Batch(
        layer=first.layer,
        stage=first.stage,
        step=step,
        hidden_states=rows.hidden[:count],
        router_logits=None if rows.logits is None else rows.logits[:count],
        real_rows=sum(header.real_rows for header in headers),
        dummy=all(header.dummy for header in headers),
        ends_step=any(header.last_layer for header in headers),
        reply=first.reply,
        members=tuple(members),
    )

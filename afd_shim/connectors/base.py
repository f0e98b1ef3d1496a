"""What a connector is: the two interfaces, and the values that cross them.

One exchange per Attention group and MoE layer: Attention sends the layer's input rows (and the
router logits, where it owns the gate), FFN answers with the layer's output rows. Nothing here
imports torch: tensors are named in annotations only.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    import torch

    from afd_shim.errors import PeerLostError

PROTOCOL_VERSION = 1
"""Raised whenever a frame or a handshake message changes; peers must agree on it."""


class Reply(enum.IntEnum):
    """What the FFN answers with."""

    FINISHED = 0
    """The output of the native `MoERunner.forward`: scaled, shared experts added, reduced."""

    RAW = 1
    """The routed output alone, unscaled; Attention's own `forward` does the rest."""


class ExchangeHeader(NamedTuple):
    """One request, as the Attention rank announces it."""

    step: int
    """Attention's own count of forwards, from 0."""

    layer: int
    """The decoder layer's index; one of `Hello.moe_layers`."""

    stage: int
    """The micro-batch (ubatch) of a step; 0 without dual-batch overlap."""

    rows: int
    """Rows of the tensors sent; 0 is legal."""

    real_rows: int
    """Rows of real tokens. They are the first ones; the others are padding or placeholders."""

    reply: Reply
    """What is asked for; the same in every exchange of a connection."""

    dummy: bool
    """The forward is no real step (warm-up, profile, capture, idle peer): `real_rows` is 0."""

    last_layer: bool
    """This is the last exchange of its step: the FFN's EPLB state steps after it."""


RoleName = Literal["attention", "ffn"]


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank says of itself before the first tensor; the FFN compares it with its own."""

    protocol: int = PROTOCOL_VERSION
    role: RoleName

    rank: int
    """The rank within the role, from 0."""

    release: str
    """vLLM's release, such as "0.32.0"."""

    patch_digest: str
    model_fingerprint: str
    num_experts: int
    """Logical routed experts per MoE layer: the width of the router logits."""

    hidden_size: int
    """Width of the rows that travel."""

    dtype: str
    """Of the hidden states and of the reply: "bfloat16", "float16" or "float32"."""

    gate_on_attention: bool
    """Attention applies the gate: router logits travel with the hidden states."""

    moe_layers: tuple[int, ...]
    """Indices of the decoder layers that exchange, ascending."""

    max_num_tokens: int
    """vLLM's `max_num_batched_tokens`: the most rows of one request or of one batch."""

    num_attention_ranks: int
    num_ffn_ranks: int
    reply: Reply = Reply.FINISHED
    attention_tp_size: int = 1
    """Attention's tensor parallel size: so many consecutive ranks hold the same rows."""


class Member(NamedTuple):
    """One request of a `Batch`, and where its rows are in it."""

    group: int
    """The Attention group (its tensor parallel ranks hold the same rows), from 0."""

    header: ExchangeHeader
    first_real: int
    """The batch's row where its `real_rows` rows start."""

    first_padding: int
    """The batch's row where its other rows start."""


@dataclass(slots=True, eq=False)  # not frozen: that costs microseconds per exchange
class Batch:
    """Requests of one (layer, stage), merged: all real rows first, then all others.

    The tensors belong to the connector: they are valid until the next `recv_attn_output`.
    """

    layer: int
    stage: int
    step: int
    """How many batches with `ends_step` came before this one; the same on every FFN rank."""

    hidden_states: torch.Tensor
    """[rows, hidden_size] in `Hello.dtype`."""

    router_logits: torch.Tensor | None
    """[rows, num_experts] in the gate's dtype, where Attention owns the gate."""

    real_rows: int
    """The first `real_rows` rows belong to real tokens."""

    dummy: bool
    """Every member is a dummy."""

    ends_step: bool
    """A member's last exchange of its step is in here: EPLB ticks once, on every rank alike."""

    reply: Reply
    members: tuple[Member, ...]


@dataclass(slots=True)
class ExchangeStats:
    """Counters of one connector; read them at any time."""

    exchanges: int = 0
    """Attention: requests answered. FFN: batches answered."""

    rows: int = 0
    real_rows: int = 0
    bytes_sent: int = 0
    """Frame headers and payloads, without TCP/IP's own."""

    bytes_received: int = 0
    exchange_seconds: float = 0.0
    """Attention: from the start of a send to the end of its receive. FFN: from a batch that is
    complete to its last answer sent."""


class ConnectorConfig(Protocol):
    """The part of the `afd` configuration (`afd_shim.config.AFDConfig`) that a connector reads."""

    connector: str
    host: str
    port: int
    num_attention_ranks: int
    num_ffn_ranks: int
    connector_extra_config: dict[str, Any]
    startup_timeout_s: float


PeerLostCallback = Callable[["PeerLostError"], None]
"""Called once, from the connector's own thread, when a peer is gone that this rank cannot go on
without. Attention: any FFN rank, also after a clean goodbye (`error.clean`). FFN: any rank that
died; an Attention rank that said goodbye is merely no longer served."""


class AttentionConnector(ABC):
    """One per Attention rank; used from one thread, but for `close`."""

    stats: ExchangeStats

    @abstractmethod
    def connect(self) -> None:
        """Meet the FFN ranks and agree with them; either role may be first.

        Raises RendezvousTimeoutError (naming the missing ranks), HandshakeError (naming what
        disagrees), PeerLostError, or TransportError when closed meanwhile.
        """

    @abstractmethod
    def send_attn_output(
        self,
        header: ExchangeHeader,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
    ) -> None:
        """Send one request; its answer must be received before the next one is sent.

        `hidden_states`: [header.rows, hidden_size], contiguous, in `Hello.dtype`.
        `router_logits`: [header.rows, num_experts], contiguous, in the gate's dtype; given
        exactly where Attention owns the gate. Both may be reused when this returns.

        Raises ValueError for tensors that do not fit the header, PeerLostError.
        """

    @abstractmethod
    def recv_ffn_output(self, header: ExchangeHeader, out: torch.Tensor) -> torch.Tensor:
        """Receive the answer to `header` into `out`, and return it.

        `out`: [rows, hidden_size], contiguous, in `Hello.dtype`. On a CUDA
        device it is filled on the current stream. Raises PeerLostError, FrameError.
        """

    def raise_if_lost(self) -> None:  # noqa: B027 - most transports have nothing to say here
        """Raise PeerLostError if a peer is gone, so that answers of this step cannot be trusted.

        For transports that only enqueue their receives: a stream that an abort unblocked holds
        anything. One that waits for each answer has raised already.
        """

    @abstractmethod
    def close(self, reason: str | None = None) -> None:
        """Say goodbye and release everything; from any thread, any number of times.

        With a `reason` the peers treat it as a loss, and report the reason.
        """


class FFNConnector(ABC):
    """One per FFN rank; used from the serving thread, but for `close`."""

    stats: ExchangeStats

    @abstractmethod
    def connect(self) -> None:
        """Meet every Attention rank and the other FFN ranks; either role may be first.

        Returns early when closed meanwhile. Raises RendezvousTimeoutError (naming the missing
        ranks), HandshakeError (FFN ranks that disagree with rank 0), PeerLostError, and
        TransportError when the address cannot be bound.
        """

    @abstractmethod
    def recv_attn_output(self) -> Batch | None:
        """Wait for the next batch; the same batches in the same order on every FFN rank.

        None: every Attention rank has said goodbye, or this connector is closed. Raises
        PeerLostError, FrameError.
        """

    @abstractmethod
    def send_ffn_output(self, batch: Batch, output: torch.Tensor) -> None:
        """Answer every member of `batch` with its own rows, in its own order.

        `output`: [rows, hidden_size], contiguous, in `Hello.dtype`, row for row that of
        `batch.hidden_states`. FFN rank 0 alone sends; the others only count. Raises ValueError
        for a tensor that does not fit, PeerLostError.
        """

    @abstractmethod
    def close(self, reason: str | None = None) -> None:
        """Say goodbye and release everything; from any thread, any number of times.

        A blocked `connect` or `recv_attn_output` returns. With a `reason` the peers treat it as a
        loss, and report the reason.
        """

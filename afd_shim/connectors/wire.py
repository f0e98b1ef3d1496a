"""The frames: what travels, byte for byte (docs/wire-protocol.md). No pickle, no torch.

A frame is a 16-byte prefix and a body of the length that the prefix announces. Control frames carry
JSON, read into msgspec structs. Data frames carry 48 more header bytes and then the payload; every
field is checked against the `Agreement` of the handshake before a byte of payload is read. Unknown
flags and the zeros at the end are ignored: both sides have agreed on the protocol's version.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from afd_shim.connectors.base import PROTOCOL_VERSION, ExchangeHeader, Reply
from afd_shim.errors import FrameError

MAGIC: Final = b"AFDx"
PREFIX: Final = struct.Struct("<4sBBHQ")
"""Magic, protocol version, kind, zero, body length. The same in every protocol version."""

EXCHANGE: Final = struct.Struct("<8sQ16sQIIIHB9x")
"""The prefix's first 8 bytes and body length, the 16 bytes of the agreement (AGREED), then step, layer,
rows, real_rows, stage, flags, zeros: 64 bytes before the payload of a REQUEST or a REPLY. A PLAN starts
with the same, the counts of its members and of its entries in the places of rows and real_rows."""

AGREED: Final = struct.Struct("<IIBBB5x")
"""Hidden size, router logits' width, dtype, router logits' dtype, reply: what never changes is compared
in one piece."""

PLAN_ENTRY: Final = struct.Struct("<QIIIB3x")
"""One member of a plan: its own step, group, rows, real_rows, flags."""

MAX_CONTROL_BODY: Final = 64 * 1024
MAX_STAGES: Final = 16
PAYLOAD_ALIGNMENT: Final = 16
"""Router logits start at a multiple of this after the hidden states."""


class Kind(enum.IntEnum):
    """What a frame is; 1-15 travel on control connections and open data ones, 16-31 on data ones."""

    HELLO = 1
    WELCOME = 2
    REFUSAL = 3
    ROSTER = 4
    READY = 5
    ATTACH = 6
    ATTACHED = 7
    GOODBYE = 8
    REQUEST = 16
    REPLY = 17
    PLAN = 18
    PAIR = 19


_HEADS: Final = {
    kind: PREFIX.pack(MAGIC, PROTOCOL_VERSION, kind, 0, 0)[:8] for kind in (Kind.REQUEST, Kind.REPLY, Kind.PLAN)
}


class DType(NamedTuple):
    """A dtype on the wire: its code, and bytes per item."""

    code: int
    itemsize: int


DTYPES: Final = {"bfloat16": DType(1, 2), "float16": DType(2, 2), "float32": DType(3, 4)}
"""The dtypes that travel, by torch's name."""

_DUMMY: Final = 1
_LAST_LAYER: Final = 2


def dtype_named(name: str) -> DType:
    """The wire's code and item size in bytes of torch dtype `name`; FrameError for any other."""
    try:
        return DTYPES[name]
    except KeyError:
        raise FrameError(
            f"{name} does not travel between the roles; serve the model with --dtype {', '.join(DTYPES)}."
        ) from None


@dataclass(frozen=True, slots=True)
class Agreement:
    """What both ends of a data connection agreed on: the bounds of every frame."""

    max_rows: int
    hidden_size: int
    dtype: str
    num_experts: int
    """Width of the router logits that travel; 0 where FFN owns the gate."""

    moe_layers: frozenset[int]
    reply: Reply
    num_groups: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of hidden states."""
        return self.hidden_size * dtype_named(self.dtype).itemsize

    def logits_row_bytes(self, dtype: str) -> int:
        """Bytes of one row of router logits of `dtype`; 0 for ""."""
        return self.num_experts * dtype_named(dtype).itemsize if dtype else 0

    @property
    def max_payload_bytes(self) -> int:
        """Bytes of the largest request's payload."""
        return self.logits_offset(self.max_rows) + self.max_rows * self.num_experts * 4

    def logits_offset(self, rows: int) -> int:
        """Where the router logits start in a payload of `rows` rows."""
        size = rows * self.row_bytes
        return size + -size % PAYLOAD_ALIGNMENT if self.num_experts else size


class Prefix(NamedTuple):
    """What starts every frame."""

    version: int
    kind: int
    body_bytes: int


def decode_prefix(data: bytes | bytearray | memoryview) -> Prefix:
    """Read 16 bytes; FrameError if they do not start a frame of ours."""
    magic, version, kind, zero, body_bytes = PREFIX.unpack_from(data)
    if magic != MAGIC or zero != 0:
        raise FrameError(
            f"not an afd-shim frame (it starts with {bytes(data[:8])!r}); is another program using this port?"
        )
    return Prefix(version, kind, body_bytes)


def check_control_prefix(prefix: Prefix) -> None:
    """FrameError unless `prefix` starts a control frame that this side can read."""
    if prefix.version != PROTOCOL_VERSION:
        raise FrameError(
            f"the peer speaks protocol version {prefix.version}, this side {PROTOCOL_VERSION}; "
            f"install the same afd-shim on both."
        )
    if not Kind.HELLO <= prefix.kind <= Kind.GOODBYE:
        raise FrameError(f"a control connection carried a frame of kind {prefix.kind}.")
    if prefix.body_bytes > MAX_CONTROL_BODY:
        raise FrameError(f"a control frame of {prefix.body_bytes} bytes; at most {MAX_CONTROL_BODY} are read.")


def encode_control(kind: Kind, body: bytes) -> bytes:
    """A control frame; `body` is JSON of at most MAX_CONTROL_BODY bytes."""
    if len(body) > MAX_CONTROL_BODY:
        raise FrameError(f"a {kind.name} of {len(body)} bytes; at most {MAX_CONTROL_BODY} travel.")
    return PREFIX.pack(MAGIC, PROTOCOL_VERSION, kind, 0, len(body)) + body


_HEADER_BODY: Final = EXCHANGE.size - PREFIX.size


class _Header(NamedTuple):
    """A data frame's 64 bytes, read but not judged."""

    head: bytes
    body_bytes: int
    agreed: bytes
    step: int
    layer: int
    rows: int
    real_rows: int
    stage: int
    flags: int


class _DataCodec:
    """What the codecs of one connection's data frames share."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._row_bytes = agreement.row_bytes
        self._blocks = {"": self._block("")}
        if agreement.num_experts:
            self._blocks |= {dtype: self._block(dtype) for dtype in DTYPES}
        self._dtypes = {block: dtype for dtype, block in self._blocks.items()}

    def _block(self, logits_dtype: str) -> bytes:
        """The 16 bytes that stand for the agreement, in frames with router logits of this dtype."""
        agreed = self._agreement
        code = dtype_named(logits_dtype).code if logits_dtype else 0
        experts = agreed.num_experts if logits_dtype else 0
        return AGREED.pack(agreed.hidden_size, experts, dtype_named(agreed.dtype).code, code, agreed.reply)

    def _logits_dtype(self, found: _Header, kind: Kind) -> str:
        """The router logits' dtype of a frame; FrameError names the first fixed field that is not as agreed."""
        if found.head == _HEADS[kind] and (dtype := self._dtypes.get(found.agreed)) is not None:
            with_logits = kind is not Kind.REPLY and self._agreement.num_experts > 0
            if with_logits == bool(dtype):
                return dtype
        if found.head[:5] != _HEADS[kind][:5]:
            raise FrameError(f"not a frame of this protocol: it starts with {found.head!r}.")
        given = AGREED.unpack(found.agreed)
        likely = next((name for name, dtype in DTYPES.items() if dtype.code == given[3]), next(iter(DTYPES)))
        expected = self._block(likely if kind is not Kind.REPLY and self._agreement.num_experts else "")
        _expect("kind", found.head[5], kind)
        for what, value, agreed in zip(
            ("hidden size", "router logits' width", "dtype", "router logits' dtype", "reply kind"),
            given,
            AGREED.unpack(expected),
            strict=True,
        ):
            _expect(what, value, agreed)
        raise FrameError(f"bytes that must be zero are not: {found.head!r}, {found.agreed!r}.")


class ExchangeCodec(_DataCodec):
    """Packs and checks the 64-byte headers of one connection's requests and replies.

    A request says what dtype its router logits have ("" where none travel): gates of one model may
    differ, and only applying one tells.
    """

    def payload_bytes(self, rows: int, logits_dtype: str = "") -> int:
        """Bytes that follow the header of an exchange of `rows` rows."""
        if not logits_dtype:
            return rows * self._row_bytes
        agreed = self._agreement
        return agreed.logits_offset(rows) + rows * agreed.logits_row_bytes(logits_dtype)

    def encode(self, buffer: bytearray, kind: Kind, header: ExchangeHeader, logits_dtype: str = "") -> int:
        """Pack `header` into `buffer` (64 bytes); return the payload's bytes."""
        step, layer, stage, rows, real_rows, _, dummy, last_layer = header
        payload = self.payload_bytes(rows, logits_dtype)
        flags = (_DUMMY if dummy else 0) | (_LAST_LAYER if last_layer else 0)
        EXCHANGE.pack_into(
            buffer,
            0,
            _HEADS[kind],
            _HEADER_BODY + payload,
            self._blocks[logits_dtype],
            step,
            layer,
            rows,
            real_rows,
            stage,
            flags,
        )
        return payload

    def decode(self, buffer: bytes | bytearray | memoryview, kind: Kind) -> tuple[ExchangeHeader, str]:
        """(header, router logits' dtype); FrameError names the first field not agreed on."""
        found = _Header._make(EXCHANGE.unpack_from(buffer))
        logits_dtype = self._logits_dtype(found, kind)
        agreed = self._agreement
        if found.rows > agreed.max_rows:
            raise FrameError(f"rows: {found.rows}, but at most {agreed.max_rows} were agreed.")
        header = ExchangeHeader(
            found.step,
            found.layer,
            found.stage,
            found.rows,
            found.real_rows,
            agreed.reply,
            found.flags & _DUMMY != 0,
            found.flags & _LAST_LAYER != 0,
        )
        check_header(header, agreed)
        length = _HEADER_BODY + self.payload_bytes(found.rows, logits_dtype)
        if found.body_bytes != length:
            _expect("length", found.body_bytes, length)
        return header, logits_dtype


def check_header(header: ExchangeHeader, agreed: Agreement) -> None:
    """FrameError unless `header` describes an exchange that was agreed on."""
    _, layer, stage, rows, real_rows, _, dummy, _ = header
    if layer not in agreed.moe_layers:
        raise FrameError(f"layer: {layer} is none of the {len(agreed.moe_layers)} MoE layers agreed on.")
    if stage >= MAX_STAGES:
        raise FrameError(f"stage: {stage}, but at most {MAX_STAGES} exist.")
    if real_rows > rows:
        raise FrameError(f"real rows: {real_rows} of only {rows} rows.")
    if dummy and real_rows:
        raise FrameError(f"real rows: {real_rows} in a dummy forward; 0 are allowed.")


def _expect(what: str, found: int, agreed: int) -> None:
    if found != agreed:
        raise FrameError(f"{what}: {found}, but {int(agreed)} was agreed.")


class PlanEntry(NamedTuple):
    """One member of a batch, as FFN rank 0 publishes it."""

    group: int
    header: ExchangeHeader
    logits_dtype: str = ""
    """The router logits'; "" where none travel."""


class PlanCodec(_DataCodec):
    """Packs and checks FFN rank 0's plans; all of one connection have the same length."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.size = EXCHANGE.size + agreement.num_groups * PLAN_ENTRY.size

    def encode(self, step: int, entries: Sequence[PlanEntry]) -> bytearray:
        """A PLAN frame for the batch of `entries`: not empty, alike in layer, stage and dtype."""
        frame = bytearray(self.size)
        first = entries[0].header
        EXCHANGE.pack_into(
            frame,
            0,
            _HEADS[Kind.PLAN],
            self.size - PREFIX.size,
            self._blocks[entries[0].logits_dtype],
            step,
            first.layer,
            len(entries),
            self._agreement.num_groups,
            first.stage,
            0,
        )
        offset = EXCHANGE.size
        for group, header, _ in entries:
            flags = (_DUMMY if header.dummy else 0) | (_LAST_LAYER if header.last_layer else 0)
            PLAN_ENTRY.pack_into(frame, offset, header.step, group, header.rows, header.real_rows, flags)
            offset += PLAN_ENTRY.size
        return frame

    def decode(self, frame: bytes | bytearray | memoryview) -> tuple[int, list[PlanEntry]]:
        """(step, members) of a PLAN frame; FrameError names the first field that is wrong."""
        found = _Header._make(EXCHANGE.unpack_from(frame))
        logits_dtype = self._logits_dtype(found, Kind.PLAN)
        agreed, count = self._agreement, found.rows
        _expect("length", found.body_bytes, self.size - PREFIX.size)
        _expect("entries", found.real_rows, agreed.num_groups)
        if not 1 <= count <= agreed.num_groups:
            raise FrameError(f"members: {count} of {agreed.num_groups} Attention groups.")
        members = []
        for index in range(count):
            step, group, rows, real_rows, flags = PLAN_ENTRY.unpack_from(frame, EXCHANGE.size + index * PLAN_ENTRY.size)
            header = ExchangeHeader(
                step,
                found.layer,
                found.stage,
                rows,
                real_rows,
                agreed.reply,
                flags & _DUMMY != 0,
                flags & _LAST_LAYER != 0,
            )
            check_header(header, agreed)
            members.append(PlanEntry(group, header, logits_dtype))
        groups = {member.group for member in members}
        if len(groups) != count or max(groups) >= agreed.num_groups:
            raise FrameError(f"members: groups {[m.group for m in members]} are not distinct ones.")
        if sum(member.header.rows for member in members) > agreed.max_rows:
            raise FrameError(f"rows: more than the {agreed.max_rows} agreed in one batch.")
        return found.step, members

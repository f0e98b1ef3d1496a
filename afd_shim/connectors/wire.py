"""The frames: what travels, byte for byte (docs/wire-protocol.md). No pickle, no torch.

A frame is a 16-byte prefix and a body of the length that the prefix announces. Control frames carry
JSON, read into msgspec structs. Data frames carry 48 more header bytes and then the payload; every
field is checked against the `Agreement` of the handshake before a byte of payload is read.
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

EXCHANGE: Final = struct.Struct("<4sBBHQQIHBBIIIIBB14x")
"""The prefix, then step, layer, stage, flags, reply, rows, real_rows, hidden_size, experts, dtype,
router logits' dtype, zeros: 64 bytes before the payload of a REQUEST or a REPLY."""

PLAN_HEAD: Final = struct.Struct("<4sBBHQQIHBBIIB23x")
"""The prefix, then step, layer, stage, flags, reply, members, entries, logits' dtype, zeros."""

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


class DType(NamedTuple):
    """A dtype on the wire: its code, and bytes per item."""

    code: int
    itemsize: int


DTYPES: Final = {"bfloat16": DType(1, 2), "float16": DType(2, 2), "float32": DType(3, 4)}
"""The dtypes that travel, by torch's name."""

_DTYPE_NAMES: Final = {0: "", **{dtype.code: name for name, dtype in DTYPES.items()}}

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


class ExchangeCodec:
    """Packs and checks the 64-byte headers of one connection's requests and replies.

    A request says what dtype its router logits have ("" where none travel): gates of one model may
    differ, and only applying one tells.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._dtype = dtype_named(agreement.dtype).code
        self._row_bytes = agreement.row_bytes

    def payload_bytes(self, rows: int, logits_dtype: str = "") -> int:
        """Bytes that follow the header of an exchange of `rows` rows."""
        if not logits_dtype:
            return rows * self._row_bytes
        agreed = self._agreement
        return agreed.logits_offset(rows) + rows * agreed.logits_row_bytes(logits_dtype)

    def encode(self, buffer: bytearray, kind: Kind, header: ExchangeHeader, logits_dtype: str = "") -> int:
        """Pack `header` into `buffer` (64 bytes); return the payload's bytes."""
        payload = self.payload_bytes(header.rows, logits_dtype)
        EXCHANGE.pack_into(
            buffer,
            0,
            MAGIC,
            PROTOCOL_VERSION,
            kind,
            0,
            EXCHANGE.size - PREFIX.size + payload,
            header.step,
            header.layer,
            header.stage,
            (_DUMMY if header.dummy else 0) | (_LAST_LAYER if header.last_layer else 0),
            header.reply,
            header.rows,
            header.real_rows,
            self._agreement.hidden_size,
            self._agreement.num_experts if logits_dtype else 0,
            self._dtype,
            dtype_named(logits_dtype).code if logits_dtype else 0,
        )
        return payload

    def decode(self, buffer: bytes | bytearray | memoryview, kind: Kind) -> tuple[ExchangeHeader, str]:
        """(header, router logits' dtype); FrameError names the first field not agreed on."""
        (
            magic,
            version,
            found,
            _,
            body_bytes,
            step,
            layer,
            stage,
            flags,
            reply,
            rows,
            real_rows,
            hidden_size,
            experts,
            dtype,
            logits_code,
        ) = EXCHANGE.unpack_from(buffer)
        agreed = self._agreement
        if magic != MAGIC or version != PROTOCOL_VERSION:
            raise FrameError(f"not a frame of this protocol: it starts with {bytes(buffer[:8])!r}.")
        experts_agreed = agreed.num_experts if kind is Kind.REQUEST else 0
        _expect("kind", found, kind)
        _expect("hidden size", hidden_size, agreed.hidden_size)
        _expect("dtype", dtype, self._dtype)
        _expect("router logits' width", experts, experts_agreed)
        _expect("reply kind", reply, agreed.reply)
        logits_dtype = _logits_dtype(logits_code, experts_agreed)
        if rows > agreed.max_rows:
            raise FrameError(f"rows: {rows}, but at most {agreed.max_rows} were agreed.")
        header = _header(agreed, step, layer, stage, rows, real_rows, flags)
        length = EXCHANGE.size - PREFIX.size + self.payload_bytes(rows, logits_dtype)
        _expect("length", body_bytes, length)
        return header, logits_dtype


def _header(
    agreed: Agreement, step: int, layer: int, stage: int, rows: int, real_rows: int, flags: int
) -> ExchangeHeader:
    header = ExchangeHeader(
        step,
        layer,
        stage,
        rows,
        real_rows,
        agreed.reply,
        bool(flags & _DUMMY),
        bool(flags & _LAST_LAYER),
    )
    check_header(header, agreed)
    return header


def _logits_dtype(code: int, experts: int) -> str:
    name = _DTYPE_NAMES.get(code)
    if name is None or bool(name) != bool(experts):
        raise FrameError(f"router logits' dtype: code {code}, with {experts} experts agreed.")
    return name


def check_header(header: ExchangeHeader, agreed: Agreement) -> None:
    """FrameError unless `header` describes an exchange that was agreed on."""
    if header.layer not in agreed.moe_layers:
        raise FrameError(f"layer: {header.layer} is none of the {len(agreed.moe_layers)} MoE layers agreed on.")
    if header.stage >= MAX_STAGES:
        raise FrameError(f"stage: {header.stage}, but at most {MAX_STAGES} exist.")
    if header.real_rows > header.rows:
        raise FrameError(f"real rows: {header.real_rows} of only {header.rows} rows.")
    if header.dummy and header.real_rows:
        raise FrameError(f"real rows: {header.real_rows} in a dummy forward; 0 are allowed.")


def _expect(what: str, found: int, agreed: int) -> None:
    if found != agreed:
        raise FrameError(f"{what}: {found}, but {int(agreed)} was agreed.")


class PlanEntry(NamedTuple):
    """One member of a batch, as FFN rank 0 publishes it."""

    group: int
    header: ExchangeHeader
    logits_dtype: str = ""
    """The router logits'; "" where none travel."""


class PlanCodec:
    """Packs and checks FFN rank 0's plans; all of one connection have the same length."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self.size = PLAN_HEAD.size + agreement.num_groups * PLAN_ENTRY.size

    def encode(self, step: int, entries: Sequence[PlanEntry]) -> bytearray:
        """A PLAN frame for the batch of `entries`: not empty, alike in layer, stage and dtype."""
        frame = bytearray(self.size)
        first = entries[0].header
        PLAN_HEAD.pack_into(
            frame,
            0,
            MAGIC,
            PROTOCOL_VERSION,
            Kind.PLAN,
            0,
            self.size - PREFIX.size,
            step,
            first.layer,
            first.stage,
            0,
            first.reply,
            len(entries),
            self._agreement.num_groups,
            dtype_named(entries[0].logits_dtype).code if entries[0].logits_dtype else 0,
        )
        offset = PLAN_HEAD.size
        for group, header, _ in entries:
            flags = (_DUMMY if header.dummy else 0) | (_LAST_LAYER if header.last_layer else 0)
            PLAN_ENTRY.pack_into(frame, offset, header.step, group, header.rows, header.real_rows, flags)
            offset += PLAN_ENTRY.size
        return frame

    def decode(self, frame: bytes | bytearray | memoryview) -> tuple[int, list[PlanEntry]]:
        """(step, members) of a PLAN frame; FrameError names the first field that is wrong."""
        (
            magic,
            version,
            kind,
            _,
            body_bytes,
            step,
            layer,
            stage,
            _,
            reply,
            count,
            entries,
            code,
        ) = PLAN_HEAD.unpack_from(frame)
        agreed = self._agreement
        if magic != MAGIC or version != PROTOCOL_VERSION:
            raise FrameError(f"not a frame of this protocol: it starts with {bytes(frame[:8])!r}.")
        _expect("kind", kind, Kind.PLAN)
        _expect("length", body_bytes, self.size - PREFIX.size)
        _expect("entries", entries, agreed.num_groups)
        _expect("reply kind", reply, agreed.reply)
        if not 1 <= count <= agreed.num_groups:
            raise FrameError(f"members: {count} of {agreed.num_groups} Attention groups.")
        logits_dtype = _logits_dtype(code, agreed.num_experts)
        members = []
        offset = PLAN_HEAD.size
        for _ in range(count):
            own_step, group, rows, real_rows, flags = PLAN_ENTRY.unpack_from(frame, offset)
            offset += PLAN_ENTRY.size
            header = _header(agreed, own_step, layer, stage, rows, real_rows, flags)
            members.append(PlanEntry(group, header, logits_dtype))
        groups = {member.group for member in members}
        if len(groups) != count or max(groups) >= agreed.num_groups:
            raise FrameError(f"members: groups {[m.group for m in members]} are not distinct ones.")
        if sum(member.header.rows for member in members) > agreed.max_rows:
            raise FrameError(f"rows: more than the {agreed.max_rows} agreed in one batch.")
        return step, members

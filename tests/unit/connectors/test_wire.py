"""Frames: what is packed is what is read, and what was not agreed on is refused by name."""

from __future__ import annotations

import struct

import pytest

from afd_shim.connectors import wire
from afd_shim.connectors.base import ExchangeHeader, Reply
from afd_shim.connectors.wire import Agreement, ExchangeCodec, Kind, PlanCodec, PlanEntry
from afd_shim.errors import FrameError

HEADER = ExchangeHeader(
    step=7, layer=2, stage=1, rows=5, real_rows=3, reply=Reply.FINISHED, dummy=False, last_layer=True
)


def request(agreement: Agreement, header: ExchangeHeader = HEADER, logits: str = "float32") -> bytearray:
    """Pack a request's header."""
    frame = bytearray(wire.EXCHANGE.size)
    ExchangeCodec(agreement).encode(frame, Kind.REQUEST, header, logits)
    return frame


@pytest.mark.parametrize("logits", ["bfloat16", "float16", "float32"])
def test_request_is_read_as_it_was_packed(agreement: Agreement, logits: str) -> None:
    """Every field of a request survives, with the dtype of its router logits."""
    frame = request(agreement, logits=logits)

    assert ExchangeCodec(agreement).decode(frame, Kind.REQUEST) == (HEADER, logits)


def test_reply_carries_no_router_logits(agreement: Agreement) -> None:
    """A reply is only hidden states, even where requests carry router logits."""
    frame = bytearray(wire.EXCHANGE.size)
    payload = ExchangeCodec(agreement).encode(frame, Kind.REPLY, HEADER)

    assert payload == 5 * 16 * 2
    assert ExchangeCodec(agreement).decode(frame, Kind.REPLY) == (HEADER, "")


def test_header_is_64_bytes_and_starts_with_the_magic(agreement: Agreement) -> None:
    """The layout that docs/wire-protocol.md shows."""
    frame = request(agreement)

    assert (len(frame), wire.PREFIX.size, wire.AGREED.size, wire.PLAN_ENTRY.size) == (64, 16, 16, 24)
    assert bytes(frame[:4]) == b"AFDx"
    assert struct.unpack_from("<Q", frame, 8)[0] == 48 + 5 * 16 * 2 + 5 * 8 * 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rows", 33, "rows: 33, but at most 32 were agreed"),
        ("rows", 2**32 - 1, "rows: 4294967295"),
        ("real_rows", 6, "real rows: 6 of only 5 rows"),
        ("layer", 4, "layer: 4 is none of the 3 MoE layers"),
        ("stage", 16, "stage: 16, but at most 16 exist"),
    ],
)
def test_header_outside_the_agreement_is_refused(agreement: Agreement, field: str, value: int, message: str) -> None:
    """Nothing is received for a header that was not agreed on; the error names the field and both values."""
    header = HEADER._replace(**{field: value})  # type: ignore[arg-type]  # the fields given are of type int
    frame = request(agreement, header)

    with pytest.raises(FrameError, match=message):
        ExchangeCodec(agreement).decode(frame, Kind.REQUEST)


def test_dummy_has_no_real_rows(agreement: Agreement) -> None:
    """A dummy forward that claims real rows would be counted by EPLB; it is refused."""
    frame = request(agreement, HEADER._replace(dummy=True))

    with pytest.raises(FrameError, match="real rows: 3 in a dummy forward"):
        ExchangeCodec(agreement).decode(frame, Kind.REQUEST)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (0, "4s", b"GET ", "not a frame of this protocol"),
        (4, "B", 9, "not a frame of this protocol"),
        (5, "B", 18, "kind: 18"),
        (8, "Q", 10**12, "length: 1000000000000"),
        (8, "Q", 47, "length: 47"),
        (26, "B", 1, "reply kind: 1, but 0 was agreed"),
        (16, "I", 4096, "hidden size: 4096, but 16 was agreed"),
        (20, "I", 0, "router logits' width: 0, but 8 was agreed"),
        (24, "B", 3, "dtype: 3, but 1 was agreed"),
        (25, "B", 0, "router logits' dtype: 0"),
        (6, "H", 1, "bytes that must be zero are not"),
        (30, "B", 1, "bytes that must be zero are not"),
        (25, "B", 77, "router logits' dtype: 77"),
    ],
)
def test_altered_frame_is_refused(agreement: Agreement, offset: int, layout: str, value: object, message: str) -> None:
    """Each field that the agreement fixes is checked, whatever it was altered to."""
    frame = request(agreement)
    struct.pack_into(f"<{layout}", frame, offset, value)

    with pytest.raises(FrameError, match=message):
        ExchangeCodec(agreement).decode(frame, Kind.REQUEST)


def test_router_logits_start_aligned(agreement: Agreement) -> None:
    """An odd hidden size would leave float32 router logits at an odd address."""
    odd = Agreement(32, 7, "bfloat16", 8, frozenset((1,)), Reply.FINISHED, 1)

    assert [odd.logits_offset(rows) % 16 for rows in range(5)] == [0, 0, 0, 0, 0]
    assert ExchangeCodec(odd).payload_bytes(3, "float32") == 48 + 3 * 8 * 4


def test_largest_payload_bounds_every_request(agreement: Agreement) -> None:
    """What is allocated after the handshake holds any request that was agreed on."""
    codec = ExchangeCodec(agreement)

    sizes = [codec.payload_bytes(rows, dtype) for rows in range(33) for dtype in wire.DTYPES]

    assert max(sizes) == agreement.max_payload_bytes


def test_plan_is_read_as_it_was_packed(agreement: Agreement) -> None:
    """Every member survives, in its order."""
    entries = [
        PlanEntry(2, HEADER, "float32"),
        PlanEntry(0, HEADER._replace(step=1, rows=0, real_rows=0, dummy=True, last_layer=False), "float32"),
    ]
    codec = PlanCodec(agreement)

    frame = codec.encode(11, entries)

    assert len(frame) == codec.size
    assert codec.decode(frame) == (11, entries)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([PlanEntry(3, HEADER, "float32")], "are not distinct ones"),
        ([PlanEntry(1, HEADER, "float32"), PlanEntry(1, HEADER, "float32")], "are not distinct ones"),
        ([PlanEntry(group, HEADER._replace(rows=17), "float32") for group in (0, 1)], "more than the 32 agreed"),
        ([PlanEntry(0, HEADER._replace(layer=9), "float32")], "layer: 9"),
    ],
)
def test_impossible_plan_is_refused(agreement: Agreement, entries: list[PlanEntry], message: str) -> None:
    """A plan names distinct groups, known layers, and no more rows than a batch holds."""
    frame = PlanCodec(agreement).encode(0, entries)

    with pytest.raises(FrameError, match=message):
        PlanCodec(agreement).decode(frame)


def test_foreign_prefix_is_refused() -> None:
    """Another program's bytes are named, not interpreted."""
    with pytest.raises(FrameError, match=r"not an afd-shim frame \(it starts with b'GET / HT'\)"):
        wire.decode_prefix(b"GET / HTTP/1.1\r\n")


def test_control_frames_are_bounded() -> None:
    """A control frame of a terabyte is refused by its prefix, before its body is awaited."""
    prefix = wire.Prefix(1, Kind.HELLO, 10**12)

    with pytest.raises(FrameError, match="1000000000000 bytes; at most 65536 are read"):
        wire.check_control_prefix(prefix)


def test_other_protocol_version_names_the_remedy() -> None:
    """Two versions of afd-shim cannot talk; both versions are named."""
    with pytest.raises(FrameError, match=r"version 2, this side 1; install the same afd-shim on both"):
        wire.check_control_prefix(wire.Prefix(2, Kind.HELLO, 0))


def test_dtype_that_does_not_travel_names_those_that_do() -> None:
    """A model in float64 or fp8 activations is refused with the dtypes that can be served."""
    with pytest.raises(FrameError, match=r"float64 does not travel .* --dtype bfloat16, float16, float32"):
        wire.dtype_named("float64")

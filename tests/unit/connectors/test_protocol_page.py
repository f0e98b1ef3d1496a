"""docs/wire-protocol.md says what the code does."""

from __future__ import annotations

import itertools
import re
import struct
from pathlib import Path

import pytest

from afd_shim.connectors import control, handshake, wire
from afd_shim.connectors.base import PROTOCOL_VERSION, ExchangeHeader, Hello, Reply
from afd_shim.connectors.wire import Agreement, ExchangeCodec, Kind, PlanCodec, PlanEntry

PAGE = Path(__file__).parents[3] / "docs" / "wire-protocol.md"
FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}


@pytest.fixture(scope="module")
def page() -> str:
    """The page's text."""
    return PAGE.read_text(encoding="utf-8")


def tables(page: str, header: str) -> list[list[list[str]]]:
    """The cells of every table under this header line."""
    found = []
    for after in page.split(header)[1:]:
        lines = after.strip().splitlines()[1:]
        rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
        found.append([[cell.strip() for cell in row.strip("|").split("|")] for row in rows])
    return found


def field(frame: bytes | bytearray, offset: str, size: str) -> int:
    """One number of a frame, as the page places it."""
    value: int = struct.unpack_from(f"<{FORMATS[int(size)]}", frame, int(offset))[0]
    return value


def test_kinds_are_those_of_the_code(page: str) -> None:
    """Every kind is on the page, with its number and the message in its body."""
    (table,) = tables(page, "| kind | name | sent by, on | body |")

    assert [(int(kind), name) for kind, name, _, _ in table] == [(kind.value, kind.name) for kind in Kind]
    messages = [re.match(r"`(\w+)`", body) for _, _, _, body in table[:8]]
    assert {match.group(1) for match in messages if match} == {
        message.__name__ for message in handshake.Message.__args__
    }


def test_numbers_in_the_text(page: str) -> None:
    """Version, bounds and waits."""
    assert f"The protocol has version {PROTOCOL_VERSION}." in page
    assert f"at most {wire.MAX_CONTROL_BODY} bytes" in page
    assert f"multiple\nof {wire.PAYLOAD_ALIGNMENT} bytes from offset {wire.EXCHANGE.size}" in page
    assert f"stage, below {wire.MAX_STAGES}" in page
    assert f"nothing for {control.IDENTIFY_WITHIN_S:.0f} s" in page
    codes = ", ".join(f"{dtype.code} {name}" for name, dtype in wire.DTYPES.items())
    assert f"dtype of the hidden states: {codes}" in page


def test_header_is_laid_out_as_the_page_says(page: str, agreement: Agreement) -> None:
    """Each field of a request is found at its offset; what is said to be zero is zero; nothing is left out."""
    prefix, header, _ = tables(page, "| offset | size | field |")
    frame = bytearray(wire.EXCHANGE.size)
    ExchangeCodec(agreement).encode(
        frame, Kind.REQUEST, ExchangeHeader(7, 2, 1, 5, 0, Reply.FINISHED, dummy=True, last_layer=True), "float32"
    )
    expected = {
        "protocol version": 1,
        "kind": 16,
        "bytes that follow": 48 + 5 * 32 + 5 * 8 * 4,
        "hidden size": 16,
        "width of the router logits": 8,
        "dtype of the hidden states": 1,
        "dtype of the router logits": 3,
        "reply": 0,
        "step": 7,
        "layer": 2,
        "rows": 5,
        "real rows": 0,
        "stage": 1,
        "flags": 3,
    }

    end = 0
    for offset, size, name in prefix + header:
        assert int(offset) == end, name
        end += int(size)
        if name == "zero":
            assert not any(frame[int(offset) : end])
        elif name.startswith("magic"):
            assert frame[:4] == b"AFDx"
        else:
            value = next(value for key, value in expected.items() if re.match(rf"{key}\b", name))
            assert field(frame, offset, size) == value, name
    assert end == wire.EXCHANGE.size


def test_plan_entry_is_laid_out_as_the_page_says(page: str, agreement: Agreement) -> None:
    """The same for a plan's header and entries."""
    entry = tables(page, "| offset | size | field |")[2]
    header = ExchangeHeader(7, 2, 1, 5, 3, Reply.FINISHED, dummy=False, last_layer=True)
    frame = PlanCodec(agreement).encode(9, [PlanEntry(1, header, "float32")])
    values = [7, 1, 5, 3, 2]

    assert [field(frame, str(64 + int(offset)), size) for offset, size, name in entry if name != "zero"] == values
    assert sum(int(size) for _, size, _ in entry) == wire.PLAN_ENTRY.size
    assert (field(frame, "32", "8"), field(frame, "44", "4"), field(frame, "48", "4")) == (9, 1, agreement.num_groups)
    assert not any(frame[64 + wire.PLAN_ENTRY.size :])


def test_every_field_of_hello_is_on_the_page(page: str) -> None:
    """A field that is added says there how it is compared."""
    (table,) = tables(page, "| field of Hello | compared |")

    named = [name for fields, _ in table for name in re.findall(r"`(\w+)`", fields)]
    assert sorted(named) == sorted(Hello.__struct_fields__)

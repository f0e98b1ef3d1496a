"""What peers must agree on, and what they are told when they do not."""

from __future__ import annotations

from typing import Any

import pytest

from afd_shim.connectors import handshake
from afd_shim.connectors.base import Hello, Reply
from afd_shim.errors import FrameError

from .conftest import MakeHello

ALTERED: dict[str, Any] = {
    "protocol": 2,
    "release": "0.30.0",
    "patch_digest": "ffff",
    "model_fingerprint": "model-2",
    "num_experts": 16,
    "hidden_size": 32,
    "dtype": "float16",
    "gate_on_attention": True,
    "moe_layers": (1, 2),
    "num_attention_ranks": 2,
    "num_ffn_ranks": 2,
    "reply": Reply.RAW,
    "max_num_tokens": 64,
}


def test_equal_ranks_agree(hello: MakeHello) -> None:
    """Two roles of one deployment have nothing to complain about."""
    assert handshake.disagreements(hello("ffn"), hello("attention")) == []


@pytest.mark.parametrize("field", ALTERED)
def test_each_field_is_compared(hello: MakeHello, field: str) -> None:
    """A difference in any one field is reported with both values, both ranks and a remedy."""
    theirs = hello("attention", **{field: ALTERED[field]})

    (line,) = handshake.disagreements(hello("ffn"), theirs)

    assert line.startswith(f"{field}: {ALTERED[field]!r} on attention rank 0, {getattr(hello('ffn'), field)!r} on ffn")
    assert line.rpartition("; ")[2] != ""


def test_every_field_that_matters_is_in_the_list() -> None:
    """A field added to Hello is either compared or named here as one that may differ."""
    may_differ = {"role", "rank", "attention_tp_size"}

    assert set(Hello.__struct_fields__) - may_differ == set(ALTERED)


def test_all_disagreements_are_listed_at_once(hello: MakeHello) -> None:
    """Nobody wants to learn of three differences in three starts."""
    ours, theirs = hello("ffn"), hello("attention", **ALTERED)

    text = handshake.refusal(ours, theirs, handshake.disagreements(ours, theirs))

    assert [line.split(":")[0].strip(" -") for line in text.splitlines()[1:]] == list(ALTERED)


def test_attention_may_send_fewer_rows(hello: MakeHello) -> None:
    """A smaller max_num_batched_tokens on Attention fits; among FFN ranks it must be equal."""
    ours = hello("ffn", max_num_tokens=64)

    assert handshake.disagreements(ours, hello("attention", max_num_tokens=32)) == []
    assert handshake.disagreements(ours, hello("ffn", 1, max_num_tokens=32)) != []


def test_messages_survive_the_wire(hello: MakeHello) -> None:
    """A Hello is the same after JSON, tuples and enums included."""
    join = handshake.Join(hello("ffn", 1, reply=Reply.RAW), data_port=4711)

    assert handshake.decode(handshake.Join, handshake.encode(join)) == join


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"hello": 1}', b'{"reason": "x", "extra": 1}', b"\xff\xfe", b'{"reason": 7}']
)
def test_unreadable_message_is_a_frame_error(body: bytes) -> None:
    """Garbage in a well-formed frame is refused like any other garbage."""
    with pytest.raises(FrameError, match="an unreadable Refusal"):
        handshake.decode(handshake.Refusal, body)


def test_long_values_are_cut(hello: MakeHello) -> None:
    """A thousand MoE layers do not fill the log."""
    theirs = hello("attention", moe_layers=tuple(range(1000)))

    (line,) = handshake.disagreements(hello("ffn"), theirs)

    assert len(line) < 500


def test_router_logits_travel_only_where_attention_owns_the_gate(hello: MakeHello) -> None:
    """With the gate on FFN no width is agreed, so no router logits are accepted."""
    assert handshake.agree(hello("ffn", gate_on_attention=False), num_groups=1).num_experts == 0
    assert handshake.agree(hello("ffn", gate_on_attention=True), num_groups=1).num_experts == 8

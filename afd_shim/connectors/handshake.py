"""What peers tell each other before the first tensor, and whether they agree.

FFN rank 0 compares every other rank's Hello with its own and answers with a Welcome or a Refusal.
Authentication has its place between the two: a challenge would be answered before the Welcome.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from afd_shim.connectors.base import Hello, RoleName
from afd_shim.connectors.wire import Agreement
from afd_shim.errors import FrameError


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """HELLO: a rank asks FFN rank 0 for its place."""

    hello: Hello
    data_port: int = 0
    """FFN ranks above 0: where they await Attention's data connections."""


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """WELCOME: the place is given."""

    hello: Hello


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """REFUSAL: the place is not given, and why; the connection ends."""

    reason: str


class Roster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ROSTER: who is still awaited; sent whenever that changes."""

    missing: tuple[str, ...]


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """READY: everyone is here; data connections may be made."""

    session: str
    """A random word that every data connection of this rendezvous must show."""

    attention_tp_size: int
    ffn_endpoints: tuple[tuple[str, int], ...]
    """Host and port of FFN ranks 1, 2, ..."""


class Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ATTACH: this is the data connection of that rank."""

    session: str
    role: RoleName
    rank: int


class Attached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ATTACHED: the data connection is taken."""


class Goodbye(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GOODBYE: the last frame of a control connection; without a reason it is a clean end."""

    reason: str = ""


Message = Join | Welcome | Refusal | Roster | Ready | Attach | Attached | Goodbye
M = TypeVar("M", Join, Welcome, Refusal, Roster, Ready, Attach, Attached, Goodbye)


def encode(message: Message) -> bytes:
    """JSON of a control frame's body."""
    return msgspec.json.encode(message)


def decode(kind: type[M], body: bytes) -> M:
    """The message in a control frame's body; FrameError says what is wrong with it."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise FrameError(f"an unreadable {kind.__name__}: {error}") from error


_SAME_ON_ALL = {
    "protocol": "install the same afd-shim on both",
    "release": "install the same vLLM release on both",
    "patch_digest": "install the same afd-shim on both (`afd-shim doctor` shows what differs)",
    "model_fingerprint": "start both with the same model and revision",
    "num_experts": "start both with the same model",
    "hidden_size": "start both with the same model",
    "dtype": "give both the same --dtype",
    "gate_on_attention": "give both the same afd.compute_gate_on_attention",
    "moe_layers": "start both with the same model",
    "num_attention_ranks": "give both the same afd.num_attention_ranks",
    "num_ffn_ranks": "give both the same afd.num_ffn_ranks",
    "reply": "give both the same afd.shared_experts_on_attention",
}


def disagreements(ours: Hello, theirs: Hello) -> list[str]:
    """Every field in which a joining rank differs from FFN rank 0, with both values and a remedy.

    Empty if the two can serve together. `max_num_tokens` may be smaller on Attention.
    """
    found = [
        _line(field, ours, theirs, remedy)
        for field, remedy in _SAME_ON_ALL.items()
        if getattr(ours, field) != getattr(theirs, field)
    ]
    fits = (
        theirs.max_num_tokens <= ours.max_num_tokens
        if theirs.role == "attention"
        else theirs.max_num_tokens == ours.max_num_tokens
    )
    if not fits:
        found.append(_line("max_num_tokens", ours, theirs, "give both the same --max-num-batched-tokens"))
    return found


def _line(field: str, ours: Hello, theirs: Hello, remedy: str) -> str:
    return (
        f"{field}: {_short(getattr(theirs, field))} on {theirs.role} rank {theirs.rank}, "
        f"{_short(getattr(ours, field))} on {ours.role} rank {ours.rank}; {remedy}"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def refusal(ours: Hello, theirs: Hello, found: list[str]) -> str:
    """The text of a Refusal, and of the HandshakeError that it becomes."""
    lines = "".join(f"\n  - {line}" for line in found)
    return f"{theirs.role} rank {theirs.rank} and {ours.role} rank {ours.rank} cannot serve together:{lines}"


def agree(ffn: Hello, *, num_groups: int) -> Agreement:
    """The bounds of every data frame, from an FFN rank's Hello."""
    return Agreement(
        max_rows=ffn.max_num_tokens,
        hidden_size=ffn.hidden_size,
        dtype=ffn.dtype,
        num_experts=ffn.num_experts if ffn.gate_on_attention else 0,
        moe_layers=frozenset(ffn.moe_layers),
        reply=ffn.reply,
        num_groups=num_groups,
    )

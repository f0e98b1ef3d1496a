"""Declarations are data, checked when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from afd_shim.engine import PatchSet, Target
from afd_shim.errors import DeclarationError

CELL = [lambda original: original]


@pytest.mark.parametrize("symbol", ["upstream.layer", "upstream.layer:", ":factory", "upstream/layer.py:factory"])
def test_target_without_module_and_name(symbol: str) -> None:
    """A target is a module and a qualified name."""
    with pytest.raises(DeclarationError, match=r"module:Qualified\.name|package\.module"):
        Target(symbol, kind="function")


def test_target_of_unknown_kind() -> None:
    """A target's kind is one of those that a fingerprint can have."""
    with pytest.raises(DeclarationError, match="kind 'closure' does not exist"):
        Target("upstream.layer:factory", kind="closure")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"name": "a patch"}, "identifier"),
        ({"strategy": "monkey"}, "strategy 'monkey' does not exist"),
        ({"build": CELL[0]}, "module level"),
        ({"build": None}, "module level"),
        ({"why": " "}, "`why` is empty"),
        ({"until": ""}, "`until` is empty"),
        ({"upstream": ""}, "`upstream` is empty"),
        ({"releases": ()}, "`releases` is empty"),
        ({"after": ("factory",)}, "after itself"),
        ({"strategy": "wrap", "traced": True}, "compiled code bypasses a wrapt wrapper"),
        ({"strategy": "wrap", "kind": "class", "symbol": "Runner"}, "never wrapped"),
        ({"kind": "value", "symbol": "LIMIT"}, "a value is a seam"),
    ],
)
def test_declaration_is_refused(fakes: Any, changes: dict[str, Any], flaw: str) -> None:
    """A patch that cannot work, or says nothing about itself, is refused by name when it is declared."""
    with pytest.raises(DeclarationError, match=flaw) as caught:
        fakes.patch(**changes)

    assert str(caught.value).endswith("Correct its declaration.")


def test_traced_target_may_be_replaced(fakes: Any) -> None:
    """Compiled code follows a plain function, so a traced target can be replaced."""
    assert fakes.patch(traced=True).traced


def test_two_owners_of_one_target(fakes: Any) -> None:
    """Two patches of one target must say which one comes on top."""
    with pytest.raises(DeclarationError, match="'one' and 'two' both own"):
        PatchSet("s", (fakes.patch("one"), fakes.patch("two")))


def test_same_name_twice(fakes: Any) -> None:
    """A set lists a patch once."""
    with pytest.raises(DeclarationError, match="'one' twice"):
        PatchSet("s", (fakes.patch("one"), fakes.patch("one", "skip")))


def test_order_follows_after(fakes: Any) -> None:
    """Patches are ordered by `after`, whatever the order of the list."""
    late = fakes.patch("late", "skip", after=("early",))

    assert [patch.name for patch in PatchSet("s", (late, fakes.patch("early")))] == ["early", "late"]


def test_order_without_a_solution(fakes: Any) -> None:
    """A circle and a missing predecessor are named."""
    one = fakes.patch("one", after=("two",))
    two = fakes.patch("two", "skip", after=("one",))

    with pytest.raises(DeclarationError, match="one, two come after each other"):
        PatchSet("s", (one, two))
    with pytest.raises(DeclarationError, match="comes after 'two', which is not in the set"):
        PatchSet("s", (one,))

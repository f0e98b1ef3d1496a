"""docs/models.md says what the code refuses."""

from __future__ import annotations

from pathlib import Path

from afd_shim.config.models import REFUSED_ARCHITECTURES

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_page_lists_every_refused_architecture_and_its_reason() -> None:
    """A user finds a refused model, and why, without starting a server."""
    rows = {line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")}

    assert rows == {f"| `{name}` | {reason} |" for name, reason in REFUSED_ARCHITECTURES.items()}

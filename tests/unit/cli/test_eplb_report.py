"""`afd-shim eplb-report`, from a log to words and a picture."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from afd_shim.cli import app
from afd_shim.ffn.placement import LayerPlacement, Rearrangement

RECORD = Rearrangement(
    number=1,
    step=40,
    seconds=0.25,
    num_ranks=2,
    layers=[LayerPlacement(layer=3, before=[0, 1, 2, 3], after=[0, 3, 2, 1], load=[9, 8, 1, 2])],
)


def write_log(folder: Path, *records: Rearrangement) -> Path:
    """A server's log with these records."""
    log = folder / "ffn.log"
    log.write_text(
        "".join(f"(Worker pid=7) INFO 12-01 00:00:00 [eplb.py:1] {record.log_line()}\n" for record in records)
    )
    return log


def test_rearrangements_are_told_in_words(tmp_path: Path) -> None:
    """Without --out nothing but the standard library's printing is needed."""
    result = CliRunner().invoke(app, ["eplb-report", str(write_log(tmp_path, RECORD))])

    assert result.exit_code == 0, result.output
    assert "layer 3: balancedness 0.59 -> 0.91" in result.stdout


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """A PNG comes out, also of a single record."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "eplb.png"

    result = CliRunner().invoke(app, ["eplb-report", str(write_log(tmp_path, RECORD)), "--out", str(out)])

    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_log_without_records_says_how_to_get_them(tmp_path: Path) -> None:
    """An empty picture would look like a balanced server."""
    result = CliRunner().invoke(app, ["eplb-report", str(write_log(tmp_path))])

    assert result.exit_code == 1
    assert "log_balancedness" in result.output

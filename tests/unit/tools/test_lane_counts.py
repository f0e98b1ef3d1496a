"""CI's last word: what the lanes ran, and whether that is a success."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "lane_counts.py"


def write_junit(path: Path, *, tests: int, failures: int = 0, errors: int = 0, skipped: int = 0) -> None:
    """A JUnit file as pytest writes it, without the cases."""
    path.write_text(
        f'<testsuites><testsuite name="pytest" tests="{tests}" failures="{failures}" errors="{errors}" '
        f'skipped="{skipped}" time="1.5"/></testsuites>',
        encoding="utf-8",
    )


def run(directory: Path, *lanes: str) -> tuple[int, str]:
    """Exit status and last line of the script."""
    command = [sys.executable, str(SCRIPT), str(directory), *lanes]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    return finished.returncode, finished.stdout.splitlines()[-1]


def test_green_lanes_are_added_up(tmp_path: Path) -> None:
    """The last line is the sum over all lanes, in the form that CI reads."""
    write_junit(tmp_path / "one.xml", tests=10, skipped=2)
    write_junit(tmp_path / "two.xml", tests=5)

    assert run(tmp_path, "one", "two") == (0, "13 passed, 0 failed, 2 skipped")


@pytest.mark.parametrize("counts", [{"failures": 1}, {"errors": 1}])
def test_a_failure_and_an_error_fail_the_run(tmp_path: Path, counts: dict[str, int]) -> None:
    """A test that could not be set up is as red as one that failed."""
    write_junit(tmp_path / "one.xml", tests=3, **counts)

    assert run(tmp_path, "one") == (1, "2 passed, 1 failed, 0 skipped")


def test_a_lane_that_wrote_nothing_fails_the_run(tmp_path: Path) -> None:
    """A lane whose environment could not be made leaves no file, and must not look green."""
    write_junit(tmp_path / "one.xml", tests=3)

    assert run(tmp_path, "one", "two") == (1, "3 passed, 0 failed, 0 skipped")


def test_a_lane_that_skipped_everything_fails_the_run(tmp_path: Path) -> None:
    """Skipping is not running."""
    write_junit(tmp_path / "one.xml", tests=3, skipped=3)

    assert run(tmp_path, "one") == (1, "0 passed, 0 failed, 3 skipped")

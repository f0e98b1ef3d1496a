"""Print the tests of every lane from their JUnit files, and fail if a lane has none.

Usage: lane_counts.py JUNIT_DIRECTORY LANE...

The last line is `N passed, N failed, N skipped`, over all lanes. Runs on any Python 3.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple


class Counts(NamedTuple):
    """Outcomes of one lane; errors in setting a test up count as failed."""

    passed: int
    failed: int
    skipped: int
    seconds: float


def count(path: Path) -> Counts:
    """Read one JUnit file; a missing one means that the lane ran nothing."""
    if not path.exists():
        return Counts(0, 0, 0, 0.0)
    suites = list(ET.parse(path).getroot().iter("testsuite"))  # noqa: S314 - written by our own pytest

    def total(key: str) -> int:
        return sum(int(suite.get(key, 0)) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    seconds = sum(float(suite.get("time", 0.0)) for suite in suites)
    return Counts(total("tests") - failed - skipped, failed, skipped, seconds)


def main(directory: str, *lanes: str) -> int:
    """Print the table; 1 if a lane ran no test or a test failed."""
    counts = {lane: count(Path(directory) / f"{lane}.xml") for lane in lanes}
    width = max(map(len, lanes))
    for lane, one in counts.items():
        note = "" if one.passed + one.failed else "   <- ran no test"
        print(
            f"{lane:{width}}  {one.passed:5} passed {one.failed:4} failed {one.skipped:4} skipped"
            f" {one.seconds:7.0f} s{note}"
        )
    passed = sum(one.passed for one in counts.values())
    failed = sum(one.failed for one in counts.values())
    skipped = sum(one.skipped for one in counts.values())
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    empty = any(one.passed + one.failed == 0 for one in counts.values())
    return 1 if empty or failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The table of models is what the installed vLLM's source says, and misses no model that cannot be split."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.newest_release  # the page is about the newest release
def test_the_table_of_models_is_current() -> None:
    """`python tools/models_table.py` writes it anew; what it prints is what differs."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    checked = subprocess.run(
        [sys.executable, ROOT / "tools" / "models_table.py", "--check"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")

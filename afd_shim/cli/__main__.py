"""`python -m afd_shim.cli`, for environments without the script."""

from __future__ import annotations

from afd_shim.cli import app

app()

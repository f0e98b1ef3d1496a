"""The compat matrix (data), the probe of the installed release, and per-release adapters."""

from __future__ import annotations

from afd_shim.compat.matrix import Matrix, Row
from afd_shim.compat.release import Release, ReleaseState, installed_release, probe

__all__ = ["Matrix", "Release", "ReleaseState", "Row", "installed_release", "probe"]

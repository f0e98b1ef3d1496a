"""The `afd` configuration: what a user writes, and what is refused next to it."""

from __future__ import annotations

from afd_shim.config.schema import AFD_KEY, AFDConfig, Role, parse_afd_config

__all__ = ["AFD_KEY", "AFDConfig", "Role", "parse_afd_config"]

"""Connectors by name, without importing what is not used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from afd_shim.connectors.registry import CONNECTORS, parse_extra_config, supported_device_types
from afd_shim.errors import ConfigError


def test_registry_needs_no_torch() -> None:
    """Configuration is validated in processes that must not import torch."""
    code = "import sys, afd_shim.connectors; sys.exit(any(m in sys.modules for m in ('torch', 'vllm', 'wrapt')))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tcp_serves_cpu_and_cuda() -> None:
    """The pairs of R16."""
    assert supported_device_types("TcpAFDConnector") == ("cpu", "cuda")


def test_unknown_connector_names_the_known_ones() -> None:
    """A typing error is answered with the list."""
    with pytest.raises(
        ConfigError, match=r"'TcpConnector' is not a connector; use one of: .*TcpAFDConnector"
    ) as caught:
        supported_device_types("TcpConnector")

    assert caught.value.key == "connector"


@pytest.mark.parametrize("extra", [{"first_rank": 1}, {"first_attention_rank": -1}, {"first_attention_rank": "1"}])
@pytest.mark.parametrize("name", sorted(CONNECTORS))
def test_extra_config_is_closed(name: str, extra: dict[str, object]) -> None:
    """Unknown keys and wrong values are errors, not silence."""
    with pytest.raises(ConfigError, match=f"{name} knows only: first_attention_rank") as caught:
        parse_extra_config(name, extra)

    assert caught.value.key == "connector_extra_config"


def test_extra_config_has_defaults() -> None:
    """Nothing needs to be given."""
    assert parse_extra_config("TcpAFDConnector", {}).first_attention_rank == 0
    assert parse_extra_config("TcpAFDConnector", {"first_attention_rank": 2}).first_attention_rank == 2

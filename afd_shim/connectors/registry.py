"""Connectors by name: what each runs on, and where its classes are (imported on use)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

import msgspec

from afd_shim.connectors.base import (
    AttentionConnector,
    ConnectorConfig,
    FFNConnector,
    Hello,
    PeerLostCallback,
)
from afd_shim.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CONNECTORS",
    "ConnectorEntry",
    "ExtraConfig",
    "connector_entry",
    "create_attention_connector",
    "create_ffn_connector",
    "parse_extra_config",
    "supported_device_types",
]


@dataclass(frozen=True, slots=True)
class ConnectorEntry:
    """One connector: its classes as "module:name", and the torch device types it serves."""

    attention: str
    ffn: str
    device_types: tuple[str, ...]


CONNECTORS: dict[str, ConnectorEntry] = {
    "TcpAFDConnector": ConnectorEntry(
        attention="afd_shim.connectors.tcp:TcpAttentionConnector",
        ffn="afd_shim.connectors.tcp:TcpFFNConnector",
        device_types=("cpu", "cuda"),
    ),
    "P2pNcclAFDConnector": ConnectorEntry(
        attention="afd_shim.connectors.p2p_nccl:P2pNcclAttentionConnector",
        ffn="afd_shim.connectors.p2p_nccl:P2pNcclFFNConnector",
        device_types=("cuda",),
    ),
}


def connector_entry(name: str) -> ConnectorEntry:
    """The entry of `name`; ConfigError (key `connector`) for a name that is not registered."""
    try:
        return CONNECTORS[name]
    except KeyError:
        known = ", ".join(sorted(CONNECTORS))
        raise ConfigError(
            f"afd.connector: {name!r} is not a connector; use one of: {known}.", key="connector"
        ) from None


def supported_device_types(name: str) -> tuple[str, ...]:
    """The torch device types that connector `name` serves, such as ("cpu", "cuda")."""
    return connector_entry(name).device_types


class ExtraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`afd.connector_extra_config`: the keys every connector of ours knows."""

    first_attention_rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    """This Attention server's first rank, where several independent servers share one FFN."""


def parse_extra_config(name: str, extra: Mapping[str, object]) -> ExtraConfig:
    """Check the `connector_extra_config` of connector `name`; ConfigError names what is wrong."""
    try:
        return msgspec.convert(dict(extra), ExtraConfig)
    except msgspec.ValidationError as error:
        known = ", ".join(ExtraConfig.__struct_fields__)
        raise ConfigError(
            f"afd.connector_extra_config: {error}; {name} knows only: {known}.", key="connector_extra_config"
        ) from error


def create_attention_connector(
    afd_config: ConnectorConfig,
    hello: Hello,
    *,
    device: torch.device,
    on_peer_lost: PeerLostCallback,
) -> AttentionConnector:
    """The connector of an Attention rank, not yet connected.

    `hello.rank` counts within this server; the server's `first_attention_rank` is added to it.
    Raises ConfigError for an unknown connector, one that does not serve `device`, or a
    `connector_extra_config` that it does not know.
    """
    entry = _entry_for(afd_config, device)
    extra = parse_extra_config(afd_config.connector, afd_config.connector_extra_config)
    hello = msgspec.structs.replace(hello, rank=hello.rank + extra.first_attention_rank)
    factory = _load(entry.attention)
    return cast("AttentionConnector", factory(afd_config, hello, device, on_peer_lost))


def create_ffn_connector(
    afd_config: ConnectorConfig,
    hello: Hello,
    *,
    device: torch.device,
    on_peer_lost: PeerLostCallback,
) -> FFNConnector:
    """The connector of FFN rank `hello.rank`, not yet connected.

    Raises ConfigError for an unknown connector, one that does not serve `device`, or a
    `connector_extra_config` that it does not know.
    """
    entry = _entry_for(afd_config, device)
    parse_extra_config(afd_config.connector, afd_config.connector_extra_config)
    factory = _load(entry.ffn)
    return cast("FFNConnector", factory(afd_config, hello, device, on_peer_lost))


def _entry_for(afd_config: ConnectorConfig, device: torch.device) -> ConnectorEntry:
    entry = connector_entry(afd_config.connector)
    if device.type not in entry.device_types:
        raise ConfigError(
            f"afd.connector: {afd_config.connector} does not serve {device.type} devices "
            f"(only {', '.join(entry.device_types)}); choose another connector.",
            key="connector",
        )
    return entry


def _load(path: str) -> type:
    module, _, name = path.partition(":")
    return cast("type", getattr(importlib.import_module(module), name))

"""Transport between the Attention and the FFN role; importing it imports no torch.

Public names: the interface (`AttentionConnector`, `FFNConnector` and what they exchange) and the
registry's two constructors. A connector's own module is imported when one is created.
"""

from __future__ import annotations

from afd_shim.connectors.base import (
    AttentionConnector,
    Batch,
    ConnectorConfig,
    ExchangeHeader,
    ExchangeStats,
    FFNConnector,
    Hello,
    Member,
    Reply,
)
from afd_shim.connectors.registry import (
    create_attention_connector,
    create_ffn_connector,
    supported_device_types,
)

__all__ = [
    "AttentionConnector",
    "Batch",
    "ConnectorConfig",
    "ExchangeHeader",
    "ExchangeStats",
    "FFNConnector",
    "Hello",
    "Member",
    "Reply",
    "create_attention_connector",
    "create_ffn_connector",
    "supported_device_types",
]

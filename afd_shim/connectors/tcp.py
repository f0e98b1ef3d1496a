"""TcpAFDConnector: headers and payloads over TCP; CPU, and CUDA through pinned memory."""

from __future__ import annotations

from afd_shim.connectors.tcp_attention import TcpAttentionConnector
from afd_shim.connectors.tcp_ffn import TcpFFNConnector

__all__ = ["TcpAttentionConnector", "TcpFFNConnector"]

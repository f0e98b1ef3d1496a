"""Attention ranks that are only connectors: a test or a benchmark plays them against a real FFN server."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec
import torch

from afd_shim.config import parse_afd_config
from afd_shim.connectors.base import AttentionConnector, Hello
from afd_shim.connectors.registry import create_attention_connector
from afd_shim.testing.servers import Server

__all__ = ["FFN_INSPECTION", "meet"]

FFN_INSPECTION = "afd_shim.testing.eplb_inspection.EplbInspection"
"""vLLM's `--worker-extension-cls` of an FFN server that is met here."""


def meet(server: Server, additional_config: Mapping[str, object]) -> tuple[list[AttentionConnector], Hello]:
    """Play every Attention rank of a deployment.

    Args:
        server: a ready FFN server, with `FFN_INSPECTION`.
        additional_config: the one it was started with.

    Returns:
        The connected ranks, which the caller closes, and what the FFN says of itself.

    """
    afd = parse_afd_config(additional_config)
    assert afd is not None  # the server has taken it
    own = msgspec.convert(server.rpc("inspect_hello")[0], Hello)
    ranks = [
        create_attention_connector(
            afd,
            msgspec.structs.replace(own, role="attention", rank=rank),
            device=torch.device("cpu"),
            on_peer_lost=_ignore,
        )
        for rank in range(afd.num_attention_ranks)
    ]
    threads = [threading.Thread(target=rank.connect) for rank in ranks]  # rendezvous needs all at once
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ranks, own


def _ignore(_: BaseException) -> None:
    """The next exchange raises the loss."""

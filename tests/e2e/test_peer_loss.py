"""A role that dies takes the other with it, at once and by name: nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import psutil  # comes with vLLM
import pytest

from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.deployments import Split, start_split
from afd_shim.testing.servers import ServerError

pytestmark = pytest.mark.timeout(600)

DEADLINE_S = 5.0
"""Within which the survivor's worker has ended and the client has its error."""

TEARDOWN_S = 30.0
"""vLLM's own teardown of its other processes takes longer on loaded cores."""

newest = pytest.mark.newest_release


def wait_until_busy(deployment: Split) -> None:
    """Return once exchanges are under way."""
    for _ in range(600):
        if cast("int", deployment.ffn.rpc("afd_stats")[0]["exchanges"]) > 30:
            return
        time.sleep(0.05)
    raise AssertionError("no exchange within 30 s")


@pytest.mark.parametrize(
    ("victim", "busy"),
    [
        pytest.param("ffn", True, id="FFN in flight"),
        pytest.param("ffn", False, id="FFN idle", marks=newest),
        pytest.param("attention", True, id="Attention in flight", marks=newest),
        pytest.param("attention", False, id="Attention idle", marks=newest),
    ],
)
def test_the_survivor_of_a_killed_role_names_it_and_ends(
    victim: str,
    busy: bool,
    checkpoint_of: Callable[..., Checkpoint],
    log_dir: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """SIGKILL: the client in flight gets an error, the survivor's log names the peer, and it ends."""
    with start_split(checkpoint_of("deepseek-v2"), log_dir) as deployment, ThreadPoolExecutor(1) as client:
        deployment.wait_ready()
        killed, survivor = deployment.ffn, deployment.attention
        if victim == "attention":
            killed, survivor = survivor, killed
        if busy:
            request = client.submit(deployment.attention.complete, "Tell me", max_tokens=480)
            wait_until_busy(deployment)

        workers = [p for p in psutil.Process(survivor.process.pid).children(recursive=True) if "Worker" in p.name()]
        assert workers

        killed.kill()
        assert not psutil.wait_procs(workers, timeout=DEADLINE_S)[1]
        record_property("seconds until the server had ended", survivor.wait_exit(timeout=TEARDOWN_S))

        if busy:
            with pytest.raises(ServerError):
                request.result(timeout=DEADLINE_S)
        name = {"ffn": "FFN rank 0", "attention": "Attention rank 0"}[victim]
        assert "PeerLostError" in survivor.log()
        assert name.lower() in survivor.log().lower()

"""Whole deployments of one checkpoint: one unsplit server, or an FFN and an Attention server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.servers import START_TIMEOUT_S, Server, core_of_rank, free_port, start_server

__all__ = ["INSPECTION", "Split", "afd_config", "start_split", "start_unsplit"]

INSPECTION = "afd_shim.testing.worker_extension.Inspection"
"""vLLM's `--worker-extension-cls` of every server started here."""


@dataclass(frozen=True, slots=True)
class Split:
    """Two running servers, one per role; a context manager that stops them."""

    attention: Server
    ffn: Server
    ffn_config: dict[str, dict[str, object]]  # the FFN's `--additional-config`

    def __enter__(self) -> Split:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def servers(self) -> tuple[Server, Server]:
        """Both servers."""
        return self.attention, self.ffn

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        """Wait until both answer; see `Server.wait_ready`."""
        for server in self.servers:
            server.wait_ready(timeout)

    def stop(self) -> None:
        """End both, Attention first, as an operator would."""
        for server in self.servers:
            server.stop()


def afd_config(role: str, port: int, **more: object) -> dict[str, dict[str, object]]:
    """The `--additional-config` of a role: one Attention and one FFN rank on this machine."""
    return {
        "afd": {
            "role": role,
            "connector": "TcpAFDConnector",
            "host": "127.0.0.1",
            "port": port,
            "num_attention_ranks": 1,
            "num_ffn_ranks": 1,
            **more,
        }
    }


def start_unsplit(
    checkpoint: Checkpoint,
    log_dir: Path,
    *,
    name: str = "unsplit",
    core: int = 0,
    eager: bool = True,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Server:
    """Start stock vLLM, without an `afd` configuration."""
    return start_server(
        name,
        checkpoint.path,
        log_dir=log_dir,
        core=core_of_rank(core),
        eager=eager,
        dtype=checkpoint.dtype,
        extra_args=("--worker-extension-cls", INSPECTION, *extra_args),
        env=env,
    )


def start_split(
    checkpoint: Checkpoint,
    log_dir: Path,
    *,
    placed: Mapping[str, bool] | None = None,
    num_ffn_ranks: int = 1,
    eager: bool = True,
    extra_args: Sequence[str] = (),
    ffn_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Split:
    """Start both roles at once, each on a core of its own; several FFN ranks are one server's expert parallel ones.

    `placed` has keys of the configuration that put something on Attention.

    The FFN's ranks share the FFN's core: vLLM's processes wait for each other with `sched_yield`, and where one such
    wait shares its core with a rank that spins in an all-reduce, Linux leaves it unscheduled for seconds.
    """
    port = free_port()
    several = num_ffn_ranks > 1
    parallel = ("--tensor-parallel-size", str(num_ffn_ranks), "--enable-expert-parallel") if several else ()

    def config(role: str) -> dict[str, dict[str, object]]:
        return afd_config(role, port, num_ffn_ranks=num_ffn_ranks, **dict(placed or {}))

    def start(role: str, core: int, *args: str, **bound: str) -> Server:
        return start_server(
            role,
            checkpoint.path,
            log_dir=log_dir,
            additional_config=config(role),
            core=core_of_rank(core),
            eager=eager,
            dtype=checkpoint.dtype,
            extra_args=("--worker-extension-cls", INSPECTION, *extra_args, *args),
            env=bound | dict(env or {}),
        )

    shared = {"VLLM_CPU_OMP_THREADS_BIND": "|".join([str(core_of_rank(1))] * num_ffn_ranks)}
    ffn = start("ffn", 1, *parallel, *ffn_args, **(shared if several else {}))
    try:
        return Split(attention=start("attention", 0), ffn=ffn, ffn_config=config("ffn"))
    except BaseException:
        ffn.stop()
        raise

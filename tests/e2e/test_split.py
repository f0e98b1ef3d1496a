"""One Attention and one FFN server against one unsplit server, and what else a user may do to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.comparison import generate, run_split, run_unsplit
from afd_shim.testing.deployments import Split, start_split, start_unsplit
from afd_shim.testing.servers import Completion, ServerError

pytestmark = pytest.mark.timeout(900)

CONFIGURATION_WRAPPER = "vllm.engine.arg_utils:EngineArgs.create_engine_config"


class Unsplit(NamedTuple):
    """What a server with afd-shim installed, and no `afd` configuration, did."""

    outputs: tuple[Completion, ...]
    symbols: object  # of afd-shim, inside vLLM


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[..., Checkpoint]) -> Checkpoint:
    """DeepSeek-V2 style, bfloat16."""
    return checkpoint_of("deepseek-v2")


@pytest.fixture(scope="module")
def unsplit(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Unsplit:
    """The unsplit server everything is compared with."""
    with start_unsplit(checkpoint, tmp_path_factory.mktemp("logs")) as server:
        server.wait_ready()
        return Unsplit(generate(server), server.rpc("inspect_symbols", "afd_shim")[0]["symbols"])


@pytest.fixture(scope="module")
def split(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    """A running split deployment, gate on the FFN."""
    with start_split(checkpoint, tmp_path_factory.mktemp("logs")) as deployment:
        deployment.wait_ready()
        yield deployment


def test_tokens_equal_the_unsplit_servers(split: Split, unsplit: Unsplit) -> None:
    """Temperature 0, one request at a time, bfloat16: the same tokens and the same text."""
    assert generate(split.attention) == unsplit.outputs


def test_every_process_logs_the_digest_of_its_patches(split: Split) -> None:
    """Whoever reads the logs sees which patches are in force where, and that both roles have the same."""
    digests = set()
    for role, server in (("attention", split.attention), ("ffn", split.ffn)):
        for said in (f"takes the {role} role", f"{role}_worker: "):  # the API server, the worker
            digests |= set(re.findall(rf"{said}.* digest (\w{{12}})", server.log()) or [f"none with {said!r}"])

    assert len(digests) == 1, digests


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_a_request_to_the_ffn_is_a_client_error(
    split: Split, unsplit: Unsplit, path: str, prompt: dict[str, object]
) -> None:
    """The FFN's API answers 400 and says where to send the request; the deployment goes on serving."""
    with pytest.raises(ServerError, match="Attention server") as refused:
        split.ffn.post(path, {"model": split.ffn.model, "max_tokens": 4, **prompt})

    assert refused.value.status == 400
    assert split.ffn.is_healthy()
    assert generate(split.attention) == unsplit.outputs


@pytest.mark.newest_release
def test_every_number_of_a_split_run_holds(checkpoint: Checkpoint, unsplit: Unsplit, log_dir: Path) -> None:
    """Gate on Attention: same tokens, one exchange per MoE layer and forward, no byte read in vain."""
    run = run_split(checkpoint, log_dir, expected=unsplit.outputs, compute_gate_on_attention=True)

    assert run.failures() == []


@pytest.mark.newest_release
def test_shared_experts_on_attention_keep_every_number(checkpoint: Checkpoint, unsplit: Unsplit, log_dir: Path) -> None:
    """The FFN's replies are raw, Attention scales them and adds: same tokens, and each role reads its own."""
    run = run_split(checkpoint, log_dir, expected=unsplit.outputs, shared_experts_on_attention=True)

    assert run.failures() == []


def test_without_afd_only_the_configuration_wrapper_differs(unsplit: Unsplit) -> None:
    """Without `afd`, the process that runs the model holds one symbol of ours and no other."""
    assert unsplit.symbols == [CONFIGURATION_WRAPPER]


@pytest.mark.newest_release
def test_without_afd_tokens_are_those_of_vllm_alone(checkpoint: Checkpoint, unsplit: Unsplit, log_dir: Path) -> None:
    """A server that does not load the plugin at all generates the same."""
    alone = run_unsplit(checkpoint, log_dir, env={"VLLM_PLUGINS": ""})

    assert alone == unsplit.outputs

"""CUDA graphs of the Attention role: configuration and the buffers that graphs read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

from afd_shim.config.graphs import EXCHANGE_OPS, split_graphs_at_exchanges
from afd_shim.connectors import AttentionConnector, ExchangeHeader, Reply
from afd_shim.errors import ConfigError
from afd_shim.moe.proxy import RemoteFFNProxy

HOLDS_FORWARDS = (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE)


def finished(mode: CompilationMode, graphs: CUDAGraphMode, **fields: Any) -> Any:
    """What vLLM's finished configuration holds where graphs are concerned, made by vLLM's own code."""
    compilation = CompilationConfig(mode=mode, cudagraph_mode=graphs, **fields)
    post_init(compilation)
    return SimpleNamespace(
        compilation_config=compilation, model_config=SimpleNamespace(architectures=["DeepseekV32ForCausalLM"])
    )


def post_init(compilation: CompilationConfig) -> None:
    """What `VllmConfig.__post_init__` does with split points; EngineCore runs it again."""
    compilation.set_splitting_ops_for_v1("allgather_reducescatter")


@pytest.mark.parametrize("graphs", [*HOLDS_FORWARDS, CUDAGraphMode.PIECEWISE])
def test_graphs_end_before_an_exchange(graphs: CUDAGraphMode) -> None:
    """Both MoE operators become split points beside attention's, and no graph holds a whole forward."""
    config = finished(CompilationMode.VLLM_COMPILE, graphs)
    before = list(config.compilation_config.splitting_ops)

    split_graphs_at_exchanges(config)

    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.PIECEWISE
    assert config.compilation_config.splitting_ops == [*before, *EXCHANGE_OPS]


def test_doing_it_again_changes_nothing() -> None:
    """`create_engine_config` may run several times, and EngineCore repeats vLLM's part."""
    config = finished(CompilationMode.VLLM_COMPILE, CUDAGraphMode.FULL_AND_PIECEWISE)
    split_graphs_at_exchanges(config)
    once = list(config.compilation_config.splitting_ops)

    post_init(config.compilation_config)
    split_graphs_at_exchanges(config)

    assert config.compilation_config.splitting_ops == once
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.PIECEWISE
    assert not set(EXCHANGE_OPS) & set(CompilationConfig._attention_ops)  # vLLM's own list is left alone


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        pytest.param(CompilationMode.NONE, {}, id="not compiled"),
        pytest.param(CompilationMode.VLLM_COMPILE, {"splitting_ops": ["vllm::short_conv"]}, id="split elsewhere"),
    ],
)
@pytest.mark.parametrize("graphs", HOLDS_FORWARDS)
def test_graphs_that_cannot_be_split_are_off(
    graphs: CUDAGraphMode, mode: CompilationMode, fields: dict[str, Any]
) -> None:
    """A graph of a whole forward would exchange once, at capture, and never again."""
    config = finished(mode, graphs, **fields)

    split_graphs_at_exchanges(config)

    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert config.compilation_config.cudagraph_capture_sizes == []


@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.VLLM_COMPILE])
def test_without_graphs_nothing_changes(mode: CompilationMode) -> None:
    """Eager and CPU engines keep their configuration, split points included."""
    config = finished(mode, CUDAGraphMode.NONE)
    before = list(config.compilation_config.splitting_ops)

    split_graphs_at_exchanges(config)

    assert config.compilation_config.splitting_ops == before
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE


def test_breakable_graphs_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM turns them on itself for some architectures: the error names it and both ways out."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    config = finished(CompilationMode.NONE, CUDAGraphMode.PIECEWISE)

    with pytest.raises(ConfigError, match="DeepseekV32ForCausalLM") as caught:
        split_graphs_at_exchanges(config)
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH=0" in str(caught.value)
    assert "--enforce-eager" in str(caught.value)


class _Doubling:
    """An FFN that doubles its input."""

    def send_attn_output(self, header: ExchangeHeader, hidden_states: torch.Tensor, router_logits: None) -> None:
        self._hidden = hidden_states

    def recv_ffn_output(self, header: ExchangeHeader, out: torch.Tensor) -> torch.Tensor:
        return torch.mul(self._hidden, 2, out=out)


def test_captured_sizes_get_an_address_that_stays() -> None:
    """A replayed graph reads the output where it was at capture; each layer has its own, larger batches are fresh."""
    proxy = RemoteFFNProxy(cast("AttentionConnector", _Doubling()), [3, 5])
    proxy.keep_outputs(8, 4, torch.float32, torch.device("cpu"))
    rows = torch.ones(8, 4)

    first, again = proxy.exchange(3, rows[:2]), proxy.exchange(3, rows[:2] * 3)
    smaller, other_layer = proxy.exchange(3, rows[:1]), proxy.exchange(5, rows[:2])
    large = [proxy.exchange(3, torch.ones(9, 4)) for _ in range(2)]

    assert first.data_ptr() == again.data_ptr() == smaller.data_ptr()
    assert other_layer.data_ptr() != first.data_ptr()
    assert large[0].data_ptr() != large[1].data_ptr()
    assert first.is_contiguous()
    assert torch.equal(large[0], torch.full((9, 4), 2.0))


def test_what_is_computed_beside_an_exchange_gets_an_address_that_stays() -> None:
    """The graph behind a layer reads the shared experts' output too, apart from the reply."""
    proxy = RemoteFFNProxy(cast("AttentionConnector", _Doubling()), [3, 5], reply=Reply.RAW)
    proxy.keep_outputs(8, 4, torch.float32, torch.device("cpu"))

    pairs = [proxy.exchange_beside(3, torch.ones(2, 4), None, lambda: torch.full((2, 4), 7.0)) for _ in range(2)]
    large = proxy.exchange_beside(3, torch.ones(9, 4), None, lambda: torch.full((9, 4), 7.0))

    (first, reply), (again, _) = pairs
    assert first.data_ptr() == again.data_ptr() != reply.data_ptr()
    assert torch.equal(first, torch.full((2, 4), 7.0))
    assert torch.equal(reply, torch.full((2, 4), 2.0))
    assert torch.equal(large[0], torch.full((9, 4), 7.0))

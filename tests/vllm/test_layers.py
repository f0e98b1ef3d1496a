"""Each MoE block of a split model gives what the native one gives, bit for bit, and sends what it must."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from afd_shim.connectors.base import AttentionConnector, ExchangeHeader
from afd_shim.errors import LayerError
from afd_shim.ffn.serving import ServingLoop
from afd_shim.moe.runner import AFDExternalRoutingMoERunner, AFDRemoteMoERunner
from afd_shim.testing.checkpoints import Checkpoint
from afd_shim.testing.families import FAMILIES
from afd_shim.testing.local_roles import (
    LoadedModel,
    connected,
    inspect_here,
    load_model,
    load_role,
    patched_vllm,
)
from afd_shim.testing.servers import free_port

MakeCheckpoint = Callable[..., Checkpoint]


class Case(NamedTuple):
    """A family, its dtype, and what is on Attention."""

    family: str
    gate: bool
    dtype: str = "bfloat16"
    shared: bool = False

    def __str__(self) -> str:
        """In pytest's output."""
        shared = "-shared_attention" if self.shared else ""
        return f"{self.family}-gate_{'attention' if self.gate else 'ffn'}-{self.dtype}{shared}"


# The gate's placement is also tried where it makes no difference.
CASES = [Case(family, gate=gate) for family in sorted(FAMILIES) for gate in (False, True)]
# The other types that travel, on the family with every kind of arithmetic: scale, shared experts, float32 router.
CASES += [
    Case("deepseek-v3", gate=True, dtype="float16"),
    Case("deepseek-v3", gate=True, dtype="float32"),
    Case("deepseek-v2", gate=False, dtype="float32"),
]
# Shared experts on Attention; in float16 vLLM divides them instead of scaling the routed ones.
CASES += [
    Case("deepseek-v2", gate=False, shared=True),
    Case("deepseek-v3", gate=True, shared=True),
    Case("deepseek-v3", gate=False, dtype="float16", shared=True),
    Case("qwen3-next", gate=False, shared=True),
]


@dataclass(slots=True)
class Split:
    """A checkpoint's model three times: native, and as both roles that are connected."""

    case: Case
    native: LoadedModel
    attention: LoadedModel
    ffn: LoadedModel
    serving: ServingLoop

    @property
    def rows_type(self) -> torch.dtype:
        """The dtype of the hidden states."""
        dtype = self.native.config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def gate(self) -> str:
        """Where the gate is applied: `ffn`, `attention` or `external`."""
        if FAMILIES[self.case.family].gate == "external":
            return "external"
        return "attention" if self.case.gate else "ffn"

    def rows(self, count: int, seed: int = 0) -> torch.Tensor:
        """Hidden states of that many tokens, as they come out of a norm."""
        hidden = self.native.config.model_config.get_hidden_size()
        return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed)).to(self.rows_type)


class Recorder:
    """Stands in front of a connector and keeps what was sent."""

    def __init__(self, connector: AttentionConnector) -> None:
        self.connector = connector
        self.sent: list[tuple[ExchangeHeader, torch.Tensor, torch.Tensor | None]] = []

    def send_attn_output(
        self, header: ExchangeHeader, hidden_states: torch.Tensor, router_logits: torch.Tensor | None = None
    ) -> None:
        """Keep copies, then send."""
        logits = None if router_logits is None else router_logits.clone()
        self.sent.append((header, hidden_states.clone(), logits))
        self.connector.send_attn_output(header, hidden_states, router_logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connector, name)


@pytest.fixture(scope="module")
def natives(world: None, checkpoint: MakeCheckpoint) -> dict[tuple[str, str], LoadedModel]:
    """Every model natively, built by vLLM before it is patched."""
    loaded = {}
    for family, dtype in dict.fromkeys((case.family, case.dtype) for case in CASES):
        inspect_here(FAMILIES[family].architecture)
        loaded[family, dtype] = load_model(checkpoint(family).path, dtype=dtype)
    return loaded


@pytest.fixture(scope="module")
def patched(natives: object) -> Iterator[None]:
    """vLLM with both roles' patches, once the native models stand."""
    with patched_vllm():
        yield


@pytest.fixture(scope="module", params=CASES, ids=str)
def split(
    request: pytest.FixtureRequest,
    natives: dict[tuple[str, str], LoadedModel],
    patched: None,
    checkpoint: MakeCheckpoint,
) -> Iterator[Split]:
    """The model of one case as both roles, connected over TCP."""
    case: Case = request.param
    path = checkpoint(case.family).path
    afd = {
        "port": free_port(),
        "compute_gate_on_attention": case.gate,
        "shared_experts_on_attention": case.shared,
    }
    ffn = load_role(path, afd | {"role": "ffn"}, dtype=case.dtype)
    attention = load_role(path, afd | {"role": "attention"}, dtype=case.dtype)
    with connected(attention, ffn) as serving:
        yield Split(case, natives[case.family, case.dtype], attention, ffn, serving)


@pytest.fixture
def sent(split: Split) -> Iterator[Recorder]:
    """What crosses the wire during a test."""
    assert split.attention.context is not None
    proxy = split.attention.context.proxy
    assert proxy is not None
    recorder = Recorder(proxy.connector)
    proxy.connector = recorder  # type: ignore[assignment]  # what it lacks it passes on
    yield recorder
    proxy.connector = recorder.connector


def handed_to_runner(split: Split, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states and router logits that the native block hands to its native runner."""
    seen: list[dict[str, torch.Tensor]] = []
    runner = split.native.runners()[layer]
    signature = inspect.signature(runner.forward)

    def keep(_module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(signature.bind(*args, **kwargs).arguments)

    with runner.register_forward_pre_hook(keep, with_kwargs=True):
        split.native.run(split.native.blocks()[layer], rows.clone())
    [arguments] = seen
    return arguments["hidden_states"], arguments["router_logits"]


def describe(split: Split, layer: int, rows: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Tell how two outputs differ, and which of the two sides gives the same again."""
    native = split.native.run(split.native.blocks()[layer], rows.clone())
    remote = split.attention.run(split.attention.blocks()[layer], rows.clone())
    return (
        f"layer {layer}: {int((actual != expected).sum())} of {actual.numel()} elements differ, at most by "
        f"{float((actual.float() - expected.float()).abs().max())}; NaN: split {int(actual.isnan().sum())}, native "
        f"{int(expected.isnan().sum())}; run again: split {'equal' if torch.equal(remote, actual) else 'differs'}, "
        f"native {'equal' if torch.equal(native, expected) else 'differs'}"
    )


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_every_block_equals_the_native_one_bit_for_bit(split: Split, tokens: int) -> None:
    """Same rows, same bits, in every MoE layer of the model."""
    blocks = split.attention.blocks()
    assert sorted(blocks) == sorted(split.native.blocks())

    for layer, native in split.native.blocks().items():
        rows = split.rows(tokens, seed=layer)
        expected = split.native.run(native, rows.clone())
        actual = split.attention.run(blocks[layer], rows.clone())

        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), describe(split, layer, rows, actual, expected)
        assert expected.abs().max() > 0


def test_the_block_itself_is_the_models_own(split: Split) -> None:
    """Only the runner inside differs: the model's native MoE forward is used as it is."""
    for layer, native in split.native.blocks().items():
        block = split.attention.blocks()[layer]
        assert type(block) is type(native)
        assert type(block).forward is type(native).forward
        assert type(split.ffn.runners()[layer]) is type(split.native.runners()[layer]) is MoERunner
        runs_routing_here = split.gate != "ffn"
        expected = AFDExternalRoutingMoERunner if runs_routing_here else AFDRemoteMoERunner
        assert type(split.attention.runners()[layer]) is expected


@pytest.mark.parametrize("tokens", [1, 7])
def test_the_payload_is_what_the_gate_placement_requires(split: Split, sent: Recorder, tokens: int) -> None:
    """Hidden states always; router logits exactly where Attention applies the gate, in the gate's dtype."""
    layer, block = next(iter(split.attention.blocks().items()))
    rows = split.rows(tokens)
    hidden, logits = handed_to_runner(split, layer, rows)
    gate = split.native.runners()[layer].gate
    if gate is not None:
        with torch.inference_mode():
            logits, _ = gate(hidden)

    split.attention.run(block, rows.clone())

    [(header, sent_hidden, sent_logits)] = sent.sent
    assert (header.layer, header.rows) == (layer, tokens)
    assert torch.equal(sent_hidden, hidden)
    if split.gate == "ffn":
        assert sent_logits is None
    else:
        assert sent_logits is not None
        assert sent_logits.dtype == logits.dtype
        assert torch.equal(sent_logits, logits)


def test_one_exchange_for_each_block(split: Split, sent: Recorder) -> None:
    """A forward exchanges once for each MoE layer, in the model's order, and the last one says so."""
    before = dataclasses.replace(sent.connector.stats)
    blocks = split.attention.blocks()
    for block in blocks.values():
        split.attention.run(block, split.rows(7))

    assert [header.layer for header, *_ in sent.sent] == sorted(blocks)
    assert [header.last_layer for header, *_ in sent.sent] == [False] * (len(blocks) - 1) + [True]
    assert {header.rows for header, *_ in sent.sent} == {7}
    assert sent.connector.stats.exchanges - before.exchanges == len(blocks)
    assert sent.connector.stats.rows - before.rows == 7 * len(blocks)


def test_the_output_is_a_fresh_buffer_and_the_input_untouched(split: Split) -> None:
    """Models reuse their input after the block; an aliased output would overwrite it."""
    layer, runner = next(iter(split.attention.runners().items()))
    rows = split.rows(7)
    hidden, logits = (tensor.clone() for tensor in handed_to_runner(split, layer, rows))
    kept = hidden.clone()

    first = split.attention.run(runner, hidden_states=hidden, router_logits=logits)
    second = split.attention.run(runner, hidden_states=hidden, router_logits=logits)

    assert torch.equal(hidden, kept)
    assert len({tensor.untyped_storage().data_ptr() for tensor in (hidden, logits, first, second)}) == 4
    assert torch.equal(first, second)


@pytest.mark.parametrize("argument", ["input_ids", "shared_experts_input"])
def test_an_argument_that_does_not_travel_is_refused(split: Split, sent: Recorder, argument: str) -> None:
    """Dropping it in silence would compute something else."""
    runner = next(iter(split.attention.runners().values()))
    rows = split.rows(2)
    extra = rows if argument == "shared_experts_input" else torch.zeros(2, dtype=torch.int64)

    with pytest.raises(LayerError, match=argument):
        split.attention.run(runner, hidden_states=rows, router_logits=rows, **{argument: extra})

    assert sent.sent == []


def test_router_logits_of_a_wrong_width_are_refused_before_sending(split: Split, sent: Recorder) -> None:
    """A gate that was not applied is found here: on the FFN it would route by the wrong columns."""
    if split.gate == "ffn":
        pytest.skip("no router logits travel")
    runner = next(iter(split.attention.runners().values()))
    rows = split.rows(3)
    logits = torch.zeros(3, 7, dtype=rows.dtype)
    gate = runner.gate
    if gate is not None:
        runner.gate = NarrowGate(logits)

    try:
        with pytest.raises(LayerError, match=r"width 7, the layer has 8 experts.*Nothing was sent"):
            split.attention.run(runner, hidden_states=rows, router_logits=logits)
    finally:
        runner.gate = gate

    assert sent.sent == []


class NarrowGate(nn.Module):
    """Gives router logits that somebody else made."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, _rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As a ReplicatedLinear returns: output and bias."""
        return self.logits, None


def test_the_runner_owns_no_parameter_but_what_is_attentions(split: Split) -> None:
    """Experts and score-correction bias are nowhere on Attention; gate and shared experts as configured."""
    for layer, runner in split.attention.runners().items():
        native = split.native.runners()[layer]
        owned = {name for name, _ in runner.named_parameters()}
        gate = {"gate.weight"} if split.gate == "attention" else set()
        shared = {name for name, _ in native.named_parameters() if name.startswith("_shared_experts.")}
        assert owned == (gate | shared if split.case.shared else gate)
        assert list(runner.routed_experts.parameters()) == []
        assert list(runner.routed_experts.buffers()) == []
        assert list(runner.get_expert_weights()) == []
        assert (runner.shared_experts is not None) is split.case.shared
        assert runner.routed_scaling_factor == (native.routed_scaling_factor if split.case.shared else 1.0)


def test_shared_experts_on_attention_run_while_the_exchange_is_in_flight(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their work is hidden behind the round trip, and done nowhere else."""
    if not split.case.shared:
        pytest.skip("shared experts are on the FFN")
    assert split.attention.context is not None
    proxy = split.attention.context.proxy
    assert proxy is not None
    layer, runner = next(iter(split.attention.runners().items()))
    assert split.ffn.runners()[layer].shared_experts is None
    assert runner.shared_experts is not None
    events: list[str] = []

    def noted(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            events.append(what)
            return call(*args)

        return note

    for name in ("send_attn_output", "recv_ffn_output"):
        monkeypatch.setattr(proxy.connector, name, noted(name, getattr(proxy.connector, name)))
    with runner.shared_experts.register_forward_pre_hook(lambda *_: pytest.fail("vLLM's own order")):
        inner: nn.Module = runner.shared_experts._layer
        with inner.register_forward_pre_hook(lambda *_: events.append("shared experts")):
            split.attention.run(split.attention.blocks()[layer], split.rows(7))

    assert events == ["send_attn_output", "shared experts", "recv_ffn_output"]


def test_loading_an_expert_tensor_into_attention_is_an_error(split: Split) -> None:
    """Success would hide a checkpoint name that was attributed to the wrong role."""
    runner = next(iter(split.attention.runners().values()))

    with pytest.raises(LayerError, match="owns no experts"):
        list(runner.load_weights([("0.gate_proj.weight", torch.zeros(64, 128))]))

"""A role reads and holds what it owns, and nothing else; whatever its tensors are called."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models import utils as model_utils
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, extract_layer_index

from afd_shim import role
from afd_shim.errors import ConfigError, UnsupportedModelError
from afd_shim.moe.checkpoint import CheckpointPlan
from afd_shim.testing.checkpoints import Checkpoint, Role, write_checkpoint
from afd_shim.testing.families import FAMILIES
from afd_shim.testing.local_roles import LoadedModel, inspect_here, load_model, load_role, patched_vllm
from afd_shim.testing.tensors import TensorSpec, write_safetensors
from afd_shim.testing.weights import Live, counted_reads, live_parameters

MakeCheckpoint = Callable[..., Checkpoint]
LoadRole = Callable[..., LoadedModel]


class Case(NamedTuple):
    """A family, and what of its MoE layers is on Attention."""

    family: str
    gate: bool
    shared: bool = False

    def __str__(self) -> str:
        """In pytest's output."""
        return f"{self.family}-gate_{'attention' if self.gate else 'ffn'}{'-shared_attention' if self.shared else ''}"

    @property
    def placed(self) -> dict[str, bool]:
        """As keys of the configuration."""
        return {"compute_gate_on_attention": self.gate, "shared_experts_on_attention": self.shared}


CASES = [Case(family, gate) for family in sorted(FAMILIES) for gate in FAMILIES[family].gate_placements]
CASES += [Case("deepseek-v3", gate=True, shared=True), Case("qwen3-next", gate=False, shared=True)]
ROLES: tuple[Role, Role] = ("ffn", "attention")


@pytest.fixture
def read() -> Iterator[dict[str, int]]:
    """Bytes read from safetensors files during a test, by tensor."""
    with counted_reads() as counted:
        yield counted


@pytest.fixture(scope="module", autouse=True)
def countable_weights() -> Iterator[None]:
    """Where its CPU kernels want packed weights (oneDNN, AMX), vLLM empties the Parameters of linear layers."""
    stock = layer_utils.dispatch_cpu_unquantized_gemm

    def keep_weight(layer: nn.Module, **_: object) -> None:
        stock(layer, remove_weight=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", keep_weight)
        yield


@pytest.fixture(scope="module")
def native_bytes(countable_weights: None, world: None, checkpoint: MakeCheckpoint) -> Iterator[dict[str, int]]:
    """Bytes of the Parameters that an unsplit model lives with, by family."""
    held = {}
    for family in sorted(FAMILIES):
        inspect_here(FAMILIES[family].architecture)
    gc.collect()
    gc.freeze()  # vLLM's million objects need not be looked through for every model
    for family in sorted(FAMILIES):
        live = Live(live_parameters())
        loaded = load_model(checkpoint(family).path)
        held[family] = live.bytes()
        del loaded
    yield held
    gc.unfreeze()


@pytest.fixture(scope="module")
def patched(native_bytes: object) -> Iterator[None]:
    """vLLM with both roles' patches."""
    with patched_vllm():
        yield


@pytest.fixture
def load(patched: None) -> Iterator[LoadRole]:
    """Load a role's model; the role is given back after the test."""
    loaded: list[LoadedModel] = []

    def load_one(path: Path, role_name: Role, *, gate: bool = False, **engine_args: Any) -> LoadedModel:
        afd: dict[str, object] = {"role": role_name, "compute_gate_on_attention": gate}
        loaded.append(load_role(path, afd, **engine_args))
        return loaded[-1]

    yield load_one
    for model in loaded:
        assert model.context is not None
        role.release(model.context)


def plan_of(loaded: LoadedModel) -> CheckpointPlan:
    """What the product says it owns and has read."""
    assert loaded.context is not None
    assert loaded.context.plan is not None
    return loaded.context.plan


@dataclass(slots=True)
class Observed:
    """One role of a checkpoint, loaded."""

    read: dict[str, int]
    live_bytes: int
    plan: CheckpointPlan
    registered: list[str]


@dataclass(slots=True)
class Deployment:
    """Both roles of a checkpoint, loaded one after the other."""

    checkpoint: Checkpoint
    case: Case
    roles: dict[Role, Observed]

    def owned_bytes(self, role_name: Role) -> int:
        """Bytes in the checkpoint of what a role owns."""
        return self.checkpoint.owned_bytes(role_name, **self.case.placed)


@pytest.fixture(scope="module", params=CASES, ids=str)
def deployment(request: pytest.FixtureRequest, patched: None, checkpoint: MakeCheckpoint) -> Deployment:
    """A family's checkpoint as both roles, with the counts of a counter that is not the product's."""
    case: Case = request.param
    made = checkpoint(case.family)
    roles: dict[Role, Observed] = {}
    for role_name in ROLES:
        live = Live(live_parameters())
        with counted_reads() as read:
            loaded = load_role(made.path, {"role": role_name, **case.placed})
        registered = sorted(loaded.config.compilation_config.static_forward_context)
        roles[role_name] = Observed(read, live.bytes(), plan_of(loaded), registered)
        assert loaded.context is not None
        role.release(loaded.context)
    return Deployment(made, case, roles)


@pytest.mark.parametrize("role_name", ROLES)
def test_a_role_reads_exactly_the_names_it_owns(deployment: Deployment, role_name: Role) -> None:
    """What the family declares is the measure, and reads are counted where the file is read."""
    observed = deployment.roles[role_name]

    owned = deployment.checkpoint.owned_names(role_name, **deployment.case.placed)
    assert observed.plan.owned == owned
    assert set(observed.read) == owned
    assert sum(observed.read.values()) <= 1.05 * deployment.owned_bytes(role_name)
    assert observed.plan.bytes_read == sum(observed.read.values())


def test_live_parameters_are_what_the_role_owns(deployment: Deployment, native_bytes: dict[str, int]) -> None:
    """The FFN holds its tensors and no byte more, and Attention holds the rest of the native model."""
    held = {role_name: observed.live_bytes for role_name, observed in deployment.roles.items()}

    assert held["ffn"] == deployment.owned_bytes("ffn")
    # Not its checkpoint bytes: vLLM keeps two more matrices for each MLA layer, and A_log in float32.
    assert held["attention"] == native_bytes[deployment.checkpoint.family.name] - held["ffn"]


def test_the_ffn_registers_nothing_but_its_moe_layers(deployment: Deployment) -> None:
    """What stays registered stays alive, and vLLM would plan a KV cache for its attention."""
    layers = deployment.checkpoint.moe_layers

    registered = deployment.roles["ffn"].registered
    assert [extract_layer_index(name) for name in registered] == layers
    assert all(name.endswith(".experts") for name in registered)
    assert set(registered) < set(deployment.roles["attention"].registered)


@pytest.mark.parametrize("role_name", ROLES)
@pytest.mark.parametrize("family", ["granitemoe", "qwen3-moe"])
def test_tied_embeddings_are_attentions(
    family: str, role_name: Role, checkpoint: MakeCheckpoint, load: LoadRole, read: dict[str, int]
) -> None:
    """One tensor, embedding and head; the FFN has neither."""
    made = checkpoint(family, tied_embeddings=True)

    live = Live(live_parameters())
    loaded = load(made.path, role_name)

    assert set(read) == made.owned_names(role_name)
    assert ("model.embed_tokens.weight" in read) == (role_name == "attention")
    assert live.bytes() == made.owned_bytes(role_name)
    assert loaded.config.model_config.hf_config.tie_word_embeddings


# --- Names the code never saw ---------------------------------------------------------------------
class RenamedMoe(Qwen3MoeForCausalLM):
    """Qwen3-MoE whose checkpoint calls everything otherwise, as multimodal wrappers do."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"net.language.": "model.", "net.head.": "lm_head."},
        orig_to_new_substr={".feed.": ".mlp.", ".expert_list.": ".experts."},
    )

    def load_weights(self, weights: Any) -> set[str]:
        """Load through the mapper, as vLLM's wrappers do."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return loaded


class BlindMoe(Qwen3MoeForCausalLM):
    """Qwen3-MoE that ignores the vision tower in its checkpoint."""

    def load_weights(self, weights: Any) -> set[str]:
        """Skip the tower, as text-only variants do."""
        loaded: set[str] = AutoWeightsLoader(self, ignore_unexpected_prefixes=["visual."]).load_weights(weights)
        return loaded


class Tower(nn.Module):
    """A tower with layers whose parts are called like a MoE layer's."""

    def __init__(self) -> None:
        super().__init__()
        mlp = nn.Module()
        mlp.gate = nn.Linear(128, 8, bias=False)
        mlp.experts = nn.ModuleList([nn.ModuleDict({"gate_proj": nn.Linear(128, 64, bias=False)})])
        layer = nn.Module()
        layer.mlp = mlp
        self.layers = nn.ModuleList([layer])


class SeeingMoe(Qwen3MoeForCausalLM):
    """Qwen3-MoE with a vision tower whose names match a MoE layer's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.visual = Tower()

    def load_weights(self, weights: Any) -> set[str]:
        """Load everything, the tower too."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights)
        return loaded


TOWER = (
    TensorSpec("visual.layers.0.mlp.gate.weight", (8, 128), "attention", std=0.1),
    TensorSpec("visual.layers.0.mlp.experts.0.gate_proj.weight", (64, 128), "attention", std=0.1),
)


def renamed(name: str) -> str:
    """The name RenamedMoe's checkpoint has for a tensor of Qwen3-MoE."""
    name = name.replace("lm_head.", "net.head.", 1) if name.startswith("lm_head.") else name
    name = name.replace("model.", "net.language.", 1) if name.startswith("model.") else name
    return name.replace(".mlp.", ".feed.").replace(".experts.", ".expert_list.")


def write_variant(path: Path, model: type[nn.Module], specs: Sequence[TensorSpec]) -> Path:
    """Write a Qwen3-MoE checkpoint with other tensors, for another model class."""
    write_checkpoint("qwen3-moe", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": [model.__name__]}))
    write_safetensors(path / "model.safetensors", specs, dtype="bfloat16", seed=0)
    ModelRegistry.register_model(model.__name__, model)
    return path


def owned_by(specs: Sequence[TensorSpec], role_name: Role) -> set[str]:
    """Names a role owns, with the gate on FFN."""
    return {spec.name for spec in specs if ("ffn" if spec.owner == "gate" else spec.owner) == role_name}


@pytest.mark.parametrize("role_name", ROLES)
def test_a_renamed_checkpoint_is_attributed_through_the_models_own_mapper(
    role_name: Role, checkpoint: MakeCheckpoint, load: LoadRole, read: dict[str, int], tmp_path: Path
) -> None:
    """No name in it looks like an expert, a gate or a layer that the code knows."""
    specs = [replace(spec, name=renamed(spec.name)) for spec in checkpoint("qwen3-moe").specs]
    assert not any("experts" in spec.name or "model." in spec.name for spec in specs)

    load(write_variant(tmp_path, RenamedMoe, specs), role_name)

    assert set(read) == owned_by(specs, role_name)


class LeftBehind(dict[int, list[str]]):
    """vLLM's memo of missing layers as it is once freed models' addresses are taken again: it knows every model."""

    stale = True

    def __contains__(self, model: object) -> bool:
        return self.stale or super().__contains__(model)

    def __missing__(self, _model: int) -> list[str]:
        return ["model.", "layers."]

    def clear(self) -> None:
        """Know nothing any more."""
        self.stale = False
        super().clear()


@pytest.mark.parametrize("role_name", ROLES)
def test_what_another_model_lacked_is_not_missing_in_this_one(
    role_name: Role,
    checkpoint: MakeCheckpoint,
    load: LoadRole,
    read: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM remembers by `id()` what a model lacks; a stale entry once left parameters as they were allocated."""
    monkeypatch.setattr(model_utils, "_model_to_pp_missing_layer_names", LeftBehind())
    made = checkpoint("deepseek-v3")

    load(made.path, role_name)

    assert set(read) == made.owned_names(role_name)


@pytest.mark.parametrize("role_name", ROLES)
def test_names_the_model_ignores_are_read_by_nobody(
    role_name: Role, checkpoint: MakeCheckpoint, load: LoadRole, read: dict[str, int], tmp_path: Path
) -> None:
    """A tower for a text-only model stays on disk, on both roles."""
    specs = checkpoint("qwen3-moe").specs

    load(write_variant(tmp_path, BlindMoe, [*specs, *TOWER]), role_name)

    assert set(read) == owned_by(specs, role_name)


@pytest.mark.parametrize("role_name", ROLES)
def test_a_vision_tower_that_looks_like_a_moe_layer_is_attentions(
    role_name: Role, checkpoint: MakeCheckpoint, load: LoadRole, read: dict[str, int], tmp_path: Path
) -> None:
    """`layers.0.mlp.experts` outside the decoder is no MoE layer: it was not built by the factory."""
    specs = [*checkpoint("qwen3-moe").specs, *TOWER]

    loaded = load(write_variant(tmp_path, SeeingMoe, specs), role_name)

    assert set(read) == owned_by(specs, role_name)
    tower = [name for name, tensor in loaded.model.named_parameters() if name.startswith("visual.")]
    assert (tower != []) == (role_name == "attention")


def test_fused_expert_tensors_are_the_ffns(checkpoint: MakeCheckpoint, load: LoadRole, read: dict[str, int]) -> None:
    """GraniteMoE stores all experts of a layer in one three-dimensional tensor, under names of its own."""
    made = checkpoint("granitemoe")

    load(made.path, "ffn")

    assert {name.rsplit(".", 2)[1] for name in read} == {"input_linear", "output_linear"}
    assert all(len(spec.shape) == 3 for spec in made.specs if spec.name in read)


# --- What cannot be read selectively --------------------------------------------------------------
@pytest.mark.parametrize("role_name", ROLES)
def test_a_checkpoint_without_safetensors_is_refused(
    role_name: Role, checkpoint: MakeCheckpoint, load: LoadRole, tmp_path: Path
) -> None:
    """A pickled checkpoint has no headers: a role would have to read all of it."""
    made = checkpoint("qwen3-moe")
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())
    weights = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in made.specs}
    torch.save(weights, tmp_path / "pytorch_model.bin")

    with pytest.raises(UnsupportedModelError, match="safetensors") as refused:
        load(tmp_path, role_name)

    assert refused.value.key == "load_format"


@pytest.mark.parametrize("role_name", ROLES)
def test_dummy_weights_need_no_checkpoint(
    role_name: Role, checkpoint: MakeCheckpoint, load: LoadRole, read: dict[str, int], tmp_path: Path
) -> None:
    """`--load-format dummy` serves a role from a config alone, and holds what the role owns."""
    made = checkpoint("qwen3-moe")
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())

    live = Live(live_parameters())
    loaded = load(tmp_path, role_name, load_format="dummy")

    assert read == {}
    assert live.bytes() == made.owned_bytes(role_name)
    assert not plan_of(loaded).selective


@pytest.mark.parametrize("role_name", ROLES)
def test_shared_experts_on_attention_need_a_model_that_has_some(
    role_name: Role, checkpoint: MakeCheckpoint, patched: None
) -> None:
    """An option that does nothing is a mistake in the configuration, told before anything is read."""
    afd: dict[str, object] = {"role": role_name, "shared_experts_on_attention": True}

    with pytest.raises(ConfigError, match="no shared experts") as refused:
        load_role(checkpoint("qwen3-moe").path, afd)

    assert refused.value.key == "shared_experts_on_attention"

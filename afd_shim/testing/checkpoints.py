"""Write a tiny random checkpoint, tokenizer included, that stock vLLM serves as it is.

checkpoint = write_checkpoint("deepseek-v2", Path("/tmp/model"))
# vllm serve /tmp/model
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from afd_shim.testing.families import FAMILIES, SIZES, Family, Size
from afd_shim.testing.tensors import Dtype, Owner, TensorSpec, write_safetensors
from afd_shim.testing.tokenizer import BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID, write_tokenizer

__all__ = ["Checkpoint", "Role", "write_checkpoint"]

Role = Literal["attention", "ffn"]

# With tied embeddings the head favours the token it just read: a small embedding leaves the choice to
# what attention and experts add to the residual.
_TIED_EMBEDDING_STD = 0.05


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk and what a test has to know about it."""

    path: Path
    family: Family
    size: Size
    dtype: Dtype
    specs: tuple[TensorSpec, ...]

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the layers whose MLP is a mixture of experts."""
        return self.family.moe_layers(self.size)

    def owned_names(
        self, role: Role, *, compute_gate_on_attention: bool = False, shared_experts_on_attention: bool = False
    ) -> set[str]:
        """Names of the tensors that a role owns, and therefore reads."""
        owners: dict[Owner, Role] = {
            "attention": "attention",
            "ffn": "ffn",
            "gate": "attention" if compute_gate_on_attention else "ffn",
            "shared_experts": "attention" if shared_experts_on_attention else "ffn",
        }
        return {spec.name for spec in self.specs if owners[spec.owner] == role}

    def owned_bytes(
        self, role: Role, *, compute_gate_on_attention: bool = False, shared_experts_on_attention: bool = False
    ) -> int:
        """Bytes in the checkpoint of what a role owns."""
        names = self.owned_names(
            role,
            compute_gate_on_attention=compute_gate_on_attention,
            shared_experts_on_attention=shared_experts_on_attention,
        )
        return sum(spec.nbytes(self.dtype) for spec in self.specs if spec.name in names)


def write_checkpoint(
    family: str,
    path: Path,
    *,
    dtype: Dtype = "bfloat16",
    size: str = "tiny",
    tied_embeddings: bool = False,
    seed: int = 0,
) -> Checkpoint:
    """Write `config.json`, `model.safetensors` and a tokenizer into the directory `path`.

    The same arguments give the same bytes. `family` is a key of `FAMILIES`, `size` of `SIZES`.

    Raises:
        KeyError: for an unknown family or size.
        ValueError: for tied embeddings where vLLM's model ignores them (it would serve zeros).

    """
    chosen, dimensions = FAMILIES[family], SIZES[size]
    if tied_embeddings and not chosen.can_tie_embeddings:
        raise ValueError(f"vLLM's {chosen.architecture} does not tie its embeddings; take qwen3-moe or granitemoe")
    specs = tuple(_tied(chosen.tensors(dimensions)) if tied_embeddings else chosen.tensors(dimensions))
    config = chosen.config(dimensions) | {
        "architectures": [chosen.architecture],
        "torch_dtype": dtype,
        "tie_word_embeddings": tied_embeddings,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_safetensors(path / "model.safetensors", specs, dtype=dtype, seed=seed)
    write_tokenizer(path)
    return Checkpoint(path, chosen, dimensions, dtype, specs)


def _tied(specs: Iterator[TensorSpec]) -> Iterator[TensorSpec]:
    for spec in specs:
        if spec.name == "model.embed_tokens.weight":
            yield replace(spec, std=_TIED_EMBEDDING_STD)
        elif spec.name != "lm_head.weight":
            yield spec

"""Tiny checkpoints: what is on disk, who owns it, and that it is the same everywhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from tokenizers import Tokenizer

from afd_shim.testing.checkpoints import Checkpoint, Role, write_checkpoint
from afd_shim.testing.families import FAMILIES, SIZES
from afd_shim.testing.tensors import Owner, TensorSpec, write_safetensors

ROLES: tuple[Role, ...] = ("attention", "ffn")


def read_header(path: Path) -> dict[str, dict[str, object]]:
    """The header of a safetensors file, by the format's own description."""
    data = path.read_bytes()
    header: dict[str, dict[str, object]] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


def digest(checkpoint: Checkpoint) -> str:
    """A hash of every file of a checkpoint."""
    whole = hashlib.sha256()
    for file in sorted(checkpoint.path.iterdir()):
        whole.update(file.name.encode() + file.read_bytes())
    return whole.hexdigest()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_file_holds_exactly_the_declared_tensors(family: str, tmp_path: Path) -> None:
    """Names, shapes and sizes on disk are those of the family, with nothing after the last tensor."""
    checkpoint = write_checkpoint(family, tmp_path)

    file = checkpoint.path / "model.safetensors"
    header = read_header(file)
    header.pop("__metadata__")
    expected = {spec.name: list(spec.shape) for spec in checkpoint.specs}
    assert {name: entry["shape"] for name, entry in header.items()} == expected
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == header_bytes + sum(spec.nbytes("bfloat16") for spec in checkpoint.specs)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_same_arguments_give_the_same_bytes(family: str, tmp_path: Path) -> None:
    """Two machines that make a checkpoint make the same one; another seed makes another."""
    first = write_checkpoint(family, tmp_path / "first")
    second = write_checkpoint(family, tmp_path / "second")
    other = write_checkpoint(family, tmp_path / "other", seed=1)

    assert digest(first) == digest(second)
    assert digest(first) != digest(other)


@pytest.mark.parametrize("shared_on_attention", [False, True])
@pytest.mark.parametrize("gate_on_attention", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_tensor_has_exactly_one_owner(
    family: str, gate_on_attention: bool, shared_on_attention: bool, tmp_path: Path
) -> None:
    """The roles share nothing and forget nothing, wherever gate and shared experts are."""
    checkpoint = write_checkpoint(family, tmp_path)
    placed = {
        "compute_gate_on_attention": gate_on_attention,
        "shared_experts_on_attention": shared_on_attention,
    }

    attention, ffn = (checkpoint.owned_names(role, **placed) for role in ROLES)

    assert attention.isdisjoint(ffn)
    assert attention | ffn == {spec.name for spec in checkpoint.specs}


def test_only_a_gate_of_the_runner_moves_to_attention(tmp_path: Path) -> None:
    """`compute_gate_on_attention` moves one gate per MoE layer, and not the correction bias."""
    checkpoint = write_checkpoint("deepseek-v3", tmp_path)

    moved = checkpoint.owned_names("ffn") - checkpoint.owned_names("ffn", compute_gate_on_attention=True)

    assert moved == {f"model.layers.{layer}.mlp.gate.weight" for layer in checkpoint.moe_layers}


def test_bfloat16_is_rounded_to_nearest_even(tmp_path: Path) -> None:
    """The writer rounds as torch does; truncation would shift every weight towards zero."""
    spec = TensorSpec("x", (4096,), "ffn", std=1.0)
    write_safetensors(tmp_path / "x", [spec], dtype="bfloat16", seed=0)

    stored = np.frombuffer((tmp_path / "x").read_bytes()[-8192:], "<u2").astype(np.uint32) << 16
    values = spec.values(0)
    error = np.abs(stored.view(np.float32) - values)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(values))) - 7)  # bfloat16 keeps 8 significant bits
    assert np.all(error <= ulp / 2)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    """A family that declares a name twice is a defect, found when it is written."""
    spec = TensorSpec("twice", (1,), "ffn", std=1.0)

    with pytest.raises(ValueError, match="twice"):
        write_safetensors(tmp_path / "x", [spec, spec], dtype="float32", seed=0)


def test_tied_embeddings_leave_the_head_out(tmp_path: Path) -> None:
    """A tied checkpoint has no head of its own."""
    checkpoint = write_checkpoint("qwen3-moe", tmp_path, tied_embeddings=True)

    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in read_header(checkpoint.path / "model.safetensors")


def test_tied_embeddings_are_refused_where_vllm_ignores_them(tmp_path: Path) -> None:
    """vLLM's DeepSeek model would serve an uninitialised head without a word."""
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM"):
        write_checkpoint("deepseek-v3", tmp_path, tied_embeddings=True)


def test_the_large_size_owns_about_200_mb_for_each_role() -> None:
    """Memory is measured on it: small enough to make on the spot, large against what a process needs anyway."""
    owned = dict.fromkeys(get_args(Owner), 0)
    for spec in FAMILIES["deepseek-v2"].tensors(SIZES["large"]):
        owned[spec.owner] += spec.nbytes("bfloat16")

    assert 180e6 < owned["attention"] < 250e6
    assert 180e6 < owned["ffn"] + owned["shared_experts"] < 250e6


def test_the_tokenizer_has_512_tokens_and_reads_any_text(tmp_path: Path) -> None:
    """Every byte has a token, so that any prompt comes back as it was."""
    write_checkpoint("olmoe", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = 'The quick brown fox, "quoted"; naïve Ω 漢 🦊\n\ttabs'

    encoded = tokenizer.encode(text)

    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.decode(encoded.ids) == text
    assert len(encoded.ids) < len(text.encode())

"""The recipes run as written, up to `vllm`, which a stub replaces: what they would start is what is checked."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from afd_shim.config import parse_afd_config

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.sh"))
# Each command line of a recipe; the second one takes the role.
RUNS: dict[str, list[tuple[str, ...]]] = {
    "deepseek-v2-lite-2a2f-single-host.sh": [()],
    "deepseek-v2-lite-2a2f-multi-host.sh": [("ffn",), ("attention", "0"), ("attention", "1")],
}
EXPERTS = 64  # DeepSeek-V2-Lite


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_is_valid_bash(recipe: Path) -> None:
    """`bash -n` finds no mistake."""
    checked = subprocess.run(["bash", "-n", str(recipe)], capture_output=True, text=True, check=False)

    assert (checked.returncode, checked.stderr) == (0, "")


def started_by(recipe: Path, folder: Path) -> list[list[str]]:
    """The arguments of every `vllm` that a recipe starts."""
    stub = folder / "vllm"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" > "$(mktemp "$STARTED/XXXXXX.args")"\nsleep 1\n')
    stub.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "STARTED": str(folder),
        "FFN_HOST": "10.0.0.1",
    }
    for arguments in RUNS[recipe.name]:
        subprocess.run([str(recipe), *arguments], env=environment, check=True, timeout=30)
    return [path.read_text().split("\0")[:-1] for path in sorted(folder.glob("*.args"))]


def option(command: list[str], name: str) -> str | None:
    """The value of a flag, None without it."""
    return command[command.index(name) + 1] if name in command else None


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_starts_two_attention_and_two_ffn_ranks(recipe: Path, tmp_path: Path) -> None:
    """Our own validator takes every configuration, the ranks fit together, and EPLB is on the FFN command only."""
    commands = started_by(recipe, tmp_path)

    configs = [parse_afd_config(json.loads(option(command, "--additional-config") or "")) for command in commands]
    by_role: dict[bool, list[int]] = {True: [], False: []}
    for command, config in zip(commands, configs, strict=True):
        assert config is not None
        assert (config.num_attention_ranks, config.num_ffn_ranks) == (2, 2)
        by_role[config.is_attention].append(config.connector_extra_config.get("first_attention_rank", 0))
        assert ("--enable-eplb" in command) is not config.is_attention
        if not config.is_attention:
            eplb = json.loads(option(command, "--eplb-config") or "")
            assert option(command, "--tensor-parallel-size") == "2"
            assert (EXPERTS + eplb["num_redundant_experts"]) / 2 == 48
    assert sorted(by_role[True]) == [0, 1]
    assert len(by_role[False]) == 1

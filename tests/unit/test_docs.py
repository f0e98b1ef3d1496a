"""What the documents tell a user to type is valid: commands, targets, JSON, keys and links."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from afd_shim.cli import app
from afd_shim.config import AFDConfig, parse_afd_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SCRIPTS = sorted(ROOT.glob("recipes/*.sh"))
ADDITIONAL_CONFIG = re.compile(r"--additional-config\s+'(\{.*?\})'", re.DOTALL)
CODE_BLOCK = re.compile(r"```(?:bash|sh|console)\n(.*?)```", re.DOTALL)


def additional_configs() -> list[object]:
    """Every complete `--additional-config '...'` of the documents and recipes, with where it stands."""
    found: list[object] = []
    for document in [*DOCUMENTS, *SCRIPTS]:
        for number, text in enumerate(ADDITIONAL_CONFIG.findall(document.read_text(encoding="utf-8"))):
            if "..." not in text and "$" not in text:
                found.append(pytest.param(text, id=f"{document.name}-{number}"))
    return found


def shell_lines() -> list[str]:
    """Every line of every shell block."""
    blocks = [block for document in DOCUMENTS for block in CODE_BLOCK.findall(document.read_text(encoding="utf-8"))]
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("text", additional_configs())
def test_every_additional_config_is_accepted(text: str) -> None:
    """JSON copied from a document starts a server instead of an error message."""
    assert parse_afd_config(json.loads(text)) is not None


def test_the_readme_gives_both_roles_of_both_builds() -> None:
    """The pattern above really finds the README's four commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    roles = [json.loads(config)["afd"]["role"] for config in ADDITIONAL_CONFIG.findall(text)]

    assert sorted(roles) == ["attention", "attention", "ffn", "ffn"]


def test_the_readme_describes_every_key_of_afd() -> None:
    """The table of keys is complete, and has none that does not exist."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| key of `afd` |") :].split("\n\n")[0]
    described = {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}

    assert described == set(AFDConfig.model_fields)


def test_every_afd_shim_command_exists() -> None:
    """A command that a document shows is one that the program has."""
    group = typer.main.get_command(app)
    known = set(getattr(group, "commands", ()))
    shown = {match for line in shell_lines() for match in re.findall(r"(?:^|[\s/])afd-shim ([a-z][\w-]*)", line)}

    assert shown
    assert shown <= known


def test_every_make_target_exists() -> None:
    """A target that a document shows is one that the Makefile has."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    shown = {match for line in shell_lines() for match in re.findall(r"^make ([a-z][\w-]*)", line)}

    assert shown
    assert shown <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    """A reader who follows a link finds a file."""
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))

    missing = [link for link in links if not (document.parent / link).exists()]

    assert missing == []

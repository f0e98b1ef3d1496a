"""The README's commands for a machine without a GPU, typed as they stand."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from afd_shim.testing.servers import Server, core_of_rank, free_port, launch

pytestmark = [pytest.mark.newest_release, pytest.mark.timeout(900)]

README = Path(__file__).parents[2] / "README.md"
MODEL = "/tmp/tiny-moe"  # noqa: S108 - what the README calls it; replaced below


def commands(replacements: dict[str, str]) -> list[str]:
    """The commands of the CPU example, in order, with names of this test's own in place of the README's."""
    text = README.read_text(encoding="utf-8")
    block = re.search(r"<!-- example: cpu -->\n```bash\n(.*?)```", text, re.DOTALL)
    assert block is not None
    example = block.group(1)
    for old, new in replacements.items():
        assert old in example
        example = example.replace(old, new)
    return example.strip().split("\n\n")


def ask(command: str) -> str:
    """Run a `curl` and return the generated text."""
    answer = subprocess.run(["bash", "-c", f"{command} --silent --fail-with-body"], capture_output=True, check=True)
    text: str = json.loads(answer.stdout)["choices"][0]["text"]
    return text


def test_the_readmes_two_terminals_serve_what_one_server_serves(tmp_path: Path) -> None:
    """Copied into two terminals, the commands give the text that the same server gives without `afd`."""
    ports = {role: str(free_port()) for role in ("attention", "ffn", "exchange", "unsplit")}
    replacements = {
        MODEL: str(tmp_path / "model"),
        "6239": ports["exchange"],
        "8001": ports["ffn"],
        "8000": ports["attention"],
        "python -m": f"{shlex.quote(sys.executable)} -m",
        # A runner may be confined to other cores than 0 and 1.
        "THREADS_BIND=1": f"THREADS_BIND={core_of_rank(1)}",
        "THREADS_BIND=0": f"THREADS_BIND={core_of_rank(0)}",
    }
    write, ffn_command, attention_command, curl = commands(replacements)
    unsplit_command = re.sub(r" --additional-config '.*'", "", attention_command, flags=re.DOTALL)
    subprocess.run(["bash", "-c", write], check=True)

    def start(name: str, command: str) -> Server:
        model = str(tmp_path / "model")
        port = int(ports[name])
        return launch(name, ["bash", "-c", f"exec env {command}"], port=port, model=model, log_dir=tmp_path, env={})

    with start("ffn", ffn_command) as ffn, start("attention", attention_command) as attention:
        ffn.wait_ready()
        attention.wait_ready()
        split_text = ask(curl)
    unsplit_command = unsplit_command.replace(ports["attention"], ports["unsplit"])
    with start("unsplit", unsplit_command) as unsplit:
        unsplit.wait_ready()
        unsplit_text = ask(curl.replace(ports["attention"], ports["unsplit"]))

    assert split_text == unsplit_text
    assert split_text

"""A process that loads a role never holds much more than the role owns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from afd_shim.testing.checkpoints import Checkpoint, Role

MEMORY = """
import gc
import sys
from pathlib import Path

from afd_shim.testing.local_roles import engine_config, inspect_here, load_role, local_world, patched_vllm


def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


path, role = Path(sys.argv[1]), sys.argv[2]
inspect_here("DeepseekV2ForCausalLM")
with local_world(), patched_vllm():
    engine_config(path)  # imports what reading a configuration needs
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak that imports left
    before = status("VmRSS:")
    loaded = load_role(path, {"role": role})
    print(status("VmHWM:") - before)
"""


@pytest.mark.newest_release  # what is read and held is checked on every release, above
@pytest.mark.parametrize("role_name", ["attention", "ffn"])
def test_peak_memory_while_loading_is_what_the_role_owns(
    role_name: Role, checkpoint: Callable[..., Checkpoint]
) -> None:
    """A process of its own loads 200 MB of a 400 MB checkpoint and never holds much more."""
    made = checkpoint("deepseek-v2", size="large")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    child = subprocess.run(
        [sys.executable, "-c", MEMORY, str(made.path), role_name],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
    )

    grown = int(child.stdout.split()[-1])

    assert grown <= 1.2 * made.owned_bytes(role_name)

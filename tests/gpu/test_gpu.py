"""The GPU runs as tests: each is a script of this folder, which says more when run by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]

one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; this machine has none")
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs two CUDA GPUs, one for each role under NCCL; this machine has {torch.cuda.device_count()}",
)


def run(module: str, sections: str, out: Path) -> None:
    """Run some sections of a script; its whole record is the message where one does not hold."""
    command = [sys.executable, "-m", f"tests.gpu.{module}", "--out", str(out), "--sections", sections]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    assert status == 0, "\n".join(path.read_text() for path in out.glob("*.md"))


@one_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sections", ["layers", "nccl,record", "engines,memory", "exchange", "loss"])
def test_one_gpu(sections: str, tmp_path: Path) -> None:
    """Split layers and engines equal native ones, NCCL refuses a shared GPU, losses are named."""
    run("run_one_gpu", sections, tmp_path)


@two_gpus
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sections", ["peers", "exchange", "engines", "loss", "eplb"])
def test_two_gpus(sections: str, tmp_path: Path) -> None:
    """The same over NCCL, twenty times over, and expert load balancing over two FFN ranks."""
    run("run_two_gpus", sections, tmp_path)

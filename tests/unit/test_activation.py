"""Two stages in a half-supported world: stub vLLM trees stand in for releases that cannot be installed here."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from afd_shim import activation, plugin, selection
from afd_shim.compat import Matrix, Row
from afd_shim.engine import Outcome
from afd_shim.errors import (
    ConfigError,
    ConflictError,
    DriftError,
    PatchFailedError,
    UnsupportedVersionError,
    UntestedVersionError,
    UpstreamNotFoundError,
)


def config(world: Any, **additional: Any) -> Any:
    """Do what `vllm serve` does with the configuration."""
    return world.module("engine.arg_utils").EngineArgs(additional).create_engine_config()


def test_supported_release_installs_one_wrapper_and_nothing_else(world: Any) -> None:
    """Without `afd` the wrapper on the configuration is the only symbol that differs, and it passes through."""
    world.install("0.32.0")
    arg_utils, layer = world.module("engine.arg_utils"), world.module("layer")
    before = vars(layer).copy()

    plugin.register()

    assert vars(arg_utils.EngineArgs)["create_engine_config"].__wrapped__.__code__.co_filename == arg_utils.__file__
    assert vars(layer) == before
    assert config(world).additional_config == {}
    assert [(report.set_name, [patch.outcome.value for patch in report.patches]) for report in activation.report()] == [
        ("always", ["applied"]),
        ("attention_worker", ["inert"]),
    ]


def test_plugin_in_a_process_that_has_not_imported_the_target(world: Any) -> None:
    """EngineCore and workers call the plugin before `arg_utils`: the wrapper waits for its import."""
    world.install("0.32.0")

    plugin.register()

    assert "vllm" not in sys.modules
    assert activation.report()[0].patches[0].outcome is Outcome.PENDING
    config(world)
    activation.require("always")


def test_commit_is_two_stage_and_idempotent(world: Any) -> None:
    """A committed set is in force everywhere it was imported; `always` needs no commit of its own."""
    world.install("0.32.0")
    model = world.module("model")
    activation.arm()

    first = activation.commit("attention_worker")
    assert activation.commit("attention_worker") == first

    assert model.factory(8, 2) == ("ours", (8, 2))
    assert activation.require("attention_worker") == first
    assert [patch.outcome.value for patch in first.patches] == ["applied"]


def test_barrier_before_the_commit(world: Any) -> None:
    """The barrier raises for a set that nobody committed."""
    world.install("0.32.0")
    activation.arm()

    with pytest.raises(PatchFailedError, match="'moe_factory' of set 'attention_worker' is inert, not applied"):
        activation.require("attention_worker")


def test_digest_is_checked_at_the_barrier(world: Any) -> None:
    """A worker that stands on another selection than the configuration's process does not pass."""
    world.install("0.32.0+cu129")
    digest = activation.digest()
    activation.commit("attention_worker")

    activation.require("attention_worker", selected=digest)
    with pytest.raises(ConflictError, match=r"selected 0123456789ab\. Install the same vLLM"):
        activation.require("attention_worker", selected="0123456789ab")


def test_digest_is_equal_for_the_builds_of_a_release_and_differs_between_releases(world: Any) -> None:
    """CPU and CUDA builds of one release may meet; two releases may not."""
    digests = {}
    for version in ("0.32.0", "0.32.0+cu129", "0.31.0"):
        world.install(version)
        digests[version] = activation.digest()
        activation.deactivate()
        world.uninstall()

    assert digests["0.32.0"] == digests["0.32.0+cu129"] != digests["0.31.0"]


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ("num_experts, top_k):", "num_experts, top_k, extra=None):", "its parameters changed: added extra="),
        ("num_experts, top_k):", "top_k, num_experts):", "its parameters changed: reordered to (top_k, num_experts)"),
        ("return (num_experts, top_k)", "return None", "its body changed"),
        ("def factory", "def new_factory", "it is gone (expected a function; similar: new_factory)"),
        ("def factory(num_experts, top_k)", "class factory", "it is a class now (expected a function)"),
    ],
)
def test_edited_tree_is_drifted(world: Any, before: str, after: str, difference: str) -> None:
    """An edited 0.32.0 refuses AFD naming the symbol and the difference, patches nothing, and serves vanilla."""
    world.install("0.32.0", layer=world.layer.replace(before, after))
    activation.arm()

    for ask in (activation.require_supported, lambda: activation.commit("attention_worker")):
        with pytest.raises(DriftError, match="Nothing was patched") as caught:
            ask()

    error = caught.value
    assert (error.symbol, error.difference) == ("vllm.layer:factory", difference)
    assert error.report is not None
    assert error.report.patches[-1].outcome is Outcome.DRIFTED
    assert config(world).additional_config == {}
    assert "vllm.layer" not in sys.modules


def test_edited_comment_is_no_drift(world: Any) -> None:
    """A file that differs from the wheel's but not in what runs is accepted."""
    world.install("0.32.0", layer="# Vendored.\n" + world.layer.replace("return", "# Returns.\n    return"))

    activation.commit("attention_worker")

    assert world.module("model").factory(8, 2) == ("ours", (8, 2))


def test_older_release_gets_the_guard_only(world: Any) -> None:
    """On a 0.29 the guard is all there is: vanilla passes, AFD ends at once with the versions and the remedy."""
    world.install("0.29.0", layer=world.layer.replace("num_experts", "experts"))
    layer = world.module("layer")
    before = vars(layer).copy()
    plugin.register()

    assert config(world).additional_config == {}
    assert [report.set_name for report in activation.report()] == ["guard"]
    with pytest.raises(UnsupportedVersionError) as caught:
        config(world, afd={"role": "attention"})

    assert str(caught.value) == (
        "AFD was asked for, but afd-shim does not support vLLM 0.29.0 (final); supported: 0.31.0, 0.32.0."
        " Its source is none of theirs, first at vllm.layer:factory: its parameters changed: added experts; removed"
        " num_experts. Install a supported one: pip install 'vllm==0.32.0'."
    )
    assert caught.value.report is not None
    assert [patch.outcome.value for patch in caught.value.report.patches] == ["unsupported", "drifted"]
    assert vars(layer) == before


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0rc1", "0.32.1.dev3+g12ab", "0.32.0.post1", "dev"])
def test_untested_release_needs_the_flag(world: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A release without a row whose source matches one is refused by name, and runs with the flag."""
    world.install(version)
    plugin.register()
    with pytest.raises(UntestedVersionError, match="AFD_SHIM_ALLOW_UNTESTED=1") as caught:
        config(world, afd={"role": "attention"})
    assert caught.value.report is not None
    assert {patch.outcome.value for patch in caught.value.report.patches} == {"untested"}
    with pytest.raises(UntestedVersionError):
        activation.commit("attention_worker")
    activation.deactivate()

    monkeypatch.setenv(selection.ALLOW_UNTESTED, "1")
    report = activation.commit("attention_worker")

    assert report.row == "0.32.0"
    assert report.release.endswith("untested, source as in 0.32.0")
    assert world.module("model").factory(8, 2) == ("ours", (8, 2))


def test_flag_does_not_accept_other_source(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag accepts an unknown number, never unknown source."""
    world.install("0.33.0", layer=world.layer.replace("return (", "return [(").replace("top_k)\n", "top_k)]\n"))
    monkeypatch.setenv(selection.ALLOW_UNTESTED, "1")
    plugin.register()

    with pytest.raises(UnsupportedVersionError, match=r"first at vllm\.layer:factory: its body changed"):
        config(world, afd={"role": "attention"})


def test_older_row_that_matches_is_found(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest row that matches wholly is taken, not only the nearest one."""
    world.install("0.33.0")
    matrix = Matrix.load()
    row = matrix.rows["0.32.0"]
    other = {symbol: type(print_)(print_.kind, "changed") for symbol, print_ in row.fingerprints.items()}
    changed = Row("0.32.0", row.requires_python, row.lanes, row.sets, {}, other)
    matrix.with_row(changed).save()
    monkeypatch.setenv(selection.ALLOW_UNTESTED, "1")

    assert activation.commit("attention_worker").row == "0.31.0"


def test_absent_vllm(world: Any) -> None:
    """Without a vLLM the plugin is harmless and a request for AFD says what is missing."""
    plugin.register()

    with pytest.raises(UpstreamNotFoundError, match="vLLM is absent: no vllm on the import path"):
        activation.commit("attention_worker")


def test_configuration_factory_gone(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the configuration cannot be seen, vanilla is served with a warning and AFD on the command line refused."""
    world.install("0.40.0", arg_utils=world.arg_utils.replace("create_engine_config", "make_config"))
    world.module("engine.arg_utils")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    plugin.register()

    assert "cannot see the configuration" in caplog.text
    monkeypatch.setattr(sys, "argv", ["vllm", "--additional-config", '{"afd": {"role": "ffn"}}'])
    with pytest.raises(PatchFailedError, match=r"has no 'EngineArgs\.create_engine_config'"):
        plugin.register()


def test_foreign_wrapper_on_the_configuration(world: Any) -> None:
    """Another plugin's wrapper on the configuration stays below ours."""
    world.install("0.32.0")
    engine_args = world.module("engine.arg_utils").EngineArgs
    original = engine_args.create_engine_config

    def theirs(self: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        return ("theirs", original(self, *args, **kwargs))

    engine_args.create_engine_config = theirs

    plugin.register()

    report = activation.require("always")
    assert "on top of" in report.patches[0].reason
    activation.deactivate()
    assert engine_args.create_engine_config is theirs


def test_deactivate_and_again(world: Any) -> None:
    """Everything comes off, and the next call starts afresh."""
    world.install("0.32.0")
    model = world.module("model")
    original = model.factory
    for _ in range(2):
        activation.arm()
        activation.commit("attention_worker")
        assert model.factory is not original

        assert {report.outcome for report in activation.deactivate()} == {Outcome.ROLLED_BACK}
        assert model.factory is original


def test_unknown_name_in_a_setting(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that names no patch is an error when AFD is asked for, and none before."""
    world.install("0.32.0")
    monkeypatch.setenv(selection.SKIP, "moe_factory,no_such")
    activation.arm()

    with pytest.raises(ConfigError, match="unknown patches: no_such"):
        activation.commit("attention_worker")
    monkeypatch.setenv(selection.SKIP, "moe_factory")
    with pytest.raises(ConflictError, match="stands or falls as a whole"):
        activation.commit("attention_worker")


def test_one_line_in_the_log(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A commit logs one line at INFO, a second commit and the plugin none, and nobody prints."""
    world.install("0.32.0")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)

    plugin.register()
    report = activation.commit("attention_worker")
    activation.commit("attention_worker")

    assert caplog.messages == [f"afd-shim: {report.summary()}"]
    assert capsys.readouterr() == ("", "")

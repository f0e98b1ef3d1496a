"""The compat matrix is whole: what the patches declare is what it has on record, for every release."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path

import pytest

import afd_shim.patches
from afd_shim.compat import Matrix
from afd_shim.engine import Fingerprint, SourceTree
from afd_shim.engine.plan import differences
from afd_shim.errors import DeclarationError
from afd_shim.selection import GUARD, load_patch, load_set, merged_set

MATRIX = Matrix.load()


@pytest.mark.parametrize("release", MATRIX.releases)
def test_row_has_exactly_the_declared_symbols(release: str) -> None:
    """Every symbol that a patch touches or relies on has a fingerprint, and no fingerprint is left over."""
    row = MATRIX.rows[release]
    declared = {target.symbol: target.kind for patch in merged_set(row, row.sets) for target in patch.targets}

    assert {symbol: fingerprint.kind for symbol, fingerprint in row.fingerprints.items()} == declared, (
        f"run `afd-shim fingerprint --write {release}`"
    )
    assert set(row.files) == {symbol.partition(":")[0] for symbol in declared}


def test_every_patch_module_is_used() -> None:
    """A patch module that no row lists is dead code."""
    modules = {module.name for module in pkgutil.iter_modules(afd_shim.patches.__path__)}

    assert modules == {name for row in MATRIX.rows.values() for name in row.patches} | {GUARD}


@pytest.mark.parametrize("name", sorted({name for row in MATRIX.rows.values() for name in row.patches}))
def test_patch_serves_the_rows_that_list_it(name: str) -> None:
    """A patch claims the releases whose rows list it, and no other."""
    assert sorted(load_patch(name).releases) == sorted(
        row.release for row in MATRIX.rows.values() if name in row.patches
    )


def test_rows_have_the_sets_that_the_code_asks_for() -> None:
    """Every row knows every set by name."""
    for row in MATRIX.rows.values():
        assert set(row.sets) == {
            "always",
            "attention_worker",
            "ffn_worker",
            "ffn_frontend",
            "ffn_cpu_expert_parallel",
            "ffn_cpu_eplb",
        }


def test_file_is_as_the_writer_writes_it(tmp_path: Path) -> None:
    """Loading and saving changes nothing, so that a review shows what changed and nothing else."""
    MATRIX.save(tmp_path / "matrix.json")

    assert (tmp_path / "matrix.json").read_text(encoding="utf-8") == (
        Path(afd_shim.patches.__path__[0]).parent / "compat" / "matrix.json"
    ).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("release", "nearest"),
    [
        ("0.29.0", "0.30.0"),
        ("0.31.0", "0.31.0"),
        ("0.31.2", "0.31.0"),
        ("9.0.0", MATRIX.releases[-1]),
        (None, MATRIX.releases[-1]),
    ],
)
def test_nearest_row(release: str | None, nearest: str) -> None:
    """An unknown release is compared with the newest row that is not newer, else with the oldest."""
    found = MATRIX.nearest(release)

    assert found is not None
    assert found.release == nearest


def test_row_that_lists_an_unproven_patch() -> None:
    """A row may only list patches that claim its release."""
    row = replace(MATRIX.rows["0.32.0"], release="0.34.0")

    with pytest.raises(DeclarationError, match=r"lists patch 'engine_config', which serves .* only"):
        load_set(row, "always")


def test_row_that_lists_an_unknown_patch() -> None:
    """A row may only list patches that exist."""
    row = replace(MATRIX.rows["0.32.0"], sets={"always": ("no_such",)})

    with pytest.raises(DeclarationError, match="no patch 'no_such'"):
        load_set(row, "always")


def test_missing_and_contradicting_fingerprints(tmp_path: Path) -> None:
    """A symbol without a fingerprint names the command that records it; a wrong kind is a defect too."""
    row = MATRIX.rows["0.32.0"]
    patches = load_set(row, "always")
    symbol = patches.patches[0].target.symbol

    with pytest.raises(DeclarationError, match="fingerprint --write"):
        differences(patches, SourceTree(tmp_path), {}, {})
    with pytest.raises(DeclarationError, match="on record it is a class"):
        differences(patches, SourceTree(tmp_path), {symbol: Fingerprint("class")}, {})


def test_other_layout_of_the_file(tmp_path: Path) -> None:
    """A data file of another format is refused."""
    (tmp_path / "matrix.json").write_text('{"format": 2, "rows": {}}', encoding="utf-8")

    with pytest.raises(DeclarationError, match="has format 2"):
        Matrix.load(tmp_path / "matrix.json")


def test_patch_modules_import_neither_vllm_nor_torch() -> None:
    """Planning loads patch modules, so they import nothing heavy at their top."""
    for name in (*MATRIX.rows["0.32.0"].patches, GUARD):
        source = Path(importlib.import_module(f"afd_shim.patches.{name}").__file__ or "").read_text(encoding="utf-8")
        top = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
        assert not [line for line in top if "vllm" in line or "torch" in line]

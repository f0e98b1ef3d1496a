"""The static proof: compares every symbol a set touches with what it must be, importing nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from afd_shim.engine.fingerprint import Fingerprint, SourceTree
from afd_shim.engine.patch import Patch
from afd_shim.engine.target import Target
from afd_shim.errors import DeclarationError

__all__ = ["Difference", "differences"]


class Difference(NamedTuple):
    """One symbol that is not what the matrix expects."""

    patch: str
    symbol: str
    #: A clause about the symbol: "it is gone ...", "its parameters changed: added x".
    what: str


def differences(
    patches: Iterable[Patch],
    tree: SourceTree,
    expected: Mapping[str, Fingerprint],
    files: Mapping[str, str],
) -> tuple[Difference, ...]:
    """Compare the targets of the patches, and what they rely on, with the expected fingerprints.

    Args:
        patches: the patches.
        tree: the source to look at.
        expected: fingerprint per symbol.
        files: hash per module of the whole file those fingerprints were read from. A file with that
            hash is not parsed.

    Raises:
        DeclarationError: a symbol has no expected fingerprint, or its declared kind is another one.
    """
    found = []
    for patch in patches:
        for target in patch.targets:
            wanted = _expected(patch, target, expected)
            if tree.file_hash(target.module) == files.get(target.module):
                continue
            what = wanted.difference(tree.fingerprint(target))
            if what:
                found.append(Difference(patch.name, target.symbol, what))
    return tuple(found)


def _expected(patch: Patch, target: Target, expected: Mapping[str, Fingerprint]) -> Fingerprint:
    wanted = expected.get(target.symbol)
    if wanted is None:
        raise DeclarationError(
            f"Patch {patch.name!r}: no fingerprint of {target} is on record. Record it"
            " (`afd-shim fingerprint --write RELEASE`)."
        )
    if wanted.kind != target.kind:
        raise DeclarationError(
            f"Patch {patch.name!r} declares {target} as a {target.kind}; on record it is a {wanted.kind}. Correct one."
        )
    return wanted

"""The error tree: complete, drawn as it is, and fit to cross process boundaries."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from afd_shim import errors
from afd_shim.errors import AfdShimError

CLASSES = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)
}


def test_public_names_are_complete_and_sorted() -> None:
    """What is raised can be imported by name, and found in order."""
    assert errors.__all__ == sorted(errors.__all__)
    assert set(errors.__all__) == set(CLASSES)


def test_the_tree_is_drawn_as_it_is() -> None:
    """Names, order of descent and foreign bases at the top of the file are those of the classes."""
    drawing = inspect.getdoc(errors)
    assert drawing is not None
    parents: list[tuple[int, str]] = []
    drawn: dict[str, tuple[str, ...]] = {}
    for line in drawing.splitlines():
        match = re.match(r"^( *[|`]?[ |`-]*)([A-Z]\w+(?:Error|Exception))(?: \((\w+)\))?(?: |$)", line)
        if match is None:
            continue
        depth, name, foreign = len(match[1]), match[2], match[3]
        parents = [parent for parent in parents if parent[0] < depth]
        drawn[name] = tuple(base for base in (parents[-1][1] if parents else "Exception", foreign) if base)
        parents.append((depth, name))

    assert drawn == {name: tuple(base.__name__ for base in value.__bases__) for name, value in CLASSES.items()}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_survives_pickle(name: str) -> None:
    """EngineCore hands a worker's error up by pickle."""
    error = CLASSES[name]("what is at fault; what to do about it.")

    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes

    assert type(again) is CLASSES[name]
    assert str(again) == "what is at fault; what to do about it."
    assert isinstance(again, AfdShimError)


def test_what_an_error_carries_survives_pickle() -> None:
    """Key, symbol and peer are for programs: they must not be lost on the way."""
    config = pickle.loads(pickle.dumps(errors.UnsupportedModelError("m", key="model")))  # noqa: S301 - our own bytes
    drift = pickle.loads(pickle.dumps(errors.DriftError("m", symbol="a:B", difference="signature")))  # noqa: S301 - our own bytes
    lost = pickle.loads(pickle.dumps(errors.PeerLostError("m", peer="FFN rank 0", clean=True)))  # noqa: S301 - our own bytes

    assert (type(config), config.key) == (errors.UnsupportedModelError, "model")
    assert (drift.symbol, drift.difference) == ("a:B", "signature")
    assert (lost.peer, lost.clean) == ("FFN rank 0", True)

"""Builders and patches for the tests, at module level as the engine demands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from afd_shim.engine import Patch, Target

CALLS: list[str] = []

LAYER = "upstream.layer"


def noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function by one that notes its name and calls it."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        CALLS.append(original.__name__)
        return original(*args, **kwargs)

    return replacement


def skipping(original: Callable[..., bool]) -> Callable[..., bool]:
    """Skip names with an x."""

    @functools.wraps(original)
    def replacement(name: str) -> bool:
        return "x" in name or original(name)

    return replacement


def wrapper(original: object) -> Callable[..., Any]:
    """Give a wrapt wrapper that notes."""
    return wrap


def wrap(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    CALLS.append("wrapped")
    return wrapped(*args, **kwargs)


def refusing(original: object) -> object:
    """Refuse to build."""
    raise RuntimeError("not today")


def patch(name: str = "factory", target: Target | None = None, **changes: Any) -> Patch:
    """Make a patch with everything filled in."""
    fields: dict[str, Any] = {
        "name": name,
        "target": target or Target(f"{LAYER}:factory", kind="function"),
        "strategy": "replace",
        "build": noted,
        "why": "a test",
        "upstream": "upstream/layer.py, factory, 1.0",
        "releases": ("1.0",),
        "until": "the test ends",
    }
    return Patch(**{**fields, **changes})


def forward(**changes: Any) -> Patch:
    """Patch a method."""
    return patch("forward", Target(f"{LAYER}:Runner.forward", kind="method"), **changes)


def skip(**changes: Any) -> Patch:
    """Patch a seam."""
    return patch("skip", Target(f"{LAYER}:skip", kind="function"), **{"strategy": "seam", "build": skipping, **changes})

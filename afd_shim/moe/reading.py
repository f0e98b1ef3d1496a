"""How a role reads the tensors it owns: one at a time, not through a mapping of the whole file."""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import safetensors
from vllm.model_executor.model_loader import weight_utils

__all__ = ["tensor_by_tensor"]

# glibc's `mallopt`: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, and how far it raises the second by itself.
_TRIM, _MMAP = -1, -3
_HIGHEST_MMAP: Final = 32 << 20

_COPY: Final = 64 << 10
"""Bytes of a copied tensor from which on its memory goes back to the kernel when it is freed."""


@contextmanager
def tensor_by_tensor() -> Iterator[None]:
    """Let vLLM's safetensors reader copy each tensor it is asked for, while a model loads.

    Its default maps the file, and every page read stays resident until the file is closed: a process
    would hold what it owns twice. Releases of safetensors before 0.8 know no other way; there the
    pages stay, and the kernel takes them back when memory is short.

    Upstream: `vllm/model_executor/model_loader/weight_utils.py`, `safetensors_weights_iterator`,
    which calls `safe_open(file, framework="pt")` (0.30.0-0.33.0).
    """
    if "backend" not in inspect.signature(safetensors.safe_open).parameters:
        yield
        return
    with _no_hoarding(), _copying():
        yield


@contextmanager
def _copying() -> Iterator[None]:
    real = weight_utils.safe_open

    def read_copies(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - safetensors ships no types
        return real(*args, **kwargs, backend="pread")

    # setattr: to mypy a name imported as a class cannot be assigned.
    setattr(weight_utils, "safe_open", read_copies)  # noqa: B010
    try:
        yield
    finally:
        setattr(weight_utils, "safe_open", real)  # noqa: B010 - as above


@contextmanager
def _no_hoarding() -> Iterator[None]:
    """Let freed copies leave the process, which glibc keeps for later and cuts into pieces: up to 15 % of a role.

    glibc raises its own threshold at the first large free. Afterwards it is where it would have gone. Where the user
    has set it, or another allocator is loaded, nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "MALLOC_MMAP_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        yield
        return
    mallopt(_MMAP, _COPY)
    try:
        yield
    finally:
        mallopt(_MMAP, _HIGHEST_MMAP)
        mallopt(_TRIM, 2 * _HIGHEST_MMAP)

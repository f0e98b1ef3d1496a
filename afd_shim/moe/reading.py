"""How a role reads the tensors it owns: one at a time, not through a mapping of the whole file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import safetensors
from vllm.model_executor.model_loader import weight_utils

__all__ = ["tensor_by_tensor"]


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
    real = weight_utils.safe_open

    def read_copies(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - safetensors ships no types
        return real(*args, **kwargs, backend="pread")

    # setattr: to mypy a name imported as a class cannot be assigned.
    setattr(weight_utils, "safe_open", read_copies)  # noqa: B010
    try:
        yield
    finally:
        setattr(weight_utils, "safe_open", real)  # noqa: B010 - as above

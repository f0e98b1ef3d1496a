"""What a process reads of a checkpoint and holds of it, counted from outside the product."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from vllm.model_executor.model_loader import weight_utils

__all__ = ["Live", "counted_reads", "live_parameters"]


class CountedFile:
    """A safetensors file that counts what is read from it."""

    def __init__(self, file: object, read: dict[str, int]) -> None:
        self._file: Any = file
        self._read = read

    def __enter__(self) -> CountedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> object:
        value: object = getattr(self._file, name)
        return value

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read one tensor, and count its bytes."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        self._read[name] = self._read.get(name, 0) + tensor.nbytes
        return tensor


@contextmanager
def counted_reads() -> Iterator[dict[str, int]]:
    """Bytes read from safetensors files meanwhile, by tensor."""
    counted: dict[str, int] = {}
    stock = weight_utils.safe_open

    def safe_open(*args: Any, **kwargs: Any) -> CountedFile:  # noqa: ANN401 - passed on
        return CountedFile(stock(*args, **kwargs), counted)

    with mock.patch.object(weight_utils, "safe_open", safe_open):
        yield counted


@dataclass(slots=True)
class Live:
    """The Parameters that came to life in this process since this was made."""

    before: list[nn.Parameter]

    def bytes(self) -> int:
        """Bytes of their memory, each storage once."""
        known = {id(parameter) for parameter in self.before}
        storages = {
            parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
            for parameter in live_parameters()
            if id(parameter) not in known
        }
        return sum(storages.values())


def live_parameters() -> list[nn.Parameter]:
    """Every Parameter of this process that has memory, whoever holds it."""
    gc.collect()
    # Tensors first: asking for a Parameter runs Python code for every object of the process.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.device.type != "meta"]

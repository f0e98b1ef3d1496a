"""Tensors as bytes that a socket reads and fills: in place on CPU, through pinned ones on CUDA."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, cast

import torch

_PYBUF_READ: Final = 0x100
_PYBUF_WRITE: Final = 0x200
# CPython's stable API. Unlike numpy it knows no dtype, so that bfloat16 needs no detour.
_from_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_NOTHING: Final = memoryview(bytearray())


def readable_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; keep the tensor alive as long as the view."""
    size = tensor.nbytes
    return cast("memoryview", _from_memory(tensor.data_ptr(), size, _PYBUF_READ)) if size else _NOTHING


def writable_bytes(tensor: torch.Tensor) -> memoryview:
    """As `readable_bytes`, to be filled."""
    size = tensor.nbytes
    return cast("memoryview", _from_memory(tensor.data_ptr(), size, _PYBUF_WRITE)) if size else _NOTHING


class Staging(ABC):
    """The host memory that tensors of one device are sent from and received into."""

    @abstractmethod
    def outgoing(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """The bytes of contiguous `tensors`, complete; valid until the next call."""

    @abstractmethod
    def incoming(self, tensor: torch.Tensor) -> memoryview:
        """Where to receive the bytes of contiguous `tensor`; `landed` follows."""

    @abstractmethod
    def landed(self, tensor: torch.Tensor) -> None:
        """The bytes for `tensor` have arrived in what `incoming` returned."""


class InPlace(Staging):
    """CPU: the tensors' own memory, without a copy."""

    def outgoing(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """Their own bytes."""
        return [readable_bytes(tensor) for tensor in tensors]

    def incoming(self, tensor: torch.Tensor) -> memoryview:
        """Its own bytes."""
        return writable_bytes(tensor)

    def landed(self, tensor: torch.Tensor) -> None:
        """Nothing to do: they are there already."""


class Pinned(Staging):
    """CUDA: copies on the current stream, through page-locked buffers of a fixed size.

    Only the copies are waited for, by an event; nothing synchronizes the device.
    """

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        self._device = device
        self._out = torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=True)
        self._in = torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=True)
        self._out_view = writable_bytes(self._out)
        self._in_view = writable_bytes(self._in)
        # torch leaves the constructor of Event untyped.
        self._copied_out = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied_in = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def outgoing(self, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        """Copy them to the host and wait for these copies."""
        views = []
        end = 0
        for tensor in tensors:
            start, end = end, end + tensor.nbytes
            if tensor.nbytes:
                host = self._out[start:end].view(tensor.dtype).view(tensor.shape)
                host.copy_(tensor, non_blocking=True)
            views.append(self._out_view[start:end])
            end += -end % 16  # the next dtype must be aligned
        self._copied_out.record(torch.cuda.current_stream(self._device))
        self._copied_out.synchronize()
        return views

    def incoming(self, tensor: torch.Tensor) -> memoryview:
        """The host buffer, once the previous copy out of it is over."""
        # The previous copy may still read the buffer that the socket is about to fill.
        self._copied_in.synchronize()
        return self._in_view[: tensor.nbytes]

    def landed(self, tensor: torch.Tensor) -> None:
        """Copy from the host buffer, on the current stream."""
        if tensor.nbytes:
            host = self._in[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.copy_(host, non_blocking=True)
            self._copied_in.record(torch.cuda.current_stream(self._device))


def staging_for(device: torch.device, capacity_bytes: int) -> Staging:
    """The staging of `device`, for up to `capacity_bytes` in each direction at a time."""
    return Pinned(device, capacity_bytes) if device.type == "cuda" else InPlace()

"""Named random tensors and a safetensors writer that needs neither torch nor safetensors.

Every tensor is drawn from a generator seeded by the checkpoint's seed and the tensor's name, so a
checkpoint is the same whatever the order, and a tensor the same in every size-compatible checkpoint.
The file format is the one of `safetensors` (8-byte header length, JSON header, data).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["DTYPE_BYTES", "Dtype", "Owner", "TensorSpec", "write_safetensors"]

Dtype = Literal["bfloat16", "float32"]
Owner = Literal["attention", "ffn", "gate", "shared_experts"]
"""Who reads a tensor.

`gate` is a gate the MoE runner owns: FFN, or Attention with `compute_gate_on_attention`; shared experts
are the FFN's, or Attention's with `shared_experts_on_attention`.
"""

DTYPE_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float32": 4}
_SAFETENSORS_DTYPE: dict[Dtype, str] = {"bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint: values are `mean + std * normal`."""

    name: str
    shape: tuple[int, ...]
    owner: Owner
    std: float
    mean: float = 0.0
    dtype: Dtype | None = None  # None: the checkpoint's own

    def values(self, seed: int) -> npt.NDArray[np.float32]:
        """The tensor's values, float32, in `shape`."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        normal: npt.NDArray[np.float32] = rng.standard_normal(self.shape, dtype=np.float32)
        normal *= np.float32(self.std)
        normal += np.float32(self.mean)
        return normal

    def nbytes(self, checkpoint_dtype: Dtype) -> int:
        """Bytes of this tensor in a checkpoint of that dtype."""
        count = 1
        for size in self.shape:
            count *= size
        return count * DTYPE_BYTES[self.dtype or checkpoint_dtype]


def write_safetensors(path: Path, specs: Iterable[TensorSpec], *, dtype: Dtype, seed: int) -> None:
    """Write the tensors to one safetensors file, one tensor in memory at a time."""
    specs = tuple(specs)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes(dtype)
        if spec.name in header:
            raise ValueError(f"two tensors are called {spec.name!r}; give each its own name")
        header[spec.name] = {
            "dtype": _SAFETENSORS_DTYPE[spec.dtype or dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format asks for 8-byte alignment
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for spec in specs:
            file.write(_encode(spec.values(seed), spec.dtype or dtype))


def _encode(values: npt.NDArray[np.float32], dtype: Dtype) -> bytes:
    little = values.astype("<f4")
    if dtype == "float32":
        return little.tobytes()
    # numpy has no bfloat16: keep the upper half of each float32, rounded to nearest even.
    bits = little.view("<u4")
    rounded: npt.NDArray[np.uint32] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").tobytes()

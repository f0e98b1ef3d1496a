"""What tests ask of a worker process: counters of their own, and faults to inject.

vLLM mixes the class named by `--worker-extension-cls` into its worker class and makes the methods
callable through `collective_rpc` (`vllm/v1/worker/worker_base.py`, `WorkerWrapperBase.init_worker`,
0.30.0-0.33.0). Nothing here uses afd_shim's own accounting, so it can be held against it.

Importing this module starts the count of what is read from safetensors files: vLLM resolves the
extension before the model loads and gives it no other moment to act.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterator
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.model_loader import weight_utils

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

    Base = WorkerBase
else:
    Base = object

__all__ = ["Inspection", "symbols_of"]

_bytes_read: dict[str, int] = {}  # tensor name -> bytes, over all files of this process


class _CountingFile:
    """A safetensors file handle that counts what `get_tensor` returns."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - safetensors' handle has no public type
        self._handle = handle

    def __enter__(self) -> _CountingFile:
        self._handle.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.__exit__(kind, value, trace)

    def __getattr__(self, name: str) -> object:
        return getattr(self._handle, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle.get_tensor(name)
        _bytes_read[name] = _bytes_read.get(name, 0) + tensor.nbytes
        return tensor


def _count_reads() -> None:
    stock = weight_utils.safe_open

    def safe_open(*args: Any, **kwargs: Any) -> _CountingFile:  # noqa: ANN401 - passed on as it is
        return _CountingFile(stock(*args, **kwargs))

    weight_utils.safe_open = safe_open  # type: ignore[assignment,misc]  # a function in a class's place


_count_reads()


def symbols_of(package: str) -> list[str]:
    """Names of everything in vLLM's imported modules and their classes that `package` defines.

    Told by where the code was compiled, because a wrapper may claim the name and module of what it wraps.
    What this module itself put there is left out.
    """
    found = []
    for name, module in sorted(sys.modules.items()):
        if name != "vllm" and not name.startswith("vllm."):
            continue
        for attribute, value in list(vars(module).items()):
            if _is_of(value, package):
                found.append(f"{name}:{attribute}")
            elif isinstance(value, type) and value.__module__ == name:
                members = list(vars(value).items())
                found += [f"{name}:{attribute}.{member}" for member, item in members if _is_of(item, package)]
    return found


def _is_of(value: object, package: str) -> bool:
    # By exact type: asking an arbitrary object for an attribute may import or compute something.
    if type(value).__module__.split(".")[0] == "wrapt":
        value = value._self_wrapper  # type: ignore[attr-defined]  # noqa: SLF001 - how wrapt names it
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if isinstance(value, type):
        return value.__module__.split(".")[0] == package
    if not isinstance(value, FunctionType):
        return False
    return f"/{package}/" in value.__code__.co_filename and value.__code__.co_filename != __file__


class Inspection(Base):
    """Methods for `collective_rpc`; every one returns a JSON-able dictionary."""

    def inspect_reads(self) -> dict[str, object]:
        """Bytes and names that vLLM's safetensors reader has returned in this process."""
        return {"bytes": sum(_bytes_read.values()), "names": sorted(_bytes_read)}

    def inspect_memory(self) -> dict[str, object]:
        """Peak resident bytes, and the bytes of every Parameter alive in this process."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            if isinstance(tensor, torch.nn.Parameter) and tensor.device.type != "meta"
        }
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_bytes": peak_kib * 1024, "parameter_bytes": sum(storages.values())}

    def inspect_symbols(self, package: str) -> dict[str, object]:
        """What `package` defines inside vLLM, in this process; see `symbols_of`."""
        return {"symbols": symbols_of(package)}

    def zero_expert(self, expert: int) -> dict[str, object]:
        """Zero the weights of one expert in every MoE layer this process holds experts of."""
        zeroed = 0
        for runner in self._moe_runners():
            for parameter in runner.routed_experts.parameters():
                if parameter.shape[:1] == (runner.moe_config.num_local_experts,):
                    parameter.data[expert].zero_()
                    zeroed += 1
        return {"zeroed": zeroed}

    def _moe_runners(self) -> Iterator[MoERunner]:
        assert self.model_runner is not None  # asked after start-up
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[operator]  # typed as any Module
        return (module for module in model.modules() if isinstance(module, MoERunner))

"""Which checkpoint names a role reads, learned from the model's own `load_weights`.

Names say nothing reliable: GraniteMoE ships fused tensors under other names, a vision tower has
`layers.N` too, prefixes are renamed by nested mappers. So the whole model is built once on the meta
device, untouched, and its own `load_weights` runs over the checkpoint's headers. What parameter each
name reached tells its owner. Nothing is allocated and no tensor is read meanwhile.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader import get_model_loader, weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import utils as model_utils
from vllm.utils.torch_utils import set_default_torch_dtype

from afd_shim.errors import UnsupportedModelError
from afd_shim.moe.factory import require_layers
from afd_shim.moe.layers import ffn_storages, storage_key
from afd_shim.role import Building, RoleContext

if TYPE_CHECKING:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

__all__ = ["CheckpointPlan", "plan_checkpoint"]

logger = init_logger("vllm.afd_shim")  # vLLM shows its own loggers alone

# Element types as safetensors spells them in a file's header.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(slots=True)
class CheckpointPlan:
    """What one role reads of a checkpoint.

    Attributes:
        owned: the names this role reads.
        bytes_owned: their bytes.
        bytes_total: bytes of every name in the checkpoint.
        bytes_read: bytes this process has read so far.
        selective: False where nothing is read at all (`--load-format dummy`).

    """

    owned: frozenset[str] = frozenset()
    bytes_owned: int = 0
    bytes_total: int = 0
    bytes_read: int = 0
    selective: bool = True
    sizes: dict[str, int] = field(default_factory=dict, repr=False)

    def skips(self, name: str) -> bool:
        """Whether a checkpoint name is left on disk; counts what is read."""
        if not self.selective:
            return False
        if name not in self.owned:
            return True
        self.bytes_read += self.sizes[name]
        return False


def plan_checkpoint(vllm_config: VllmConfig, context: RoleContext) -> CheckpointPlan:
    """Find out which checkpoint names this role owns.

    Args:
        vllm_config: the worker's configuration; copied, not changed.
        context: the role of this process.

    Returns:
        The plan of this role.

    Raises:
        UnsupportedModelError: the model cannot be built on the meta device, its `load_weights` cannot
            be followed, or the checkpoint has no safetensors.
        LayerError: the model has no MoE layer built through vLLM's factory.
        ConfigError: `shared_experts_on_attention` for a model that has none.

    Upstream: `DefaultModelLoader.load_weights` and `weight_utils.safetensors_weights_iterator`
    (0.30.0-0.33.0), run as they are.

    """
    if vllm_config.load_config.load_format == "dummy":
        return CheckpointPlan(selective=False)
    started = time.perf_counter()
    config = copy.deepcopy(vllm_config)
    model_name = config.model_config.model
    loader = get_model_loader(config.load_config)
    if not isinstance(loader, DefaultModelLoader):
        raise UnsupportedModelError(
            f"load format {config.load_config.load_format!r} cannot read selectively; use 'auto' or 'safetensors'.",
            key="load_format",
        )
    try:
        with context.build(Building.SKELETON) as layers, _meta_model(config):
            model = loader.create_model(vllm_config=config, model_config=config.model_config)
        trace = _Trace(model)
        with set_default_torch_dtype(cast("torch.dtype", config.model_config.dtype)), trace.follow():
            _load(loader, model, config)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"cannot follow how {model_name} loads its checkpoint ({type(error).__name__}: {error}); serve it unsplit."
        ) from error
    finally:
        _forget_missing_layers()  # the skeleton's address goes to another model next
    ffn = ffn_storages(require_layers(layers, model_name, context.config))
    if not trace.sizes:
        raise UnsupportedModelError(
            f"{model_name} has no safetensors files, so a role cannot read only what it owns; convert the checkpoint.",
            key="load_format",
        )
    wants_ffn = not context.config.is_attention
    owned = frozenset(
        name for name, storages in trace.reached.items() if any((storage in ffn) == wants_ffn for storage in storages)
    )
    plan = CheckpointPlan(
        owned=owned,
        bytes_owned=sum(trace.sizes[name] for name in owned),
        bytes_total=sum(trace.sizes.values()),
        sizes=trace.sizes,
    )
    logger.info(
        "AFD: %s role owns %d of %d checkpoint tensors (%.1f of %.1f MB), found in %.1f s",
        context.config.role.value,
        len(owned),
        len(trace.sizes),
        plan.bytes_owned / 1e6,
        plan.bytes_total / 1e6,
        time.perf_counter() - started,
    )
    return plan


def _load(loader: BaseModelLoader, model: torch.nn.Module, config: VllmConfig) -> None:
    """Run the loader's own load_weights; only a real load can have loaded everything."""
    assert isinstance(loader, DefaultModelLoader)
    loader.enable_weights_track = False
    loader.load_weights(model, config.model_config)


@contextmanager
def _meta_model(config: VllmConfig) -> Iterator[None]:
    """Build on the meta device without leaving a trace in vLLM's process-wide caches."""
    ropes = rotary_embedding._ROPE_DICT  # noqa: SLF001 - process-wide cache: meta modules must not stay in it
    saved = dict(ropes)
    ropes.clear()
    _forget_missing_layers()
    try:
        with set_default_torch_dtype(cast("torch.dtype", config.model_config.dtype)), torch.device("meta"):
            yield
    finally:
        ropes.clear()
        ropes.update(saved)


def _forget_missing_layers() -> None:
    """Empty vLLM's memo of what is missing in which model: it knows models by `id()`, which freed ones leave behind.

    A pruned model that is gone would lend its missing layers to the next one at its address, whose
    `load_weights` then leaves their names out without a word. What it still needs it computes again.

    Upstream: `get_pp_missing_layer_names` (`vllm/model_executor/models/utils.py`, 0.30.0-0.33.0).
    """
    model_utils._model_to_pp_missing_layer_names.clear()  # noqa: SLF001 - it has no other way to be emptied


class _Trace:
    """Follows which parameters each checkpoint name reaches while `load_weights` runs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.reached: dict[str, set[int]] = {}
        self.sizes: dict[str, int] = {}
        self._name: str | None = None
        self._storages: set[int] = set()
        for tensor in (*model.parameters(), *model.buffers()):
            self._storages.add(storage_key(tensor))
        for parameter in model.parameters():
            # vLLM calls a parameter's own loader where it has one, and always asks for it by this name.
            parameter.weight_loader = _Recorder(self, storage_key(parameter))  # type: ignore[attr-defined]

    def begin(self, name: str, nbytes: int) -> None:
        self._name = name
        self.sizes[name] = nbytes

    def reach(self, storage: int) -> None:
        if self._name is not None and storage in self._storages:
            self.reached.setdefault(self._name, set()).add(storage)

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Let vLLM's iterators see headers only, and notice writes that bypass the weight loaders."""
        real = weight_utils.safe_open

        def headers_only(*args: Any, **kwargs: Any) -> _HeadersOnly:  # noqa: ANN401 - safetensors ships no types
            return _HeadersOnly(self, real(*args, **kwargs))

        # setattr: to mypy a name imported as a class cannot be assigned.
        setattr(weight_utils, "safe_open", headers_only)  # noqa: B010
        try:
            with _InPlaceWrites(self):
                yield
        finally:
            setattr(weight_utils, "safe_open", real)  # noqa: B010 - as above


class _Recorder:
    """Stands in for a parameter's weight loader: notes that the parameter was reached."""

    supports_moe_loading = True  # some loaders look for this mark of vLLM's expert loader

    def __init__(self, trace: _Trace, storage: int) -> None:
        self._trace = trace
        self._storage = storage

    def __call__(self, *_args: object, **_kwargs: object) -> bool:
        self._trace.reach(self._storage)
        return True  # "loaded": the expert loop stops at the first mapping that fits


class _InPlaceWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes in-place writes into parameters, for models that copy without a weight loader."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's signature
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):  # noqa: SLF001 - the only way to tell
            self._trace.reach(storage_key(args[0]))
        return func(*args, **(kwargs or {}))


class _HeadersOnly:
    """A safetensors file whose tensors have a shape and a type but no data."""

    def __init__(self, trace: _Trace, file: Any) -> None:  # noqa: ANN401 - safetensors ships no types
        self._trace = trace
        self._file = file

    def __enter__(self) -> _HeadersOnly:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, traceback)

    def keys(self) -> list[str]:
        names: list[str] = self._file.keys()
        return names

    def metadata(self) -> dict[str, str] | None:
        values: dict[str, str] | None = self._file.metadata()
        return values

    def get_tensor(self, name: str) -> torch.Tensor:
        header = self._file.get_slice(name)
        tensor = torch.empty(header.get_shape(), dtype=_DTYPES[header.get_dtype()], device="meta")
        self._trace.begin(name, tensor.nbytes)
        return tensor

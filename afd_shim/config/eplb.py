"""Expert load balancing as the user asks for it, also on CPU, where vLLM's own configuration refuses the flag.

vLLM refuses `--enable-eplb` on CPU while it builds its `ParallelConfig`. On the FFN role the flag is
legal here: it is taken out of the arguments meanwhile and put into the finished configuration,
which vLLM does not validate again. So the flags are vLLM's own on every device, and no further
symbol of vLLM's is touched.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Final, NamedTuple

from afd_shim.config.schema import parse_afd_config
from afd_shim.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.parallel import EPLBConfig
    from vllm.engine.arg_utils import EngineArgs

    from afd_shim.config.schema import AFDConfig

__all__ = ["Withheld", "check_ffn_eplb", "withhold_eplb"]

#: vLLM's name for torch.distributed's own sends and receives, whatever the backend: gloo on CPU.
_CPU_COMMUNICATOR: Final = "torch_nccl"


class Withheld(NamedTuple):
    """Arguments that vLLM accepts on CPU, and what was taken out of them."""

    arguments: EngineArgs
    eplb_config: EPLBConfig | None  # None: nothing was taken out

    def restore(self, config: VllmConfig) -> None:
        """Put what was taken out into the finished configuration."""
        if self.eplb_config is not None:
            config.parallel_config.enable_eplb = True
            config.parallel_config.eplb_config = self.eplb_config


def withhold_eplb(arguments: EngineArgs) -> Withheld:
    """Take expert load balancing out of an FFN server's arguments on CPU; leave all others as they are.

    Raises:
        ConfigError: the mode or the communicator needs a device.

    """
    from vllm.platforms import current_platform

    afd = parse_afd_config(arguments.additional_config)
    if afd is None or afd.is_attention or not arguments.enable_eplb or not current_platform.is_cpu():
        return Withheld(arguments, None)
    asked = arguments.eplb_config
    if asked.use_async:
        raise ConfigError(
            "asynchronous expert load balancing moves weights on a stream of a device, and this server runs on CPU; "
            'write "use_async": false in --eplb-config.',
            key="eplb_config",
        )
    if asked.communicator not in (None, _CPU_COMMUNICATOR):
        raise ConfigError(
            f"the {asked.communicator!r} communicator needs a device, and this server runs on CPU; leave "
            f"'communicator' out of --eplb-config or use {_CPU_COMMUNICATOR!r}: torch.distributed, over gloo here.",
            key="eplb_config",
        )
    eplb_config = copy.copy(asked)
    eplb_config.communicator = _CPU_COMMUNICATOR
    without = copy.copy(arguments)
    without.enable_eplb = False
    without.eplb_config = type(asked)()
    return Withheld(without, eplb_config)


def check_ffn_eplb(afd: AFDConfig, config: VllmConfig) -> None:
    """Refuse expert load balancing that could not work on the FFN role (R24).

    Raises:
        ConfigError: naming the flag.

    """
    parallel = config.parallel_config
    if afd.is_attention or not parallel.enable_eplb:
        return
    if not parallel.enable_expert_parallel or parallel.tensor_parallel_size < 2:
        expert_parallel = "on" if parallel.enable_expert_parallel else "off"
        raise ConfigError(
            "expert load balancing moves experts between FFN ranks, and this server has "
            f"{parallel.tensor_parallel_size} rank(s), expert parallelism {expert_parallel}; "
            "use --enable-expert-parallel with --tensor-parallel-size 2 or more, or leave --enable-eplb out.",
            key="enable_eplb",
        )
    experts = config.model_config.get_num_experts()
    redundant = parallel.eplb_config.num_redundant_experts
    ranks = parallel.tensor_parallel_size
    if (experts + redundant) % ranks:
        more = ranks - (experts + redundant) % ranks
        raise ConfigError(
            f"{experts} experts and {redundant} redundant ones do not divide by {ranks} FFN ranks; use "
            f'"num_redundant_experts": {redundant + more} in --eplb-config.',
            key="num_redundant_experts",
        )

"""The `vllm.general_plugins` entry point: tiny on purpose.

vLLM logs and skips a plugin whose import fails, so a role would silently run unpatched; what the
function raises propagates. Hence everything is imported inside the function.
"""

from __future__ import annotations


def register() -> None:
    """Arm afd-shim in this process; vLLM calls it in every process it starts.

    Raises:
        AfdShimError: AFD is asked for and cannot be served here.
    """
    from afd_shim.activation import arm

    arm()

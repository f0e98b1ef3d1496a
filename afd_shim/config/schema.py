"""What stands under `afd` in `--additional-config`, parsed with one clear error per mistake.

Nothing here imports vLLM or torch: the command line and the recipes' tests use it alone.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afd_shim.errors import ConfigError

__all__ = ["AFD_KEY", "AFDConfig", "Role", "parse_afd_config"]

AFD_KEY = "afd"
"""The key of vLLM's `additional_config` under which the AFD configuration stands."""

# What differs between two starts of the same deployment without changing what is computed. vLLM
# hashes `additional_config` into its compile-cache key, so these stay out of what it hashes.
_ADDRESS_KEYS = ("host", "port", "connector_extra_config", "startup_timeout_s")


class Role(str, Enum):
    """The two roles of Attention-FFN Disaggregation."""

    ATTENTION = "attention"
    FFN = "ffn"


class AFDConfig(BaseModel):
    """The AFD configuration of one server.

    `host` and `port` are where FFN rank 0 listens: the FFN binds exactly that address, and every
    other rank of both roles connects to it. All values but `role` are the same on both roles.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    role: Annotated[Role, Field(strict=False)]
    connector: str
    host: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(ge=1, le=65535)]
    num_attention_ranks: Annotated[int, Field(ge=1)]
    num_ffn_ranks: Annotated[int, Field(ge=1)]
    compute_gate_on_attention: bool = False
    shared_experts_on_attention: bool = False
    connector_extra_config: dict[str, Any] = Field(default_factory=dict)  # each connector has its own schema
    startup_timeout_s: Annotated[float, Field(strict=False, gt=0, allow_inf_nan=False)] = 600.0

    @property
    def is_attention(self) -> bool:
        """Whether this server holds attention and the KV cache."""
        return self.role is Role.ATTENTION

    def hashed(self) -> dict[str, Any]:
        """The part that may enter vLLM's compile-cache key: everything but addresses."""
        return {key: value for key, value in self.model_dump(mode="json").items() if key not in _ADDRESS_KEYS}


def parse_afd_config(additional_config: object) -> AFDConfig | None:
    """Parse the AFD configuration out of vLLM's `additional_config`.

    Returns:
        The configuration, or None where there is none: vLLM then behaves as if afd-shim were absent.

    Raises:
        ConfigError: naming the key at fault (`key`) and what to write instead.

    """
    if not isinstance(additional_config, Mapping) or AFD_KEY not in additional_config:
        return None
    raw = additional_config[AFD_KEY]
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"'afd' must be a JSON object, got {json.dumps(raw, default=str)}. Write "
            '--additional-config \'{"afd": {"role": "attention", ...}}\'.',
            key=AFD_KEY,
        )
    try:
        return AFDConfig.model_validate(dict(raw))
    except ValidationError as error:
        raise _config_error(error) from None


def _config_error(error: ValidationError) -> ConfigError:
    """Turn pydantic's first complaint into one sentence with a remedy."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key = path[0] if path else AFD_KEY
    given = json.dumps(first.get("input"), default=str)
    known = list(AFDConfig.model_fields)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"the keys are: {', '.join(known)}."
        return ConfigError(f"unknown key 'afd.{key}'; {hint}", key=key)
    remedies = {
        "role": "use 'attention' or 'ffn'",
        "connector": "use 'TcpAFDConnector' (CPU or CUDA) or 'P2pNcclAFDConnector' (CUDA)",
        "host": "give the address FFN rank 0 listens on, e.g. '127.0.0.1'",
        "port": "give a TCP port from 1 to 65535, the same on both roles",
        "num_attention_ranks": "give the number of Attention ranks, 1 or more",
        "num_ffn_ranks": "give the number of FFN ranks, 1 or more",
        "compute_gate_on_attention": "use true or false",
        "shared_experts_on_attention": "use true or false",
        "connector_extra_config": "give a JSON object, or leave it out",
        "startup_timeout_s": "give a number of seconds greater than 0",
    }
    remedy = remedies[key]
    if first["type"] == "missing":
        return ConfigError(f"'afd.{key}' is missing; {remedy}.", key=key)
    return ConfigError(f"'afd.{'.'.join(path)}' is {given}: {first['msg'].lower()}; {remedy}.", key=key)

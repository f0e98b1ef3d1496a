"""What stands in vLLM's `additional_config` of a role: hashed without addresses, and whole in every process."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable

import pytest

from afd_shim.config import AFD_KEY, AFDConfig, parse_afd_config
from afd_shim.config.apply import RoleConfig

RAW: dict[str, object] = {
    "role": "ffn",
    "connector": "TcpAFDConnector",
    "host": "203.0.113.7",
    "port": 6239,
    "num_attention_ranks": 1,
    "num_ffn_ranks": 1,
}


@pytest.fixture
def afd() -> AFDConfig:
    """A parsed configuration."""
    config = parse_afd_config({AFD_KEY: RAW})
    assert config is not None
    return config


def test_addresses_are_not_in_the_dictionary(afd: AFDConfig) -> None:
    """vLLM hashes the dictionary into its compile-cache key: another port must not compile again."""
    dumped = json.dumps(RoleConfig.of({"mine": 1, AFD_KEY: RAW}, afd, "0123"))

    assert "203.0.113.7" not in dumped
    assert "6239" not in dumped
    assert json.loads(dumped)["mine"] == 1
    assert json.loads(dumped)[AFD_KEY]["role"] == "ffn"


def test_the_given_dictionary_is_left_alone(afd: AFDConfig) -> None:
    """It is the caller's, who may start another engine with it."""
    given: dict[str, object] = {AFD_KEY: dict(RAW)}

    RoleConfig.of(given, afd, "0123")

    assert given == {AFD_KEY: RAW}


def pickled(config: RoleConfig) -> RoleConfig:
    """What another process gets."""
    again: RoleConfig = pickle.loads(pickle.dumps(config))  # noqa: S301 - our own bytes
    return again


@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy, pickled])
def test_the_whole_configuration_reaches_every_process(
    afd: AFDConfig, carry: Callable[[RoleConfig], RoleConfig]
) -> None:
    """EngineCore and the workers get a copy, by pickle, with addresses."""
    config = RoleConfig.of({AFD_KEY: RAW}, afd, "0123")

    again = carry(config)

    assert type(again) is RoleConfig
    assert again == config
    assert (again.afd, again.digest) == (afd, "0123")
    assert (again.afd.host, again.afd.port) == ("203.0.113.7", 6239)

"""The `afd` configuration: every mistake has an error of its own that names the key and the way out."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from afd_shim.config import AFD_KEY, AFDConfig, Role, parse_afd_config
from afd_shim.errors import ConfigError

GOOD: dict[str, object] = {
    "role": "attention",
    "connector": "TcpAFDConnector",
    "host": "127.0.0.1",
    "port": 6239,
    "num_attention_ranks": 2,
    "num_ffn_ranks": 1,
}


def parse(**changes: object) -> AFDConfig:
    """Parse a good configuration with some values changed."""
    config = parse_afd_config({AFD_KEY: GOOD | changes})
    assert config is not None
    return config


def refusal(raw: object) -> ConfigError:
    """The error that a configuration ends in."""
    with pytest.raises(ConfigError) as refused:
        parse_afd_config({AFD_KEY: raw})
    return refused.value


def test_a_configuration_is_read_as_written() -> None:
    """Every key of the documentation, and the default of each that has one."""
    config = parse(role="ffn", startup_timeout_s=30, connector_extra_config={"depth": 2})

    assert config.role is Role.FFN
    assert not config.is_attention
    assert (config.connector, config.host, config.port) == ("TcpAFDConnector", "127.0.0.1", 6239)
    assert (config.num_attention_ranks, config.num_ffn_ranks) == (2, 1)
    assert config.compute_gate_on_attention is False
    assert config.connector_extra_config == {"depth": 2}
    assert config.startup_timeout_s == 30.0
    assert parse().startup_timeout_s == 600.0
    assert parse().connector_extra_config == {}
    assert parse(compute_gate_on_attention=True).compute_gate_on_attention is True
    assert config.shared_experts_on_attention is False
    assert parse(shared_experts_on_attention=True).shared_experts_on_attention is True


@pytest.mark.parametrize("additional_config", [None, {}, {"decode_backend": "auto"}, "a string", ["afd"]])
def test_without_afd_there_is_no_configuration(additional_config: object) -> None:
    """Whatever else a user puts there is vLLM's business."""
    assert parse_afd_config(additional_config) is None


@pytest.mark.parametrize("raw", [None, True, 6239, "attention", ["attention"]])
def test_afd_must_be_an_object(raw: object) -> None:
    """The error shows how to write one."""
    error = refusal(raw)

    assert error.key == "afd"
    assert """--additional-config '{"afd": {"role": "attention", ...}}'""" in str(error)


@pytest.mark.parametrize("key", sorted(GOOD))
def test_a_missing_key_is_named(key: str) -> None:
    """Each required key, left out."""
    error = refusal({name: value for name, value in GOOD.items() if name != key})

    assert error.key == key
    assert f"'afd.{key}' is missing; " in str(error)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("roles", "role"),
        ("num_attention_rank", "num_attention_ranks"),
        ("compute_gate_on_attn", "compute_gate_on_attention"),
        ("startup_timeout", "startup_timeout_s"),
    ],
)
def test_a_misspelt_key_gets_a_suggestion(written: str, meant: str) -> None:
    """The nearest key is what was meant."""
    error = refusal(GOOD | {written: 1})

    assert error.key == written
    assert str(error) == f"unknown key 'afd.{written}'; did you mean '{meant}'?"


def test_an_unknown_key_gets_the_list_of_keys() -> None:
    """Nothing is near: all keys are shown."""
    error = refusal(GOOD | {"zzz": 1})

    assert error.key == "zzz"
    for key in AFDConfig.model_fields:
        assert key in str(error)


WRONG: list[tuple[str, Any, str]] = [
    ("role", "expert", "use 'attention' or 'ffn'"),
    ("role", "", "use 'attention' or 'ffn'"),
    ("role", "Attention", "use 'attention' or 'ffn'"),
    ("role", None, "use 'attention' or 'ffn'"),
    ("role", 1, "use 'attention' or 'ffn'"),
    ("connector", 1, "TcpAFDConnector"),
    ("connector", None, "TcpAFDConnector"),
    ("host", "", "127.0.0.1"),
    ("host", 127, "127.0.0.1"),
    ("port", 0, "from 1 to 65535"),
    ("port", -1, "from 1 to 65535"),
    ("port", 65536, "from 1 to 65535"),
    ("port", "6239", "from 1 to 65535"),
    ("port", True, "from 1 to 65535"),
    ("port", 6239.5, "from 1 to 65535"),
    ("port", None, "from 1 to 65535"),
    ("num_attention_ranks", 0, "1 or more"),
    ("num_attention_ranks", -1, "1 or more"),
    ("num_attention_ranks", "2", "1 or more"),
    ("num_attention_ranks", True, "1 or more"),
    ("num_ffn_ranks", 0, "1 or more"),
    ("num_ffn_ranks", 1.5, "1 or more"),
    ("num_ffn_ranks", False, "1 or more"),
    ("compute_gate_on_attention", "true", "true or false"),
    ("compute_gate_on_attention", 1, "true or false"),
    ("compute_gate_on_attention", None, "true or false"),
    ("shared_experts_on_attention", "yes", "true or false"),
    ("connector_extra_config", [], "JSON object"),
    ("connector_extra_config", None, "JSON object"),
    ("startup_timeout_s", 0, "greater than 0"),
    ("startup_timeout_s", -5, "greater than 0"),
    ("startup_timeout_s", float("inf"), "greater than 0"),
    ("startup_timeout_s", float("nan"), "greater than 0"),
    ("startup_timeout_s", "soon", "greater than 0"),
]


@pytest.mark.parametrize(("key", "value", "remedy"), WRONG)
def test_a_wrong_value_is_named_with_what_to_write(key: str, value: object, remedy: str) -> None:
    """The key, the value as given, and the way out, all in one sentence."""
    error = refusal(GOOD | {key: value})

    assert error.key == key
    assert str(error).startswith(f"'afd.{key}' is ")
    assert remedy in str(error)
    assert str(error).endswith(".")


@pytest.mark.parametrize("port", [1, 65535])
def test_the_first_and_the_last_port_are_ports(port: int) -> None:
    """The bounds themselves are legal."""
    assert parse(port=port).port == port


def test_a_configuration_cannot_be_changed() -> None:
    """It is validated once; a later change would escape that."""
    with pytest.raises(ValueError, match="frozen"):
        parse().port = 1


def test_addresses_stay_out_of_what_is_hashed() -> None:
    """Two starts that differ in where and how long, but not in what, share vLLM's compile cache."""
    here = parse(port=1, host="127.0.0.1", startup_timeout_s=1, connector_extra_config={"a": 1})
    there = parse(port=2, host="10.0.0.1", startup_timeout_s=2, connector_extra_config={"a": 2})

    assert here.hashed() == there.hashed()
    assert here.hashed() != parse(compute_gate_on_attention=True).hashed()
    assert here.hashed() != parse(shared_experts_on_attention=True).hashed()
    assert here.hashed() != parse(role="ffn").hashed()


def test_a_refusal_survives_pickle() -> None:
    """EngineCore hands a worker's error up by pickle, and the key must still be there."""
    error = refusal(GOOD | {"port": 0})

    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes

    assert type(again) is ConfigError
    assert (str(again), again.key) == (str(error), "port")

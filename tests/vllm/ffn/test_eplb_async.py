"""Asynchronous rearrangements, watched and ended: vLLM's own state and steps, with a scripted worker.

Asynchronous mode itself needs two GPUs. What is scripted here is when the worker brings a layer, when
all ranks have it, and what taking it does to the placement; when a rearrangement begins and ends is vLLM's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb.eplb_state import EplbState

from afd_shim.compat.eplb import Eplb
from afd_shim.compat.release import installed_release
from afd_shim.ffn import eplb as balancing
from afd_shim.ffn.eplb import ExpertLoadBalancer

STEP: Any = SimpleNamespace(members=(), ends_step=True, dummy=True)  # a batch that only steps


class ScriptedState(EplbState):
    """vLLM's state of a model with `layers` MoE layers, whose worker may bring a layer before each step."""

    def __init__(self, *, layers: int, interval: int) -> None:  # vLLM's own needs a device
        self.brings: Callable[[int], bool] = lambda _: True
        self.peers_ready = True
        self.steps = 0
        self.cycles = 0
        self.next_layer = 0
        self.consumed: list[int] = []
        self.is_async = True
        self.should_record_tensor = None
        self.expert_load_window_size = 0
        self.expert_rearrangement_step = 0
        self.expert_rearrangement_step_interval = interval
        scripted: Any = SimpleNamespace(
            rebalanced=False,
            pending_result=None,
            physical_to_logical_map=torch.zeros(layers, 2, dtype=torch.int64),
            expert_load_pass=torch.zeros(layers, 2),
            model=SimpleNamespace(
                num_moe_layers=layers, moe_layers=[object()] * layers, num_redundant_experts=0, expert_weights=[]
            ),
        )
        self.scripted = scripted
        self.model_states = {"model": scripted}

    def bring(self) -> None:
        """What the worker does between two steps."""
        if not self.scripted.rebalanced or self.scripted.pending_result is not None:
            return
        layer = self.next_layer
        consumed = SimpleNamespace(record=lambda: self.consumed.append(layer))
        self.scripted.pending_result = SimpleNamespace(layer_idx=layer, consumed_event=consumed)
        self.next_layer = (layer + 1) % self.scripted.model.num_moe_layers

    def step(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's step, counted."""
        self.steps += 1
        super().step(*args, **kwargs)

    def rearrange(self, *_args: Any, **_kwargs: Any) -> None:
        """What vLLM's does for the asynchronous worker."""
        assert not self.scripted.rebalanced
        self.cycles += 1
        self.scripted.rebalanced = True

    def _all_ranks_result_ready(self, model_state: Any) -> bool:
        return self.peers_ready and model_state.pending_result is not None


def take(model_state: Any, ep_rank: int) -> None:
    """What vLLM's `_move_to_workspace` does, for a layer that ends as it was."""
    del ep_rank
    result = model_state.pending_result
    if result.layer_idx == model_state.model.num_moe_layers - 1:
        model_state.rebalanced = False
    model_state.pending_result = None
    result.consumed_event.record()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """Warnings of this project, which vLLM keeps from the root logger."""
    logger = logging.getLogger("vllm.afd_shim")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, logger.name)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ScriptedState, ExpertLoadBalancer]]:
    """A balancer of rank 1 on a scripted state, as a GPU's model runner hands it over."""
    group = SimpleNamespace(device_group=SimpleNamespace(rank=lambda: 1, size=lambda: 2))
    monkeypatch.setattr(eplb_state, "get_ep_group", lambda: group)
    monkeypatch.setattr(eplb_state, "_move_to_workspace", take)

    def make(*, layers: int = 4, interval: int = 10) -> tuple[ScriptedState, ExpertLoadBalancer]:
        state = ScriptedState(layers=layers, interval=interval)
        config: Any = SimpleNamespace(enable_eplb=True, eplb_config=SimpleNamespace(log_balancedness=False))
        model_config: Any = None
        eplb = Eplb(config, model_config, torch.device("cuda"), installed_release())
        runner: Any = SimpleNamespace(eplb_state=state)
        model: Any = None
        assert eplb.register(model, runner)
        served: Any = [
            SimpleNamespace(runner=runner, index=index) for index, runner in enumerate(state.scripted.model.moe_layers)
        ]
        return state, ExpertLoadBalancer(eplb, served, rank=1, num_ranks=2, log_placement=False)

    return make


Make = Callable[..., tuple[ScriptedState, ExpertLoadBalancer]]


def warned_at(
    state: ScriptedState, balancer: ExpertLoadBalancer, log: pytest.LogCaptureFixture, steps: int
) -> list[int]:
    """Step so often; the steps that warned."""
    warned = []
    for _ in range(steps):
        if state.brings(state.steps + 1):
            state.bring()
        balancer.eplb_step(STEP)
        warned += [state.steps] * len(log.records)
        log.clear()
    return warned


@pytest.mark.parametrize(
    ("layers", "interval", "stride"),
    [
        pytest.param(4, 10, 1, id="idle between rearrangements"),
        pytest.param(10, 4, 1, id="the next begins in the step that ends one"),
        pytest.param(4, 10, 10, id="each takes longer than three intervals"),
        pytest.param(1, 10, 1, id="one layer"),
    ],
)
def test_rearrangements_that_end_in_the_same_placement_are_healthy(
    make: Make, log: pytest.LogCaptureFixture, layers: int, interval: int, stride: int
) -> None:
    """Nobody is told to restart a server whose balance is as good as it gets."""
    state, balancer = make(layers=layers, interval=interval)
    state.brings = lambda step: step % stride == 0

    assert warned_at(state, balancer, log, 400) == []
    assert state.cycles > 5, "rearrangements have ended and begun"
    assert balancer.stats.rearrangements == 0


def test_a_worker_that_brings_nothing_is_told_once_per_three_intervals(
    make: Make, log: pytest.LogCaptureFixture
) -> None:
    """A server that will never balance again says so, without filling its log."""
    state, balancer = make()
    state.brings = lambda _: False

    assert warned_at(state, balancer, log, 105) == [40, 70, 100], "it began in step 10"
    assert state.cycles == 1


def test_a_peer_s_worker_that_brings_nothing_is_told_here_too(make: Make, log: pytest.LogCaptureFixture) -> None:
    """A layer that no step can take is no progress; the healthy ranks say so as well."""
    state, balancer = make()
    state.peers_ready = False

    assert warned_at(state, balancer, log, 75) == [41, 71], "the layer arrived before step 11"


def test_a_worker_that_goes_on_is_counted_from_there(make: Make, log: pytest.LogCaptureFixture) -> None:
    """After a stall that ended nothing is said, until there is another."""
    state, balancer = make()
    state.brings = lambda step: 45 <= step <= 100

    assert warned_at(state, balancer, log, 135) == [40, 131], "step 101 is the first without another layer"
    assert state.cycles == 7


def test_what_is_on_its_way_is_drained_at_shutdown(make: Make, log: pytest.LogCaptureFixture) -> None:
    """The worker touches no process group afterwards, and nobody waits or warns."""
    state, balancer = make()
    state.brings = lambda step: step <= 12  # layers 0 and 1
    warned_at(state, balancer, log, 13)
    assert state.consumed == [0, 1]
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.001):
            state.bring()

    worker = threading.Thread(target=work)
    worker.start()
    balancer.close()
    over.set()
    worker.join()

    assert state.consumed == [0, 1, 2, 3], "acknowledged, which is what the worker waits for"
    assert not state.scripted.rebalanced
    assert log.messages == []


def test_nothing_on_its_way_needs_no_drain(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shutdown between rearrangements has nothing to wait for."""
    state, balancer = make()
    monkeypatch.setattr(state, "drain_async", lambda: pytest.fail("nothing to drain"))

    balancer.close()


def test_a_drain_without_its_peers_is_given_up(
    make: Make, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead rank does not keep the others from ending, and its absence is told; what comes later is told too."""
    state, balancer = make()
    state.scripted.rebalanced = True
    gone = threading.Event()
    told: list[threading.ExceptHookArgs] = []

    def drain_async() -> None:
        gone.wait(60)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(state, "drain_async", drain_async)
    monkeypatch.setattr(balancing, "_DRAIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(threading, "excepthook", told.append)

    balancer.close()
    (message,) = log.messages
    assert "FFN rank 1 was still moving experts 0.2 s after it stopped serving" in message
    assert "Thread afd-eplb-drain is abandoned" in message

    (thread,) = [thread for thread in threading.enumerate() if thread.name == "afd-eplb-drain"]
    assert thread.daemon
    gone.set()
    thread.join(60)
    assert [str(late.exc_value) for late in told] == ["Connection closed by peer"]


def test_an_error_while_draining_is_told_and_the_shutdown_goes_on(
    make: Make, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a lost peer is in the log, with its traceback; `close` returns."""
    state, balancer = make()
    state.scripted.rebalanced = True

    def drain_async() -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(state, "drain_async", drain_async)

    balancer.close()
    (record,) = log.records
    assert "RuntimeError: Connection closed by peer. The shutdown goes on" in record.getMessage()
    assert record.exc_info is not None

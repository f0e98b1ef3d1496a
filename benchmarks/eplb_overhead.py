"""What expert load balancing costs a served step while it does not rearrange.

Two FFN servers of the same model, two ranks each, one with --enable-eplb, are given the same steps in
alternating blocks; this process plays the Attention rank, so nothing else is in the numbers. Run it
with the environment of a CPU vLLM:

    python benchmarks/eplb_overhead.py [--rows 512] [--blocks 9] [--steps 20] [--record]

Without --record the load window is closed, as it is for most of an interval in production. With it,
every step records: on CPU that is the torch reference, whose cost says nothing about a GPU's kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from afd_shim.connectors.base import AttentionConnector, ExchangeHeader, Hello, Reply
from afd_shim.testing.checkpoints import write_checkpoint
from afd_shim.testing.deployments import afd_config
from afd_shim.testing.peers import FFN_INSPECTION, meet
from afd_shim.testing.servers import free_port, start_server

_NEVER = 10**9  # steps


def main() -> None:
    """Start both servers, run the blocks, print milliseconds per step and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    eplb = {"use_async": False, "window_size": 1, "step_interval": _NEVER}
    if options.record:  # a window as long as its interval is always open
        eplb |= {"window_size": 4000, "step_interval": 4000}
        assert options.blocks * options.steps < 4000 // 4, "it would rearrange"
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        checkpoint = write_checkpoint("qwen3-moe", folder / "model", dtype="float32", size="large")
        served = {}
        for kind, flags in (("off", []), ("on", ["--enable-eplb", "--eplb-config", json.dumps(eplb)])):
            config = afd_config("ffn", free_port(), compute_gate_on_attention=True, num_ffn_ranks=2)
            server = start_server(
                kind,
                checkpoint.path,
                log_dir=folder,
                additional_config=config,
                dtype="float32",
                extra_args=(
                    *("--worker-extension-cls", FFN_INSPECTION),
                    *("--tensor-parallel-size", "2", "--enable-expert-parallel", *flags),
                ),
                env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
            )
            stack.enter_context(server)
            server.wait_ready(600)
            ranks, hello = meet(server, config)
            stack.callback(ranks[0].close)
            served[kind] = ranks[0]
        times: dict[str, list[float]] = {"off": [], "on": []}
        for block in range(options.blocks + 1):
            for kind, rank in served.items():
                seconds = _run(rank, hello, options.rows, options.steps)
                if block:  # the first one warms up
                    times[kind].append(seconds / options.steps * 1e3)
    off, on = (statistics.median(times[kind]) for kind in ("off", "on"))
    ratios = sorted(b / a for a, b in zip(times["off"], times["on"], strict=True))
    layers = len(hello.moe_layers)
    print(f"{options.rows} rows, {layers} MoE layers, load {'recorded' if options.record else 'not recorded'}")
    print(f"EPLB off  {off:8.2f} ms a step, {off / layers:.2f} ms a layer")
    print(f"EPLB on   {on:8.2f} ms a step, {on / layers:.2f} ms a layer")
    print(
        f"on / off  {statistics.median(ratios):.3f} (median; {len(ratios)} blocks: {ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


def _run(rank: AttentionConnector, hello: Hello, rows: int, steps: int) -> float:
    """Seconds for `steps` steps of `rows` rows through every MoE layer."""
    hidden = torch.randn(rows, hello.hidden_size)
    logits = torch.randn(rows, hello.num_experts)
    out = torch.empty_like(hidden)
    started = time.perf_counter()
    for step in range(steps):
        for layer in hello.moe_layers:
            last = layer == hello.moe_layers[-1]
            header = ExchangeHeader(step, layer, 0, rows, rows, Reply.FINISHED, dummy=False, last_layer=last)
            rank.send_attn_output(header, hidden, logits)
            rank.recv_ffn_output(header, out)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

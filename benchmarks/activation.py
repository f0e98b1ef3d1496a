"""What afd-shim costs a process that only has it installed, and one that serves AFD.

Usage, in an environment with vLLM: python benchmarks/activation.py [RUNS]

Every figure is the median over RUNS (30) fresh interpreters, with compiled files in place:

- `import afd_shim` in a bare interpreter, over the interpreter itself: under 15 ms;
- the plugin in a process that does not ask for AFD: under 0.5 % of `import vllm`;
- the proof, the commit and the barrier of the Attention worker's set in a process that has imported the
  worker: under 2 % of `import vllm`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

BARE = "pass"
IMPORT = "import afd_shim"

PROCESS = """
import json, time
clock = time.perf_counter

start = clock()
import vllm
vllm_seconds = clock() - start

import vllm.engine.arg_utils
start = clock()
from afd_shim.plugin import register
register()
not_configured = clock() - start

import afd_shim.workers.cpu  # What a worker process has imported when it commits.
import vllm.model_executor.model_loader.default_loader
from afd_shim import activation
start = clock()
activation.require_supported()
activation.commit("attention_worker")
activation.require("attention_worker")
configured = clock() - start
print("@@" + json.dumps([vllm_seconds, not_configured, configured]))
"""


def python(code: str) -> str:
    """Run code in a fresh interpreter; give what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    child = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return child.stdout


def seconds(code: str) -> float:
    """Time an interpreter from start to end, by its own parent's clock."""
    start = time.perf_counter()
    python(code)
    return time.perf_counter() - start


def main(runs: int) -> int:
    """Print the table; fail when a figure is over its limit."""
    for code in (BARE, IMPORT, PROCESS):
        python(code)  # Writes the compiled files.
    pairs = [(seconds(BARE), seconds(IMPORT)) for _ in range(runs)]
    own_import = statistics.median(after for _, after in pairs) - statistics.median(before for before, _ in pairs)
    answers = []
    for _ in range(runs):
        (line,) = [line for line in python(PROCESS).splitlines() if line.startswith("@@")]
        answers.append(json.loads(line[2:]))
    vllm, not_configured, configured = (statistics.median(column) for column in zip(*answers, strict=True))
    rows = [
        ("import afd_shim", own_import, 0.015),
        ("activation, not configured", not_configured, 0.005 * vllm),
        ("activation, configured", configured, 0.02 * vllm),
    ]
    print(f"median of {runs}; import vllm {vllm:.2f} s; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, value, limit in rows:
        share = f"{value / vllm:7.2%} of import vllm"
        print(
            f"{name:28}{value * 1e3:8.1f} ms  limit {limit * 1e3:6.1f} ms  {share}  {'ok' if value < limit else 'OVER'}"
        )
    return 0 if all(value < limit for _, value, limit in rows) else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 30))

"""Where compiled bfloat16 on CPU, split and unsplit, part; a report without a bound.

Inductor keeps float32 between the operations of an unsplit bfloat16 MoE layer that it compiles into its
neighbours, and the split rounds there, so the two are not comparable (docs/exactness.md). This says how far
apart they are. Run it with the environment of a CPU vLLM:

    python benchmarks/compiled_divergence.py [--family qwen3-moe]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from afd_shim.testing.checkpoints import write_checkpoint
from afd_shim.testing.comparison import PROMPTS, run_split, run_unsplit
from afd_shim.testing.families import FAMILIES


def main() -> None:
    """Generate unsplit and split, both compiled, and print the first token that differs for each prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3-moe")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write_checkpoint(options.family, folder / "model", dtype="bfloat16")
        expected = run_unsplit(checkpoint, folder, eager=False)
        run = run_split(checkpoint, folder, expected=expected, eager=False)
    for prompt, unsplit, split in zip(PROMPTS, run.expected, run.outputs, strict=True):
        pairs = list(zip(unsplit.token_ids, split.token_ids, strict=True))
        first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            print(f"{prompt!r}: {len(pairs)} tokens equal")
        else:
            a, b = pairs[first]
            print(f"{prompt!r}: token {first} of {len(pairs)} is the first to differ (unsplit {a}, split {b})")


if __name__ == "__main__":
    main()

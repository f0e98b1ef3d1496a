"""`python -m afd_shim.testing FAMILY DIRECTORY`: write a tiny random checkpoint that vLLM serves."""

from __future__ import annotations

import argparse
from pathlib import Path

from afd_shim.testing.checkpoints import write_checkpoint
from afd_shim.testing.families import FAMILIES

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m afd_shim.testing", description="Write a tiny random checkpoint, tokenizer included."
    )
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    write_checkpoint(arguments.family, arguments.directory, dtype=arguments.dtype)

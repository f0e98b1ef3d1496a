"""Prove the compat matrix against a published CUDA wheel, without installing it: no GPU, no torch.

Usage: verify_wheel.py RELEASE DIRECTORY

The wheel is downloaded (0.3 GB), its Python files are unpacked into DIRECTORY and kept there, and
`afd-shim verify` compares them. A second run finds them and downloads nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def unpack(release: str, directory: Path) -> None:
    """Download the wheel of a release and unpack its Python files and metadata."""
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(  # noqa: S603 - this interpreter's pip
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, f"vllm=={release}"],
            check=True,
        )
        (wheel,) = Path(temporary).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.endswith((".py", "/METADATA", "/RECORD"))]
            archive.extractall(directory, wanted)


def main(release: str, directory: Path) -> int:
    """Unpack unless that was done, verify, and give the verification's exit code."""
    if not list(directory.glob(f"vllm-{release}*.dist-info/RECORD")):
        unpack(release, directory)
    verify = [sys.executable, "-m", "afd_shim.cli", "verify", "--vllm-root", str(directory)]
    return subprocess.run(verify, check=False).returncode  # noqa: S603 - our own command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))

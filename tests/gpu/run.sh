#!/usr/bin/env bash
# On a GPU machine with a staged vLLM: make afd-shim's plugin visible to it, then run a module of tests/gpu.
#   bash tests/gpu/run.sh tests.gpu.run_one_gpu --out DIR
# VLLM_SITE says where vLLM was unpacked (default: $HOME/vllm-site); leave it empty where vLLM is installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
site="${VLLM_SITE-$HOME/vllm-site}"
if [ -n "$site" ]; then
  # What an installation would leave: vLLM finds plugins by entry points of distributions. Nothing is built.
  info="$site/afd_shim-0.1.0.dist-info"
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: afd-shim\nVersion: 0.1.0\n' > "$info/METADATA"
  printf '[vllm.general_plugins]\nafd_shim = afd_shim.plugin:register\n' > "$info/entry_points.txt"
  export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
fi
# Without it vLLM's own NCCL wrapper may find no library and turn itself off.
nccl="$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2> /dev/null || true)/lib/libnccl.so.2"
if [ -e "$nccl" ]; then export VLLM_NCCL_SO_PATH="$nccl"; fi
export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
exec python3 -m "$@"

#!/usr/bin/env bash
# DeepSeek-V2-Lite over three hosts: an FFN host with two GPUs, two Attention hosts with one GPU each;
# experts balanced by vLLM's own EPLB. 64 experts + 32 redundant = 96 physical, 48 per FFN rank.
#
#   on the FFN host          FFN_HOST=10.0.0.1 recipes/deepseek-v2-lite-2a2f-multi-host.sh ffn
#   on the Attention hosts   FFN_HOST=10.0.0.1 recipes/deepseek-v2-lite-2a2f-multi-host.sh attention 0
#                            FFN_HOST=10.0.0.1 recipes/deepseek-v2-lite-2a2f-multi-host.sh attention 1
#
# Start them in any order. FFN_HOST is the address the FFN host listens on, as the others reach it.
set -euo pipefail

ROLE=${1:?ffn or attention}
RANK=${2:-0}
FFN_HOST=${FFN_HOST:?the address of the FFN host}
MODEL=${MODEL:-deepseek-ai/DeepSeek-V2-Lite}
PORT=${PORT:-6239}

afd() { # role, more keys
  echo "{\"afd\": {\"role\": \"$1\", \"connector\": \"P2pNcclAFDConnector\", \"host\": \"$FFN_HOST\", \"port\": $PORT,
    \"num_attention_ranks\": 2, \"num_ffn_ranks\": 2${2:+, $2}}}"
}

case $ROLE in
ffn) # EPLB flags here only: the Attention role has no experts.
  exec vllm serve "$MODEL" --port 8001 --enforce-eager --trust-remote-code \
    --tensor-parallel-size 2 --enable-expert-parallel \
    --enable-eplb --eplb-config '{"num_redundant_experts": 32, "window_size": 1000, "step_interval": 3000,
      "log_balancedness": true, "log_balancedness_interval": 1000}' \
    --additional-config "$(afd ffn)"
  ;;
attention)
  exec vllm serve "$MODEL" --port 8000 --enforce-eager --trust-remote-code \
    --additional-config "$(afd attention "\"connector_extra_config\": {\"first_attention_rank\": $RANK}")"
  ;;
*)
  echo "the role is ffn or attention, not $ROLE" >&2
  exit 2
  ;;
esac

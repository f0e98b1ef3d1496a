#!/usr/bin/env bash
# DeepSeek-V2-Lite on one host with four GPUs: 2 Attention ranks (two servers) and 2 FFN ranks (one
# server), experts balanced by vLLM's own EPLB. 64 experts + 32 redundant = 96 physical, 48 per FFN rank.
#
#   recipes/deepseek-v2-lite-2a2f-single-host.sh
#
# Clients talk to ports 8000 and 8010. Ctrl-C ends all three servers; if one ends, so do the others.
set -euo pipefail

MODEL=${MODEL:-deepseek-ai/DeepSeek-V2-Lite}
FFN_GPUS=${FFN_GPUS:-0,1}
ATTENTION_GPUS=(${ATTENTION_GPUS:-2 3})
PORT=${PORT:-6239}

afd() { # role, more keys
  echo "{\"afd\": {\"role\": \"$1\", \"connector\": \"P2pNcclAFDConnector\", \"host\": \"127.0.0.1\", \"port\": $PORT,
    \"num_attention_ranks\": 2, \"num_ffn_ranks\": 2${2:+, $2}}}"
}

servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true; wait' EXIT

# EPLB flags on the FFN command only: the Attention role has no experts.
CUDA_VISIBLE_DEVICES=$FFN_GPUS vllm serve "$MODEL" --port 8001 --enforce-eager --trust-remote-code \
  --tensor-parallel-size 2 --enable-expert-parallel \
  --enable-eplb --eplb-config '{"num_redundant_experts": 32, "window_size": 1000, "step_interval": 3000,
    "log_balancedness": true, "log_balancedness_interval": 1000}' \
  --additional-config "$(afd ffn)" &
servers+=($!)

for rank in 0 1; do
  CUDA_VISIBLE_DEVICES=${ATTENTION_GPUS[$rank]} vllm serve "$MODEL" --port $((8000 + 10 * rank)) \
    --enforce-eager --trust-remote-code \
    --additional-config "$(afd attention "\"connector_extra_config\": {\"first_attention_rank\": $rank}")" &
  servers+=($!)
done

wait -n

#!/bin/bash
# Check the bits of every packed kind in parallel, then time products and steps, on one GPU.
set -u
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
logs=${1:-/tmp/packed}
mkdir -p "$logs"
for kind in Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K MXFP4 NVFP4; do
  timeout 110 python3 -m bench.gpu_many_rows check --kinds "$kind" >"$logs/check_$kind.log" 2>&1 &
done
wait
tail -n 4 "$logs"/check_*.log
timeout 110 python3 -m bench.gpu_few_rows check 2>&1 | tee "$logs/rows_check.log"
timeout 40 python3 -m bench.gpu_few_rows time --all-splits 2>&1 | tee "$logs/rows.log"
timeout 60 python3 -m bench.gpu_many_rows time 2>&1 | tee "$logs/wide.log"
timeout 60 python3 -m bench.gpu_many_rows crossover 2>&1 | tee "$logs/few.log"
timeout 90 python3 -m bench.gpu_experts check 2>&1 | tee "$logs/experts_check.log"
timeout 90 python3 -m bench.gpu_experts time 2>&1 | tee "$logs/experts.log"
timeout 60 python3 -m bench.gpu_experts heights 2>&1 | tee "$logs/heights.log"
timeout 150 python3 -m bench.gpu_backend steps prefill --model random:qwen3.6-27b-q4_k_m --memory 24 --lanes 8 --pages 2100 --context 33000 \
  >"$logs/b27.log" 2>&1
tail -45 "$logs/b27.log"

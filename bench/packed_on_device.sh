#!/bin/bash
# Bits of every packed kind, then every tile, on one GPU. Compilations run side by side first.
set -u
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
logs=${1:-/tmp/packed}
mkdir -p "$logs"
for part in $(seq 0 10); do
  timeout 110 python3 -m bench.gpu_packed compile --part "$part" --parts 11 >"$logs/compile$part.log" 2>&1 &
done
timeout 150 python3 -m bench.gpu_packed check --kinds Q4_K Q8_0 Q4_1 >"$logs/check0.log" 2>&1 &
timeout 150 python3 -m bench.gpu_packed check --kinds Q6_K Q4_0 MXFP4 >"$logs/check1.log" 2>&1 &
timeout 150 python3 -m bench.gpu_packed check --kinds Q5_K Q5_0 Q5_1 >"$logs/check2.log" 2>&1 &
wait
cat "$logs"/compile*.log | sort | uniq -c | tail -8
tail -n 8 "$logs"/check?.log
date
timeout 100 python3 -m bench.gpu_packed tune --limit 45 --json "$logs/tune.json" 2>&1 | tee "$logs/tune.log" | tail -70
date
timeout 150 python3 -m bench.gpu_backend turns prefill --model random:qwen3.6-27b-q4_k_m --memory 24 --lanes 8 --pages 2100 --context 33000 \
  >"$logs/b27.log" 2>&1
tail -45 "$logs/b27.log"

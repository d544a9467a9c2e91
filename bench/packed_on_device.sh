#!/bin/bash
# Bits of every packed kind, then every tile, on one GPU. Compilations run side by side first.
set -u
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
logs=${1:-/tmp/packed}
mkdir -p "$logs"
[ -f "$logs/cache.tgz" ] && tar xzf "$logs/cache.tgz" -C ~
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
timeout 45 ncu --clock-control none -k regex:_packed --metrics smsp__issue_active.avg.pct_of_peak_sustained_active,smsp__inst_executed.sum,sm__throughput.avg.pct_of_peak_sustained_elapsed,dram__throughput.avg.pct_of_peak_sustained_elapsed,l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum,smsp__warps_active.avg.per_cycle_active,gpu__time_duration.sum,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio,smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio,smsp__average_warps_issue_stalled_wait_per_issue_active.ratio,smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio,smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio,smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio,smsp__average_warps_issue_stalled_dispatch_stall_per_issue_active.ratio,sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active python3 -m bench.gpu_packed once >"$logs/ncu.log" 2>&1
grep -v "^==" "$logs/ncu.log" | tail -60 | cut -c1-150
timeout 100 python3 -m bench.gpu_packed tune --limit 75 --json "$logs/tune.json" 2>&1 | tee "$logs/tune.log" | tail -70

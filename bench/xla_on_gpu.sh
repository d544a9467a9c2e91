#!/usr/bin/env bash
# Compare xla and torch on a CUDA device with a random Llama of 1.2 billion weights. Needs jax with CUDA.
#   bash bench/xla_on_gpu.sh [SECONDS]
set -u
cd "$(dirname "$0")/.." || exit 1
limit=${1:-70}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD TF_CPP_MIN_LOG_LEVEL=2
python -c "import jax; print('jax', jax.__version__, jax.devices())"
for side in xla torch; do
    timeout "$limit" python -m bench.xla_against_torch --random-1b --device cuda --side $side --new-tokens 48 --compiled /tmp/compiled 2>&1 | tail -n 6
done
# The second start finds its programs in the cache of compiled programs.
timeout "$limit" python -m bench.xla_against_torch --random-1b --device cuda --side xla --new-tokens 48 --compiled /tmp/compiled 2>&1 | tail -n 2

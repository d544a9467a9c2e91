#!/usr/bin/env bash
# A random Llama of 1.2 billion weights on a CUDA device, xla against torch in one run. Needs jax with CUDA.
#   bash bench/xla_on_gpu.sh [SECONDS]
set -u
cd "$(dirname "$0")/.." || exit 1
limit=${1:-70}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD TF_CPP_MIN_LOG_LEVEL=2
python -c "import jax; print('jax', jax.__version__, jax.devices())"
for side in xla torch; do
    timeout "$limit" python -m bench.xla_against_torch --random-1b --device cuda --side $side --new-tokens 48 --compiled /tmp/compiled 2>&1 | tail -n 6
done
# The second start finds its programs compiled.
timeout "$limit" python -m bench.xla_against_torch --random-1b --device cuda --side xla --new-tokens 48 --compiled /tmp/compiled 2>&1 | tail -n 2

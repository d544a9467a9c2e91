#!/bin/sh
# On a machine with one GPU, use it as both stages of a split: test that the bits are equal, then measure the cost and the gain.
# Run in the root of the repository: sh bench/split_device.sh [python]
set -e
python=${1:-python3}
"$python" -m pytest -q -m device tests/device/test_backend.py
"$python" -m bench.split_overlap --shape 1b --devices cuda:0,cuda:0 --requests 16 --prompt-tokens 512 --new-tokens 64
"$python" -m bench.split_overlap --shape 1b --devices cuda:0,cuda:0 --requests 16 --prompt-tokens 512 --new-tokens 64 --dtype f32 --repeats 1

#!/bin/sh
# A device named twice, on a machine with one GPU: the bits of one device first, then what a split costs and gains.
# Run in the folder of the project: sh bench/split_device.sh [python]
set -e
python=${1:-python3}
"$python" -m pytest -q -m device tests/device/test_backend.py
"$python" -m bench.split_overlap --shape 1b --devices cuda:0,cuda:0 --requests 16 --prompt-tokens 512 --new-tokens 64
"$python" -m bench.split_overlap --shape 1b --devices cuda:0,cuda:0 --requests 16 --prompt-tokens 512 --new-tokens 64 --dtype f32 --repeats 1

"""A lower bound for the time of a decode step: the bytes it must read, divided by the memory bandwidth.

Every matrix is read once for all rows, experts up to the number that the rows can select, keys and values per row within the
attention window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onedraw.backends.packing import matrix_kinds, matrix_sizes, product_dtype, supports_gpu_packed
from onedraw.backends.precision import kv_precision
from onedraw.build.checkpoint import find_checkpoint
from onedraw.models.model_info import read_model_info
from onedraw.models.spec import KV_BYTES, KV_SCALE_BYTES, STATE_BYTES, AttentionSpec, ModelSpec, MoeSpec
from onedraw.models.weight_names import WeightKey, weight_shapes
from onedraw.settings import Settings


def step_bytes(spec: ModelSpec, sizes: Mapping[WeightKey, int], *, dtype: str, rows: int, context: int) -> int:
    """Bytes that a decode step reads. `sizes`: bytes of every matrix; `dtype`: of the KV cache; `context`: tokens per row."""
    weights = 0
    for (layer, weight), shape in weight_shapes(spec).items():
        if len(shape) < 2 or weight == "inputs_embed" or (weight == "embed" and not spec.tied):
            continue  # small, or only a few rows are read
        share = 1.0
        if weight.startswith("expert_") and layer is not None:
            experts = next(
                part
                for part in (spec.layers[layer].feed_forward, spec.layers[layer].parallel_experts)
                if isinstance(part, MoeSpec)
            )
            share = min(1.0, rows * experts.used / experts.experts)
        weights += int(sizes[layer, weight] * share)
    return weights + rows * sum(_state_bytes(spec, index, context, dtype) for index in range(len(spec.layers)))


def _state_bytes(spec: ModelSpec, index: int, context: int, dtype: str) -> int:
    mixer = spec.layers[index].mixer
    if isinstance(mixer, AttentionSpec):
        positions = context if mixer.window is None else min(context, mixer.window)
        return 2 * positions * mixer.kv_heads * (mixer.head_dim * KV_BYTES[dtype] + KV_SCALE_BYTES.get(dtype, 0))
    return 2 * STATE_BYTES * mixer.value_heads * mixer.key_dim * mixer.value_dim  # read and written


def decode_step_floor(settings: Settings) -> Callable[[int, int], float] | None:
    """The minimum seconds of a decode step by (rows, context), from the measured memory bandwidth; None unless on one GPU."""
    if settings.backend != "torch":
        return None
    from onedraw.backends.torch.device import copy_bandwidth, find_devices, why_no_blocks

    device = find_devices(settings.device_names)[0]
    if device.kind == "cpu" or len(settings.device_names) > 1:
        return None
    no_kernels = why_no_blocks() if supports_gpu_packed(device) else ""
    checkpoint = find_checkpoint(settings)
    try:
        info = read_model_info(checkpoint)
        spec, kinds = info.spec, matrix_kinds(info.weights)
        stream = {"activations": "f32", "stream": "auto"}
        dtype = product_dtype([device], requested=settings.dtype, **stream, kinds=kinds, no_kernels=no_kernels)
        sizes = matrix_sizes(info.weights, dtype)
    finally:
        checkpoint.close()
    bandwidth = copy_bandwidth(device.name)
    kv_dtype = kv_precision(settings.kv_dtype, products=dtype)
    return lambda rows, context: step_bytes(spec, sizes, dtype=kv_dtype, rows=rows, context=context) / bandwidth

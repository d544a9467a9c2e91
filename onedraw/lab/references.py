"""What the decode speed of a benchmark is compared with: the memory-bandwidth floor, and transformers with the same model.

The floor of a decode step is the bytes that it must read, divided by the memory bandwidth: every matrix once for all rows,
experts up to the number that the rows can select, keys and values per row within the attention window. transformers runs as its
users run it: `generate` with sampling and default settings. The time between two tokens is measured after the first few, so
prefill and warm-up do not count, and few tokens are enough.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from onedraw.backends.devices import kv_precision, packed_kernels
from onedraw.backends.packing import matrix_kinds, matrix_sizes, product_dtypes
from onedraw.build.checkpoint import find_checkpoint
from onedraw.checkpoints.download import resolve_model
from onedraw.checkpoints.random_weights import is_random, shape_config
from onedraw.errors import BadSetting
from onedraw.models.registry import read_model_info
from onedraw.models.spec import STATE_BYTES, AttentionSpec, ModelSpec, MoeSpec, kv_head_bytes
from onedraw.models.weight_names import WeightKey, weight_shapes
from onedraw.settings import Settings, default_cache_dir

if TYPE_CHECKING:  # not imported at run time, so that `onedraw bench --backend fake` works without torch
    import torch


def step_bytes(spec: ModelSpec, sizes: Mapping[WeightKey, int], *, dtype: str, rows: int, context: int) -> int:
    """Return the bytes that a decode step reads. `sizes` has the bytes of every matrix, `dtype` is that of the KV cache, `rows`
    the number of sequences in the step, and `context` the number of tokens of each."""
    weights = 0
    for (layer, weight), shape in weight_shapes(spec).items():
        if len(shape) < 2 or weight == "inputs_embed" or (weight == "embed" and not spec.tied):
            continue  # These are small, or only a few rows of them are read (the embedding).
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
    """Return the bytes of keys and values, or of recurrent state, that one row of a decode step moves in a layer."""
    mixer = spec.layers[index].mixer
    if isinstance(mixer, AttentionSpec):
        positions = context if mixer.window is None else min(context, mixer.window)
        return 2 * positions * mixer.kv_heads * kv_head_bytes(mixer.head_dim, dtype)
    return 2 * STATE_BYTES * mixer.value_heads * mixer.key_dim * mixer.value_dim  # The state is read and written.


def decode_step_floor(settings: Settings) -> Callable[[int, int], float] | None:
    """Return a function of (rows, context) that gives the least seconds of a decode step by the measured memory bandwidth. None
    unless the torch backend runs the model on one device."""
    if settings.backend != "torch" or len(settings.device_names) > 1:
        return None
    from onedraw.backends.torch.device import copy_bandwidth, find_devices, read_bandwidth, why_no_cpu_kernels, why_no_gpu_kernels

    device = find_devices(settings.device_names)[0]
    on_cpu = device.kind == "cpu"
    kernels = packed_kernels(device)
    reason = ""
    if on_cpu:
        reason = why_no_cpu_kernels(default_cache_dir())
    elif kernels == "tensor cores":
        reason = why_no_gpu_kernels()
    with closing(find_checkpoint(settings)) as checkpoint:
        info = read_model_info(checkpoint)
        spec, kinds = info.spec, matrix_kinds(info.weights)
        stream = {"activations": settings.cpu_activations, "stream": "auto"}
        no_kernels: dict[str, str] = {kernels: reason} if kernels and reason else {}
        (dtype,) = product_dtypes([device], requested=settings.dtype, **stream, kinds=kinds, no_kernels=no_kernels)
        sizes = matrix_sizes(info.weights, dtype)
    bandwidth = read_bandwidth() if on_cpu else copy_bandwidth(device.name)
    kv_dtype = kv_precision(settings.kv_dtype, products=dtype)
    return lambda rows, context: step_bytes(spec, sizes, dtype=kv_dtype, rows=rows, context=context) / bandwidth


WARMUP_TOKENS = 3  # tokens that are not timed
TIMED_TOKENS = 16
MAX_PROMPT_TOKENS = 256  # a longer prompt would only make transformers slower


def transformers_rates(
    source: str | Mapping[str, Any],
    *,
    device: str,
    dtype: str,
    batches: Sequence[int],
    prompt_tokens: int,
    sampling: Mapping[str, float | None],
    report: Callable[[str], None] = lambda line: None,
) -> dict[int, float]:
    """Return the decoded tokens per second of transformers for each batch size. `source` is a checkpoint folder, or a config for
    random weights."""
    import torch

    from onedraw.backends.torch.device import DTYPES

    report("transformers: importing")
    try:
        import transformers as library
    except ImportError:
        raise BadSetting("--against transformers: the package is not installed; pip install transformers") from None
    torch_device, transformers = torch.device(device), cast(Any, library)
    gc.collect()
    if torch_device.type == "cuda":
        torch.cuda.empty_cache()  # frees the memory of the model that was measured before
    report("transformers: loading the model")
    if isinstance(source, str):
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype]).to(torch_device).eval()
    else:
        model = _random_model(transformers, source, torch_device, DTYPES[dtype])
    vocab = int(model.config.get_text_config().vocab_size)
    found = {}
    for batch in batches:
        report(f"transformers: batch {batch}")
        prompt = torch.randint(0, vocab, (batch, min(prompt_tokens, MAX_PROMPT_TOKENS)), device=torch_device)
        found[batch] = batch / max(_token_interval(transformers, model, prompt, sampling), 1e-9)
    return found


def _random_model(transformers: Any, source: Mapping[str, Any], torch_device: torch.device, dtype: torch.dtype) -> Any:
    """Return a model of this config with random weights, which are generated on the device. The library's own initialization,
    which is slow, is skipped where its version allows that."""
    fields = {name: value for name, value in source.items() if name not in ("model_type", "architectures")}
    config = transformers.AutoConfig.for_model(source["model_type"], **fields)
    try:
        no_init = importlib.import_module("transformers.initialization").no_init_weights
    except (ImportError, AttributeError):  # Another version of the library does not have this function.
        no_init = nullcontext
    with torch_device, no_init():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=0.02)
        else:
            weight.data.fill_(1.0)
    return model


def _token_interval(transformers: Any, model: Any, prompt: torch.Tensor, sampling: Mapping[str, float | None]) -> float:
    """Return the median of the seconds from one decode step of the batch to the next."""
    import torch

    times: list[float] = []

    def record_time(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if prompt.device.type == "cuda":
            torch.cuda.synchronize(prompt.device)
        times.append(time.perf_counter())
        return scores

    count = WARMUP_TOKENS + TIMED_TOKENS + 1
    with torch.inference_mode():
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            pad_token_id=0,
            eos_token_id=None,
            max_new_tokens=count,
            min_new_tokens=count,
            logits_processor=transformers.LogitsProcessorList([record_time]),
            **({"do_sample": True, **sampling} if sampling else {"do_sample": False}),
        )
    gaps = [after - before for before, after in pairwise(times)]
    return statistics.median(gaps[WARMUP_TOKENS:])


def peer_rates(
    settings: Settings,
    report: Callable[[str], None],
    *,
    batches: Sequence[int],
    prompt_tokens: int,
    sampling: Mapping[str, float | None],
) -> dict[int, float]:
    """Return the decoded tokens per second of transformers with the model of these settings, for each batch size."""
    from onedraw.backends.torch.device import find_devices

    device = find_devices(settings.device_names)[0]
    given = {"activations": "f32", "stream": "auto"}
    (dtype,) = product_dtypes([device], requested=settings.dtype, **given, kinds=(), no_kernels={})
    source: str | Mapping[str, Any]
    if is_random(settings.model):
        source = shape_config(settings.model)
    else:
        source = str(resolve_model(settings.model, settings.cache_folder))
        if not Path(source).is_dir():
            raise BadSetting("--against transformers: pass a folder with safetensors or a random: shape as the model")
    options: dict[str, Any] = {"batches": batches, "prompt_tokens": prompt_tokens, "sampling": sampling}
    return transformers_rates(source, device=device.name, dtype=dtype, report=report, **options)

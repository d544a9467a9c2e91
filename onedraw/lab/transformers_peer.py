"""The same work with transformers, for a benchmark's other column.

In: a folder, or the config of a shape, and batch sizes. Out: decoded tokens per second for each. transformers is asked as its
users ask it: `generate`, sampled, its own defaults for everything else. A few tokens are enough: the time between two of them is
taken, after the first ones, so neither its prefill nor its warming up counts.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch

from onedraw.backends.packing import product_dtype
from onedraw.backends.torch.device import DTYPES, find_devices
from onedraw.checkpoints.download import resolve_model
from onedraw.checkpoints.random_shapes import is_random, shape_config
from onedraw.errors import BadSetting
from onedraw.settings import Settings, default_cache_dir

WARMUP_TOKENS = 3  # tokens whose time does not count
TIMED_TOKENS = 16
MAX_PROMPT_TOKENS = (
    256  # a longer one takes transformers longer to read, and tells nothing of its decoding that is not in its favour
)


def transformers_rates(
    source: str | Mapping[str, Any],
    *,
    device: str,
    dtype: str,
    batches: Sequence[int],
    prompt_tokens: int,
    sampling: Mapping[str, float],
    tell: Callable[[str], None] = lambda line: None,
) -> dict[int, float]:
    """Tokens per second while decoding, by batch size. `source`: a checkpoint's folder, or a config of random weights."""
    tell("transformers: importing")
    try:
        import transformers as library
    except ImportError:
        raise BadSetting("--against transformers: it is not installed; pip install transformers") from None
    place, transformers = torch.device(device), cast(Any, library)
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()  # what our own weights left
    tell("transformers: making the model")
    if isinstance(source, str):
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype]).to(place).eval()
    else:
        model = _made(transformers, source, place, DTYPES[dtype])
    vocab = int(model.config.get_text_config().vocab_size)
    found = {}
    for batch in batches:
        tell(f"transformers: batch {batch}")
        prompt = torch.randint(0, vocab, (batch, min(prompt_tokens, MAX_PROMPT_TOKENS)), device=place)
        found[batch] = batch / max(_between_tokens(transformers, model, prompt, sampling), 1e-9)
    return found


def _made(transformers: Any, source: Mapping[str, Any], place: torch.device, dtype: torch.dtype) -> Any:
    """A model of this config whose weights are drawn where they are used, each once: the library's own drawing is left out
    where it can be."""
    given = {name: value for name, value in source.items() if name not in ("model_type", "architectures")}
    config = transformers.AutoConfig.for_model(source["model_type"], **given)
    try:
        undrawn = importlib.import_module("transformers.initialization").no_init_weights
    except (ImportError, AttributeError):  # of another version
        undrawn = nullcontext
    with place, undrawn():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=0.02)
        else:
            weight.data.fill_(1.0)
    return model


def _between_tokens(transformers: Any, model: Any, prompt: torch.Tensor, sampling: Mapping[str, float]) -> float:
    """Seconds from one token of every sequence to the next, the median of a few."""
    moments: list[float] = []

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if prompt.device.type == "cuda":
            torch.cuda.synchronize(prompt.device)
        moments.append(time.perf_counter())
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
            logits_processor=transformers.LogitsProcessorList([note]),
            **({"do_sample": True, **sampling} if sampling else {"do_sample": False}),
        )
    gaps = [after - before for before, after in pairwise(moments)]
    return statistics.median(gaps[WARMUP_TOKENS:])


def peer_rates(
    settings: Settings, tell: Callable[[str], None], *, batches: Sequence[int], prompt_tokens: int, sampling: Mapping[str, float]
) -> dict[int, float]:
    """Decoded tokens per second of transformers with the same model, by batch size."""
    device = find_devices(settings.device_names)[0]
    dtype = product_dtype([device], asked=settings.dtype, activations="f32", stream="auto", kinds=(), no_kernels="")
    source: str | Mapping[str, Any]
    if is_random(settings.model):
        source = shape_config(settings.model)
    else:
        source = str(resolve_model(settings.model, settings.cache_dir or default_cache_dir()))
        if not Path(source).is_dir():
            raise BadSetting("--against transformers: needs a folder with safetensors, or a random: shape")
    asked: dict[str, Any] = {"batches": batches, "prompt_tokens": prompt_tokens, "sampling": sampling}
    return transformers_rates(source, device=device.name, dtype=dtype, tell=tell, **asked)

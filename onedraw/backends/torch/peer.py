"""The same work with transformers, for a benchmark's other column.

In: a folder, or the config of a shape, and batch sizes. Out: decoded tokens per second for each. transformers is asked as its
users ask it: `generate`, sampled, its own defaults for everything else. Prefill is taken out by the difference of two runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from onedraw.backends.torch.device import DTYPES
from onedraw.errors import BadSetting

FEW = 4  # tokens of the run whose time is taken away


def transformers_rates(
    source: str | Mapping[str, Any],
    *,
    device: str,
    dtype: str,
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    sampling: Mapping[str, float],
) -> dict[int, float]:
    """Tokens per second while decoding, by batch size. `source`: a checkpoint's folder, or a config of random weights."""
    try:
        import transformers as library
    except ImportError:
        raise BadSetting("--against transformers: it is not installed; pip install transformers") from None
    place, transformers = torch.device(device), cast(Any, library)
    if isinstance(source, str):
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype]).to(place).eval()
    else:
        given = {name: value for name, value in source.items() if name not in ("model_type", "architectures")}
        config = transformers.AutoConfig.for_model(source["model_type"], **given)
        with place:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
    vocab = int(model.config.get_text_config().vocab_size)
    found = {}
    for batch in batches:
        prompt = torch.randint(0, vocab, (batch, prompt_tokens), device=place)
        seconds = {}
        for count in (FEW, FEW + new_tokens):
            for _ in range(2):  # the first warms up
                seconds[count] = _seconds(model, prompt, count, sampling)
        found[batch] = batch * new_tokens / max(seconds[FEW + new_tokens] - seconds[FEW], 1e-9)
    return found


def _seconds(model: Any, prompt: torch.Tensor, count: int, sampling: Mapping[str, float]) -> float:
    _wait(prompt.device)
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            pad_token_id=0,
            eos_token_id=None,
            max_new_tokens=count,
            min_new_tokens=count,
            **({"do_sample": True, **sampling} if sampling else {"do_sample": False}),
        )
    _wait(prompt.device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

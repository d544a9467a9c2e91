"""The transformers peer gives a rate for every batch size and generates only as many tokens as it needs."""

from __future__ import annotations

import pytest
import transformers

from onedraw.checkpoints.random_weights import SHAPES
from onedraw.lab.references import MAX_PROMPT_TOKENS, TIMED_TOKENS, WARMUP_TOKENS, transformers_rates

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def test_every_batch_has_a_rate_from_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    real = transformers.LlamaForCausalLM.generate

    def counting(self: object, prompt: object, **given: object) -> object:
        calls.append((*prompt.shape, given["max_new_tokens"]))  # type: ignore[attr-defined, arg-type]
        return real(self, prompt, **given)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", counting)
    lines: list[str] = []
    config = {**SHAPES["llama3-8b"], **SMALL, "num_hidden_layers": 2}
    sampling = {"temperature": 0.8, "top_p": 0.95}
    rates = transformers_rates(
        config, device="cpu", dtype="f32", batches=(1, 3), prompt_tokens=1000, sampling=sampling, report=lines.append
    )
    assert list(rates) == [1, 3]
    assert min(rates.values()) > 1
    assert calls == [(batch, MAX_PROMPT_TOKENS, WARMUP_TOKENS + TIMED_TOKENS + 1) for batch in (1, 3)]
    assert lines[-1] == "transformers: batch 3"

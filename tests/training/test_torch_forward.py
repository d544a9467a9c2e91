"""`torch_forward` has the sampler's logprobs, bit for bit, and the gradient of the model's formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import onedraw
from onedraw.backends.torch.training import torch_forward as exact
from onedraw.build.llm import build_llm
from onedraw.errors import OnedrawError, UnsupportedModel
from onedraw.llm.llm import LLM
from onedraw.settings import Settings
from tests.support import tiny

FAMILIES = ("llama", "llama31", "mistral", "qwen2", "qwen3")
PROMPTS = [tuple(range(5, 60)), tuple(range(100, 103)), (7,)]


def rollouts(llm: LLM, count: int = 24) -> list[tuple[tuple[int, ...], list[int], torch.Tensor]]:
    """Prompt, reply and the sampler's logprobs of rollouts, which are sampled in one batch."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        reply = llm.generate(prompt, max_tokens=count, seed=number, logprobs=0, ignore_eos=True, temperature=1.0)
        assert not isinstance(reply, list)
        values = [token.logprobs.logprob for token in reply.tokens if token.logprobs is not None]
        found.append((prompt, reply.token_ids, torch.tensor(values, dtype=torch.float64)))
    return found


def opened(model: Path | str) -> LLM:
    return build_llm(Settings(model=str(model), dtype="f32", max_context=256, draft=("ngram",)))


def transformers_logprobs(model: Any, prompt: tuple[int, ...], reply: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *reply[:-1]]])
    found: torch.Tensor = model(ids).logits[0, len(prompt) - 1 :].log_softmax(-1)
    return found.gather(1, torch.tensor(reply)[:, None])[:, 0]


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_have_the_bits_of_the_sampler_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tiny.write_safetensors(name, tmp_path / name, seed=3)
    with opened(folder) as llm:
        known = rollouts(llm)
    model = onedraw.torch_forward(folder)
    found = model.batch_logprobs([(prompt, reply) for prompt, reply, _ in known])
    for (prompt, reply, expected), values in zip(known, found, strict=True):
        assert torch.equal(values, expected)
        assert torch.equal(model.logprobs(prompt, reply), expected)  # alone, as in the batch
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sum(values.sum() for values in found).backward()  # type: ignore[union-attr]
    others = [transformers_logprobs(plain, prompt, reply) for prompt, reply, _ in known]
    sum(values.sum() for values in others).backward()  # type: ignore[union-attr]
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    named = dict(model.named_parameters())
    assert set(named) == set(gradients)
    for key, parameter in named.items():
        assert parameter.grad is not None
        difference = (parameter.grad - gradients[key]).abs().max() / gradients[key].abs().max()
        assert difference < 1e-4, key
    mismatch = max(float((values.detach().double() - known[i][2]).abs().max()) for i, values in enumerate(others))
    assert 0 < mismatch < 1e-4  # another order of operations has other bits, which is why this module exists


def test_after_a_training_step_the_logprobs_are_those_of_a_server_with_the_new_weights(tmp_path: Path) -> None:
    folder = tiny.write_safetensors("qwen3", tmp_path / "model", seed=3)
    model = onedraw.torch_forward(folder)
    with opened(folder) as llm:
        before = rollouts(llm)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        model.logprobs(*before[0][:2]).sum().neg().backward()
        optimizer.step()
        llm.load_weights(model.named_parameters())
        after = rollouts(llm)
    assert not torch.equal(before[0][2], after[0][2])
    for prompt, reply, expected in after:
        assert torch.equal(model.logprobs(prompt, reply), expected)


def test_a_wrong_order_of_operations_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one operation has the value of the plain formula instead of the server's."""
    folder = tiny.write_safetensors("llama", tmp_path / "model", seed=3)
    with opened(folder) as llm:
        known = rollouts(llm)
    right: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = exact._exact

    def wrong(plain: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return plain if plain.shape[-1] == 192 else right(plain, value)  # the gated activation

    monkeypatch.setattr(exact, "_exact", wrong)
    model = onedraw.torch_forward(folder)
    assert not all(torch.equal(model.logprobs(prompt, reply), expected) for prompt, reply, expected in known)


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="qwen3_moe"):
        onedraw.torch_forward(tiny.write_safetensors("qwen3_moe", tmp_path / "moe"))
    model = onedraw.torch_forward(tiny.write_safetensors("llama", tmp_path / "llama"))
    with pytest.raises(OnedrawError, match="at least one token"):
        model.logprobs((1, 2), ())
    with pytest.raises(OnedrawError, match="vocabulary"):
        model([[1, 100_000]])


@pytest.mark.weights
def test_smollm2_has_the_bits_of_the_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    from onedraw.build.checkpoint import find_checkpoint

    with opened("smollm2") as llm:
        prompt = llm.encode("The sea was calm, and the old man")
        reply = llm.generate(prompt, max_tokens=24, seed=1, logprobs=0, ignore_eos=True, temperature=1.0)
    assert not isinstance(reply, list)
    expected = torch.tensor([t.logprobs.logprob for t in reply.tokens if t.logprobs is not None], dtype=torch.float64)
    checkpoint = find_checkpoint(Settings(model="smollm2"))
    model = onedraw.torch_forward(checkpoint.path)
    with torch.no_grad():
        assert torch.equal(model.logprobs(prompt, reply.token_ids), expected)

"""How far the logprobs of a trainer are from those of the sampler: `onedraw.torch_forward` and transformers, both in float32.

In: a dense model, by name or path; transformers needs accelerate to open a GGUF file. Out: the largest and the mean absolute
difference over the tokens of some rollouts. Run: `python -m bench.logprob_mismatch MODEL [--tokens N]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import onedraw
from onedraw.build.checkpoint import find_checkpoint
from onedraw.build.llm import build_llm
from onedraw.settings import Settings

PROMPTS = ("The sea was calm, and the old man", "def fibonacci(n):\n", "Q: Why is the sky blue?\nA:", "In 1969 the first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    rollouts = []
    with build_llm(Settings(model=arguments.model, dtype="f32", max_context=512)) as llm:
        options: dict[str, Any] = {"max_tokens": arguments.tokens, "temperature": 1.0, "top_p": 1.0, "logprobs": 0}
        for seed, text in enumerate(PROMPTS):
            prompt = llm.encode(text)
            reply = llm.generate(prompt, seed=seed, ignore_eos=True, **options)
            assert not isinstance(reply, list)
            sampled = torch.tensor([token.logprobs.logprob for token in reply.tokens if token.logprobs], dtype=torch.float64)
            rollouts.append((prompt, reply.token_ids, sampled))
    exact = onedraw.torch_forward(arguments.model)
    show("onedraw.torch_forward", exact.logprobs, rollouts)
    show("transformers", transformers_logprobs(arguments.model), rollouts)


def show(name: str, logprobs: Callable[..., Tensor], rollouts: list[tuple[tuple[int, ...], list[int], Tensor]]) -> None:
    with torch.no_grad():
        apart = torch.cat([(logprobs(prompt, reply).double() - sampled).abs() for prompt, reply, sampled in rollouts])
    equal = int((apart == 0).sum())
    print(f"{name:24} tokens {len(apart)}, equal {equal}, max {float(apart.max()):.2e}, mean {float(apart.mean()):.2e}")


def transformers_logprobs(model: str) -> Callable[..., Tensor]:
    import transformers

    path = find_checkpoint(Settings(model=model)).path
    folder, file = (path, None) if path.is_dir() else (path.parent, path.name)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)

    def logprobs(prompt: tuple[int, ...], reply: list[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *reply[:-1]]])
        found: Tensor = peer(ids).logits[0, len(prompt) - 1 :].log_softmax(-1)
        return found.gather(1, torch.tensor(reply)[:, None])[:, 0]

    return logprobs


if __name__ == "__main__":
    main()

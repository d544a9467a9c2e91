"""How far the logprobs of a trainer are from those of the sampler: `onedraw.torch_forward` and transformers, both in float32.

In: a Llama, by name or path. Out: the largest and the mean absolute difference over the tokens of some rollouts. Run:
`python -m bench.logprob_mismatch MODEL [--tokens N]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import onedraw
from onedraw.backends.torch.training.torch_forward import TorchForward
from onedraw.build.llm import build_llm
from onedraw.models.spec import AttentionSpec, MlpSpec
from onedraw.models.weight_names import SAFETENSORS_NAMES
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
    show("transformers", transformers_logprobs(exact), rollouts)


def show(name: str, logprobs: Callable[..., Tensor], rollouts: list[tuple[tuple[int, ...], list[int], Tensor]]) -> None:
    with torch.no_grad():
        apart = torch.cat([(logprobs(prompt, reply).double() - sampled).abs() for prompt, reply, sampled in rollouts])
    equal = int((apart == 0).sum())
    print(f"{name:24} tokens {len(apart)}, equal {equal}, max {float(apart.max()):.2e}, mean {float(apart.mean()):.2e}")


def transformers_logprobs(exact: TorchForward) -> Callable[..., Tensor]:
    """The same weights in transformers' Llama."""
    import transformers

    spec, first = exact.spec, exact.spec.layers[0]
    mixer, mlp = first.mixer, first.feed_forward
    assert spec.family == "llama", "only Llama is compared"
    assert isinstance(mixer, AttentionSpec)
    assert isinstance(mlp, MlpSpec)
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=mlp.width,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=mixer.heads,
        num_key_value_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        rms_norm_eps=spec.eps,
        tie_word_embeddings=spec.tied,
        rope_parameters={"rope_type": "default", "rope_theta": mixer.rope.theta},
    )
    make: Any = transformers.AutoModelForCausalLM.from_config
    peer = make(config, dtype=torch.float32).eval()
    named = {SAFETENSORS_NAMES.stored_name(key): parameter.data for key, parameter in exact.weights().items()}
    missing, unexpected = peer.load_state_dict(named, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    peer.tie_weights()

    def logprobs(prompt: tuple[int, ...], reply: list[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *reply[:-1]]])
        found: Tensor = peer(ids).logits[0, len(prompt) - 1 :].log_softmax(-1)
        return found.gather(1, torch.tensor(reply)[:, None])[:, 0]

    return logprobs


if __name__ == "__main__":
    main()

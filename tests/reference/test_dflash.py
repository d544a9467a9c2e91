"""The reference drafter: compared with transformers' DFlash module, checked for windows and causality, and for the acceptance
of a trained drafter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.dflash import DrafterWeights, read_drafter_info
from onedraw.models.registry import read_model_info
from onedraw.models.spec import DrafterSpec
from tests.reference.dflash import (
    Drafter,
    GreedyRun,
    Target,
    block_hidden,
    block_logits,
    draft_along,
    greedy_with_drafts,
    head_logits,
    proposals,
)
from tests.support import tiny_drafters as tiny

FIXTURES = Path(__file__).parent.parent / "fixtures"
TRAINED = FIXTURES / "trained"
PROMPTS = (
    "Return the number of items in the list. If the",
    '    def read(self, size=-1):\n        """Read',
    "The value must be a string or",
    "import os\nimport sys\n\ndef main(",
    " The default is None. This function returns a new",
)


def weights_of(path: Path, **changes: Any) -> DrafterWeights:
    """The drafter at `path`, with changes to its spec that do not change weight shapes."""
    weights = read_drafter_info(open_checkpoint(path)).weights
    weights.spec = replace(weights.spec, **changes)
    return weights


def inputs(spec: DrafterSpec, context: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, and a target's embedding and head."""
    random = np.random.default_rng(seed)
    features = 3 * random.normal(size=(context, spec.feature_width))
    return features, random.normal(size=(spec.vocab, spec.hidden)), random.normal(size=(spec.vocab, spec.hidden))


# ------------------------------------------------------------------ comparison with transformers


def transformers_output(weights: DrafterWeights, features: np.ndarray, anchor: int, embed: np.ndarray) -> np.ndarray:
    """The normed output [B, E] of transformers' DFlash module for the same weights."""
    spec, mixer = weights.spec, weights.spec.layers[0].mixer
    kinds = ["full_attention" if layer.mixer.window is None else "sliding_attention" for layer in spec.layers]
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=spec.hidden,
        intermediate_size=spec.layers[0].feed_forward.width,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=mixer.heads,
        num_key_value_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        rms_norm_eps=spec.eps,
        rope_parameters={"rope_type": "default", "rope_theta": mixer.rope.theta},
        layer_types=kinds,
        block_size=spec.block,
        mask_token_id=spec.mask_token,
        target_layer_ids=list(spec.target_layers),
        attn_implementation="eager",
    )
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    stored = {name.removesuffix(".weight"): weights.tensor(*place) for place, name in _their_names(spec).items()}
    model.load_state_dict({f"{name}.weight": torch.from_numpy(tensor.float32()) for name, tensor in stored.items()})
    count, size = len(features), spec.block
    slots = torch.arange(size)
    window = next((layer.mixer.window for layer in spec.layers if layer.mixer.window is not None), count)
    seen = (torch.arange(count) >= count - window).expand(size, count)
    sliding = torch.cat([seen, slots[None] <= slots[:, None]], dim=1)  # causal in the block
    blocked = {"full_attention": torch.zeros(size, count + size), "sliding_attention": torch.where(sliding, 0.0, -1e9)}
    with torch.no_grad():
        out = model(
            noise_embeds=torch.from_numpy(embed[[anchor] + [spec.mask_token] * (size - 1)]).float()[None],
            context_hidden_states=torch.from_numpy(features).float()[None],
            attention_mask={kind: mask[None, None] for kind, mask in blocked.items()},
        )
    return out.last_hidden_state[0].double().numpy()


def _their_names(spec: DrafterSpec) -> dict[tuple[int | None, str], str]:
    names: dict[tuple[int | None, str], str] = {(None, "fc"): "encoder.fc", (None, "hidden_norm"): "encoder.output_norm_enc"}
    names |= {(None, "norm"): "norm"}
    inner = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    inner |= {weight: f"self_attn.{weight}_proj" for weight in "qkvo"} | {
        name: f"self_attn.{name}" for name in ("q_norm", "k_norm")
    }
    inner |= {weight: f"mlp.{weight}_proj" for weight in ("gate", "up", "down")}
    return names | {(i, weight): f"layers.{i}.{name}" for i in range(len(spec.layers)) for weight, name in inner.items()}


@pytest.mark.parametrize("context", [1, 5, 40])
@pytest.mark.parametrize("name", ["dflash_qwen3", "dflash_qwen3_swa"])
def test_the_block_equals_transformers(name: str, context: int) -> None:
    weights = weights_of(FIXTURES / "gguf" / f"{name}.gguf")
    features, embed, _ = inputs(weights.spec, context)
    hidden = block_hidden(weights, features, 17, embed=embed)
    ours = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + weights.spec.eps) * weights.outer()["norm"]
    np.testing.assert_allclose(ours, transformers_output(weights, features, 17, embed), atol=2e-5)


# ------------------------------------------------------------------ what must not matter


def test_a_sliding_layer_attends_only_to_its_window(tmp_path: Path) -> None:
    weights = weights_of(
        tiny.write_zlab(tmp_path, layer_types=["sliding_attention"] * 2, sliding_window=5, use_sliding_window=True)
    )
    features, embed, head = inputs(weights.spec, 12)
    before = block_logits(weights, features, 3, embed=embed, head=head)
    outside, edge = features.copy(), features.copy()
    outside[:7] += 1
    edge[7] += 1
    np.testing.assert_array_equal(block_logits(weights, outside, 3, embed=embed, head=head), before)
    assert np.abs(block_logits(weights, edge, 3, embed=embed, head=head) - before).max() > 1e-3


def test_later_slots_matter_only_in_a_block_that_is_not_causal(tmp_path: Path) -> None:
    folder = tiny.write_zlab(tmp_path)
    features, embed, head = inputs(weights_of(folder).spec, 6)
    for causal, same in (((True, True), True), ((False, False), False)):
        short, long = (weights_of(folder, causal_in_block=causal, block=block) for block in (3, 6))
        first = block_logits(short, features, 3, embed=embed, head=head)
        rows = block_logits(long, features, 3, embed=embed, head=head)[:2]
        assert np.allclose(first, rows, atol=1e-9) == same


def test_only_relative_positions_matter(tmp_path: Path) -> None:
    """Rotary positions are relative: context outside every window can be removed."""
    weights = weights_of(
        tiny.write_zlab(tmp_path, layer_types=["sliding_attention"] * 2, sliding_window=4, use_sliding_window=True)
    )
    features, embed, head = inputs(weights.spec, 20)
    whole = block_logits(weights, features, 3, embed=embed, head=head)
    np.testing.assert_allclose(block_logits(weights, features[-4:], 3, embed=embed, head=head), whole, atol=1e-9)


def test_a_drafter_without_context_still_drafts(tmp_path: Path) -> None:
    weights = weights_of(tiny.write_zlab(tmp_path))
    features, embed, head = inputs(weights.spec, 0)
    assert np.isfinite(block_logits(weights, features, 3, embed=embed, head=head)).all()


def test_a_separate_head_drafts_in_the_targets_ids(tmp_path: Path) -> None:
    weights = weights_of(tiny.write_speculators(tmp_path, draft_vocab=tiny.DRAFT_VOCAB))
    features, embed, head = inputs(weights.spec, 6)
    hidden = block_hidden(weights, features, 3, embed=embed)
    np.testing.assert_array_equal(
        hidden, block_hidden(weights, features, 3, embed=embed * 0)
    )  # the drafter's own embedding is used
    logits = head_logits(weights, hidden, head=head)
    assert logits.shape == (tiny.BLOCK - 1, tiny.DRAFT_VOCAB)
    ids = weights.target_ids()
    assert ids is not None
    assert proposals(weights, logits) == [ids[i] for i in logits.argmax(-1)]


# ------------------------------------------------------------------ the trained pair


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(read_model_info(open_checkpoint(TRAINED / "trained_qwen3")).weights)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return Drafter(read_drafter_info(open_checkpoint(TRAINED / "trained_dflash_qwen3")).weights)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TRAINED / "trained_qwen3" / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def total(runs: list[GreedyRun]) -> float:
    return GreedyRun([], [kept for run in runs for kept in run.kept]).tokens_per_step


def test_drafts_of_the_trained_drafter_are_accepted(target: Target, drafter: Drafter, prompts: list[list[int]]) -> None:
    runs = [greedy_with_drafts(target, drafter, prompt, 16) for prompt in prompts]
    assert total(runs) > 1.5
    assert any(kept == 0 for run in runs for kept in run.kept)  # some steps reject all drafts
    # The tokens are right for any features; only acceptance depends on them.
    blind = [greedy_with_drafts(target, drafter, prompt, 16, spoil=np.zeros_like) for prompt in prompts]
    assert total(blind) < total(runs) - 0.3
    for run, other in zip(runs, blind, strict=True):
        length = min(len(run.tokens), len(other.tokens))
        assert run.tokens[:length] == other.tokens[:length]


def test_drafts_do_not_change_the_tokens(target: Target, drafter: Drafter, prompts: list[list[int]]) -> None:
    prompt = prompts[2]
    run = greedy_with_drafts(target, drafter, prompt, 10)
    tokens = list(prompt)
    for _ in run.tokens:
        tokens.append(target.run(tokens, (0,))[0][-1])
    assert tokens[len(prompt) :] == run.tokens
    # `draft_along` must take the same steps.
    known = draft_along(target, drafter, tokens, len(prompt))
    assert known.kept == run.kept[: len(known.kept)]
    assert len(known.kept) >= 4

"""The reference MTP head, compared with transformers' layer and norms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.mtp import read_mtp_info
from onedraw.models.registry import read_model_info
from tests.reference.forward import forward, norm
from tests.reference.mtp import mtp_logits
from tests.support import tiny, tiny_modern

TOKENS = np.random.default_rng(0).integers(0, tiny.VOCAB, 40).tolist()


@pytest.mark.parametrize("name", ["qwen3_5_mtp", "qwen3_5_moe_mtp"])
def test_the_reference_equals_transformers_modules(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_safetensors(name, tmp_path))
    info = read_model_info(checkpoint)
    target, mtp = info.weights, read_mtp_info(checkpoint, info).weights
    hidden = norm(forward(target, TOKENS[:-1])[1][-1], target.outer()["norm"], target.spec)
    found, _ = mtp_logits(target, mtp, hidden, TOKENS[1:])
    expected = by_transformers(name, torch.from_numpy(hidden))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


def by_transformers(name: str, hidden: torch.Tensor) -> np.ndarray:
    """A transformers model of one layer that receives the output of fc is the head."""
    whole = tiny.build(name).double()
    stored = {name: value.double() for name, value in tiny_modern.mtp_tensors(whole.config, 0).items()}
    config = type(whole.config)(**{**whole.config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    maker = tiny_modern.t.AutoModelForCausalLM
    single = maker.from_config(config, dtype=torch.float64, experts_implementation="eager").eval()
    state = {key.replace("mtp.", "model."): value for key, value in stored.items() if "fc" not in key}
    state |= {key: value for key, value in whole.state_dict().items() if "embed_tokens" in key or "lm_head" in key}
    single.load_state_dict(state)
    embedded = single.model.embed_tokens(torch.tensor(TOKENS[1:]))
    normed = [rms(embedded, stored["mtp.pre_fc_norm_embedding.weight"]), rms(hidden, stored["mtp.pre_fc_norm_hidden.weight"])]
    with torch.no_grad():
        return single(inputs_embeds=(torch.cat(normed, -1) @ stored["mtp.fc.weight"].T)[None]).logits[0].numpy()


def rms(x: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + distance)

"""The MTP head of a checkpoint on the device: one more attention layer that reads the target's hidden states.

In: tokens one position ahead, and what the target (or the head itself) gave at each position. Out: hidden states for the
target's head. `models/mtp.py` has the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onedraw.backends.torch.model.layer import load_layer, rope_tables, run_layer
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.model.weight_loader import WeightLoader
from onedraw.backends.torch.ops.base import PreparedInputs
from onedraw.backends.torch.runner.inputs import InputLayout, Inputs
from onedraw.backends.torch.state.model_state import ModelState, StateSizes
from onedraw.models.mtp import MtpSpec, MtpWeights


class MtpHead:
    """Owner: a DraftModel. Embedding and head are the target's."""

    name = "mtp"
    late = True

    def __init__(self, spec: MtpSpec, weights: MtpWeights, *, target: Transformer, layout: InputLayout, max_context: int) -> None:
        self.transformer, self._spec = target, spec
        loader = WeightLoader(weights, ops=target.ops, dtype=target.dtype, device=target.device, norm=spec.norm)
        self._fc = loader.linear(None, "fc")
        self._embed_norm, self._hidden_norm = loader.norm(None, "embed_norm"), loader.norm(None, "hidden_norm")
        self._norm = loader.norm(None, "norm")
        self._layer = load_layer(0, spec.layer, loader, target.ops, spec.eps)
        sizes = StateSizes(pages=layout.alone.scratch, page_size=layout.page_size)
        self.state = ModelState(spec.layers, sizes, dtype=target.dtype, device=target.device)
        self._ropes = rope_tables(spec.layers, max(max_context, 64) + 1, dtype=target.dtype, device=target.device)

    def run(self, inputs: Inputs, before: Tensor | None) -> Tensor:
        assert before is not None
        ops, eps = self.transformer.ops, self._spec.eps
        embedded = ops.rms_norm(self.transformer.embed(inputs.tokens), self._embed_norm, eps)
        joined = torch.cat([embedded, ops.rms_norm(before, self._hidden_norm, eps)], dim=1)  # [T, 2E]
        prepared = PreparedInputs(ops, inputs, self._ropes)
        x = run_layer(self._fc(joined), self._layer, ops=ops, store=self.state.stores[0], prepared=prepared, eps=eps)
        return ops.rms_norm(x, self._norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.transformer.logits(hidden)

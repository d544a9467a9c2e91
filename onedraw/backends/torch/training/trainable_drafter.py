"""A DFlash drafter with weights that can be trained: features and blocks in, hidden states of the blocks' slots out.

The formulas are those of `models/dflash.py`; here many blocks of many sequences are computed at once, in plain torch with
gradients. A feature is the target's residual stream after a layer that the drafter names; an anchor is the known token that
begins a block. Features of different layers differ in scale by orders of magnitude, so they are multiplied by `feature_scale`
while training, which `exported` folds into `fc`. Axes: R sequences, S positions, N blocks per sequence, B slots of a block, G
groups of n blocks (N = G * n) whose attention is one product, F features of a position, E hidden width, H heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from onedraw.backends.torch.model.layer import rope_tables
from onedraw.models.dflash import drafter_shapes
from onedraw.models.spec import AttentionSpec, DrafterSpec
from onedraw.models.weight_names import WeightKey

GROUP = 8  # blocks of a sequence whose attention is one product; it has scores between different blocks too, which are masked


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks to draft, N in each of R sequences."""

    features: Tensor  # [R, S, F], zeros after the end of a sequence
    embedded: Tensor  # [R, N, B, E]: the embeddings of each anchor and of the mask tokens after it
    anchors: Tensor  # [R, N] positions of the anchors; a block attends to the context before its anchor


class TrainableDrafter:
    """The weights of a drafter in float32 with gradients. Owner: the trainer."""

    def __init__(
        self,
        spec: DrafterSpec,
        weights: Mapping[WeightKey, Tensor],
        *,
        feature_scale: Tensor,
        positions: int,
        device: torch.device,
    ) -> None:
        """`weights`: by the names of a checkpoint; `feature_scale` [F]: a factor for each feature; `positions`: the longest
        sequence plus one block."""
        self.spec, self.feature_scale = spec, feature_scale
        self.weights = {key: weight.detach().to(device, torch.float32).clone() for key, weight in weights.items()}
        self.weights[None, "fc"] /= feature_scale
        for weight in self.weights.values():
            weight.requires_grad_()
        self._ropes = rope_tables(spec.layers, positions, dtype=torch.float32, device=device)

    @property
    def matrices(self) -> list[Tensor]:
        return [weight for weight in self.weights.values() if weight.ndim == 2]

    @property
    def vectors(self) -> list[Tensor]:
        return [weight for weight in self.weights.values() if weight.ndim == 1]

    def exported(self) -> dict[WeightKey, npt.NDArray[np.float32]]:
        """The weights as a checkpoint has them."""
        found = {key: weight.detach() for key, weight in self.weights.items()}
        found[None, "fc"] = found[None, "fc"] * self.feature_scale
        return {key: weight.float().cpu().numpy() for key, weight in found.items()}

    def hidden(self, blocks: Blocks) -> Tensor:
        """Hidden states of all slots after the last norm, [R, N, B, E]."""
        rows, positions, _ = blocks.features.shape
        _, count, slots, width = blocks.embedded.shape
        scaled = blocks.features.float() * self.feature_scale
        context = self._norm(F.linear(scaled, self.weights[None, "fc"]), None, "hidden_norm")  # [R, S, E]
        x = blocks.embedded.float().reshape(rows, count * slots, width)
        places = (blocks.anchors[..., None] + torch.arange(slots, device=x.device)).flatten(1)  # [R, N * B]
        for index, layer in enumerate(self.spec.layers):
            mixer = layer.attention
            mask = self._mask(blocks.anchors, positions, mixer.window, causal=self.spec.causal_in_block[index])
            h = self._norm(x, index, "attn_norm")
            x = x + F.linear(self._attend(index, mixer, h, context, places, mask), self.weights[index, "o"])
            h = self._norm(x, index, "mlp_norm")
            gate, up = (F.linear(h, self.weights[index, name]) for name in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self.weights[index, "down"])
        return self._norm(x, None, "norm").view(rows, count, slots, width)

    def _norm(self, x: Tensor, layer: int | None, name: str) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weights[layer, name], self.spec.eps)

    def _mask(self, anchors: Tensor, positions: int, window: int | None, *, causal: bool) -> Tensor:
        """Which keys a slot attends to: the context before its anchor, then the slots of its own block. [R * G, 1, n * B, S +
        n * B]"""
        slots = self.spec.block
        own = torch.arange(GROUP * slots, device=anchors.device)
        block = own[:, None] // slots == own[None] // slots
        block = block & (own[:, None] >= own[None]) if causal else block
        before = anchors.reshape(-1, GROUP).repeat_interleave(slots, 1)[..., None]  # [R * G, n * B, 1]
        place = torch.arange(positions, device=anchors.device)
        seen = place < before
        if window is not None:
            seen = seen & (place >= before - window)
        return torch.cat([seen, block.expand(len(seen), -1, -1)], dim=2)[:, None]

    def _attend(self, index: int, mixer: AttentionSpec, h: Tensor, context: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        """The attention output before its projection, [R, N * B, H * D]."""
        rows, length, _ = h.shape
        table = self._ropes[mixer.rope]
        heads, kv_heads, width = mixer.heads, mixer.kv_heads, mixer.head_dim
        group = mask.shape[2]
        groups = length // group

        def projected(x: Tensor, name: str, count: int) -> Tensor:
            return F.linear(x, self.weights[index, name]).view(rows, -1, count, width)

        def keys_and_values(x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
            keys = rotated(self._norm(projected(x, "k", kv_heads), index, "k_norm"), angles)
            return keys, projected(x, "v", kv_heads)

        def joined(seen: Tensor, own: Tensor) -> Tensor:
            """Context and block of every group: [R * G, H, S + n * B, D]."""
            seen = seen.transpose(1, 2)[:, None].expand(-1, groups, -1, -1, -1)
            own = own.view(rows, groups, group, kv_heads, width).transpose(2, 3)
            both = torch.cat([seen, own], dim=3).flatten(0, 1)
            return both.repeat_interleave(heads // kv_heads, dim=1)

        own_angles = table[places]  # [R, N * B, 2, d / 2]
        query = rotated(self._norm(projected(h, "q", heads), index, "q_norm"), own_angles)
        query = query.view(rows * groups, group, heads, width).transpose(1, 2)
        seen_keys, seen_values = keys_and_values(context, table[: context.shape[1]].expand(rows, -1, -1, -1))
        own_keys, own_values = keys_and_values(h, own_angles)
        keys, values = joined(seen_keys, own_keys), joined(seen_values, own_values)
        # Under autocast norms give float32 and projections bf16; attention needs one dtype.
        kept = query.dtype if not torch.is_autocast_enabled(query.device.type) else torch.get_autocast_dtype(query.device.type)
        query, keys, values = query.to(kept), keys.to(kept), values.to(kept)
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=mixer.scale)
        return found.transpose(1, 2).reshape(rows, length, heads * width)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of x [R, T, H, D] by cos and sin [R, T, 2, d / 2]; dimensions from d on are copied."""
    half = angles.shape[-1]
    cos, sin = angles[:, :, :1], angles[:, :, 1:]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], dim=-1)


def initial_weights(spec: DrafterSpec, *, head: Tensor, generator: torch.Generator) -> dict[WeightKey, Tensor]:
    """Random weights of an untrained drafter. Outputs of attention and feed-forward begin small, and the last norm begins at the
    scale at which the head's logits [E → V] have a standard deviation of about 1."""
    found: dict[WeightKey, Tensor] = {}
    for key, shape in drafter_shapes(spec).items():
        if len(shape) == 1:
            found[key] = torch.ones(shape)
            continue
        scale = (3 * shape[1]) ** -0.5 / (math.sqrt(2 * len(spec.layers)) if key[1] in ("o", "down") else 1.0)
        found[key] = torch.randn(shape, generator=generator) * scale
    found[None, "norm"] /= head.float().norm(dim=1).mean().clamp(min=1e-3).cpu()
    return found

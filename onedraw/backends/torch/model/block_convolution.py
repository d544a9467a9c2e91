"""The convolutions of a DFlash2 layer, over the slots of a block (formula: `models/dflash.py`).

In: the normed input h [T, E] of a sublayer (attention or feed-forward), the place of each token in its block, and the sublayer.
Out: the sublayer's output [T, E], with a convolution before and after the sublayer. A token reads tokens of its own block only.
Axes: T tokens, E hidden width, G neighbouring channels that share one input-dependent kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from onedraw.backends.torch.model.weight_loader import WeightLoader
from onedraw.backends.torch.ops.plain.linear import Linear
from onedraw.models.spec import ConvolutionSpec


@dataclass(frozen=True, slots=True)
class BlockConvolution:
    """The two convolutions around one sublayer. The kernel of a channel is a fixed part plus one that depends on h."""

    spec: ConvolutionSpec
    base: Tensor  # [2, taps, E], float32: the fixed parts, before the sublayer and after it
    projection: Linear  # from h to the parts that depend on the input, [2, taps, E / G]

    @staticmethod
    def load(index: int, name: str, spec: ConvolutionSpec, loader: WeightLoader) -> BlockConvolution:
        return BlockConvolution(spec, loader.wide(index, name), loader.linear(index, f"{name}_proj"))

    def __call__(self, h: Tensor, slots: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        _, taps, hidden = self.base.shape
        dynamic = self.projection(h).float().view(len(h), 2, taps, hidden // self.spec.group)
        kernel = self.base + dynamic.repeat_interleave(self.spec.group, dim=3)  # [T, 2, taps, E]
        out = sublayer(self._convolve(h, kernel[:, 0], slots).to(h.dtype))
        return self._convolve(out, kernel[:, 1], slots).to(out.dtype)

    def _convolve(self, z: Tensor, kernel: Tensor, slots: Tensor) -> Tensor:
        wide = z.float()
        found = kernel[:, 0] * wide
        for tap in range(1, kernel.shape[1]):
            inside = (slots >= tap)[:, None]  # False where `roll` brings in a row of another block
            found = found + kernel[:, tap] * wide.roll(tap, 0).where(inside, 0.0)
        return found


@dataclass(frozen=True, slots=True)
class LayerConvolutions:
    mixer: BlockConvolution
    feed_forward: BlockConvolution

    @staticmethod
    def load(index: int, spec: ConvolutionSpec, loader: WeightLoader) -> LayerConvolutions:
        return LayerConvolutions(
            BlockConvolution.load(index, "attn_conv", spec, loader), BlockConvolution.load(index, "mlp_conv", spec, loader)
        )

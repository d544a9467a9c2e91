"""The gated feed-forward: down(activation(gate x) * up x).

In: x [T, E]. Out: [T, E]. Gate and up are one product; their width is padded so that no element of the activation
falls into the scalar tail of a vector loop.
"""

from __future__ import annotations

from torch import Tensor

from onedraw.backends.torch.layers.elementwise import gated
from onedraw.backends.torch.layers.linear import Linear
from onedraw.models.spec import MlpSpec


def feed_forward(x: Tensor, *, gate_up: Linear, down: Linear, spec: MlpSpec) -> Tensor:
    return down(gated(gate_up(x), spec.activation))

"""Which models the xla backend supports. No jax import, so `inspect` can check without it.

In: a ModelSpec. Out: nothing, or UnsupportedModel that names the family.
"""

from __future__ import annotations

from onedraw.errors import UnsupportedModel
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5")


def require_supported(spec: ModelSpec) -> None:
    """UnsupportedModel for architectures that the layers of this backend do not implement."""
    if spec.family not in FAMILIES or spec.softcap is not None or not all(map(_plain, spec.layers)):
        raise UnsupportedModel(
            f"--backend xla does not support {spec.family} yet; it runs {', '.join(FAMILIES)}; use --backend torch"
        )


def _plain(layer: LayerSpec) -> bool:
    """Whether a layer is a mixer and a gated feed-forward with pre-norms, without the extras of some families."""
    mixer = layer.mixer
    odd = isinstance(mixer, AttentionSpec) and (mixer.v_norm or mixer.keys_as_values or mixer.reuses is not None)
    added = layer.sandwich or layer.parallel_experts is not None or layer.inputs or layer.scaled
    return isinstance(layer.feed_forward, MlpSpec) and not odd and not added


def conv_width(spec: ModelSpec) -> int:
    """Positions that the convolutions of recurrent layers read, the same in all layers; 0 without recurrent layers."""
    return next((layer.mixer.conv for layer in spec.layers if isinstance(layer.mixer, DeltaSpec)), 0)

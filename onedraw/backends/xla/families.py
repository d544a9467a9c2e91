"""Which models this backend interprets. Pure: no jax.

In: a ModelSpec. Out: nothing, or UnsupportedModel that names the family.
"""

from __future__ import annotations

from onedraw.errors import UnsupportedModel
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5")


def require_supported(spec: ModelSpec) -> None:
    """Refuse, by name, what the layers of this backend do not compute."""
    if spec.family not in FAMILIES or spec.softcap is not None or not all(map(_plain, spec.layers)):
        raise UnsupportedModel(
            f"--backend xla does not interpret {spec.family} yet; it runs {', '.join(FAMILIES)}; use --backend torch"
        )


def _plain(layer: LayerSpec) -> bool:
    """A mixer and a gated feed-forward behind norms, and nothing that some families add to that."""
    mixer = layer.mixer
    odd = isinstance(mixer, AttentionSpec) and (mixer.v_norm or mixer.keys_as_values or mixer.reuses is not None)
    added = layer.sandwich or layer.beside is not None or layer.inputs or layer.scaled
    return isinstance(layer.feed_forward, MlpSpec) and not odd and not added


def conv_width(spec: ModelSpec) -> int:
    """Positions that the convolutions of recurrent layers read; 0 where there are none. All layers have the same."""
    return next((layer.mixer.conv for layer in spec.layers if isinstance(layer.mixer, DeltaSpec)), 0)

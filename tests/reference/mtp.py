"""Reference implementation of the MTP head from its spec and weights: double precision, no cache."""

from __future__ import annotations

import numpy as np

from onedraw.models.mtp import MtpWeights
from onedraw.models.weight_names import ModelWeights
from tests.reference.forward import head, norm, run_layer


def mtp_logits(target: ModelWeights, mtp: MtpWeights, hidden: np.ndarray, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] of the token after next at every position, and the hidden states for the next draft [T, E].

    hidden [T, E] is the target's residual after its last norm at positions 0 … T - 1, tokens are those at 1 … T.
    """
    spec, outer = target.spec, target.outer()
    w = {name: value.astype(np.float64) for name, value in mtp.outer().items()}
    layer = {name: value.astype(np.float64) for name, value in mtp.layer(0).items()}
    embedded = outer["embed"][tokens].astype(np.float64)
    joined = np.concatenate([norm(embedded, w["embed_norm"], spec), norm(hidden, w["hidden_norm"], spec)], axis=-1)
    y = run_layer(joined @ w["fc"].T, layer, mtp.spec.layer, spec)
    read = norm(y, w["norm"], spec)
    return head(read, outer["embed" if spec.tied else "head"], spec), read

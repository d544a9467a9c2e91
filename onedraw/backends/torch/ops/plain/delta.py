"""Gated DeltaNet in plain torch: the reference of the kernels, and the implementation for devices without kernels.

In: projections of the step's tokens, the step's spans, a layer's states. Out: the layer's output at every token. Axes: T tokens,
Hk key heads of size Dk = dk, Hv value heads of size Dv, C convolution channels (q, k and v), K taps of the convolution.
n = CHUNK positions. A lane is the slot of a sequence's recurrent state; the rollback buffer holds the state increments of drafts
until the commit (`recurrent_rollback.py`). a, b and z are projections of the input, like q, k and v.
In the formulas Q, K and V are the queries, keys and values of a chunk.

    u = silu(conv(projected qkv)); q, k ← L2-normed per head, q / sqrt(dk);  β = sigmoid(b);  g = decay · softplus(a + bias)
    recurrent  S ← e^g S;  d = β (v - Sᵀk);  S ← S + k dᵀ;  o = Sᵀq
    chunked    Γ = cumsum(g), D_ij = e^(Γi - Γj):  (I + tril₋₁(β KKᵀ D)) V' = β (V - e^Γ KS);
               O = e^Γ QS + tril(QKᵀ D) V';  S ← e^Γn S + (K e^(Γn - Γ))ᵀ V'
    output     RMSNorm(o) · silu(z)

Value head i uses key head i // (value_heads // key_heads). Everything is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onedraw.backends.torch.ops.plain.elementwise import activated, opened
from onedraw.backends.torch.ops.plain.recurrent_rollback import advance_state, replay_draft
from onedraw.backends.torch.sampling.exact import apply_elementwise, ordered_sum
from onedraw.backends.torch.state.recurrent_state import CHUNK, LaneStore, RecurrentSpan, RecurrentSpans
from onedraw.models.spec import DeltaSpec
from onedraw.sampling.verify import draft_paths

L2_EPS = 1e-6  # added to the sum of squares in the L2 normalization of queries and keys


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The float32 weights of a delta layer, apart from its projections."""

    conv: Tensor  # [K, C]: taps of the convolution, oldest first
    decay: Tensor  # [Hv], negative: multiplied by the softplus, it gives g, the logarithm of the decay
    bias: Tensor  # [Hv]: is added to the projection a
    norm: Tensor  # [Dv]: weight of the output norm
    eps: float  # epsilon of the output norm


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """Queries, keys, values and gates of every token."""

    q: Tensor  # [T, Hk, Dk]: queries
    k: Tensor  # [T, Hk, Dk]: keys
    v: Tensor  # [T, Hv, Dv]: values
    g: Tensor  # [T, Hv]: logarithm of the decay
    decay: Tensor  # [T, Hv]: the decay, e^g
    beta: Tensor  # [T, Hv]: how much of a value replaces the one that the state holds for its key


def delta(projected: Tensor, spans: RecurrentSpans, *, weights: DeltaWeights, store: LaneStore) -> Tensor:
    """Run the layer: projected [T, C + Hv * Dv + 2 Hv], columns of qkv, z, a and b → [T, Hv * Dv]. The states of lanes advance by
    known tokens; drafts only write their increments to the rollback buffer."""
    spec, total = store.spec, len(projected)
    heads, inner = spec.value_heads, spec.value_heads * spec.value_dim
    wide = projected.float()
    fed, z, a, b = torch.split(wide, [spec.channels, inner, heads, heads], dim=1)
    # `spans.taps` has indices of these rows: the step's tokens, then the last inputs of every lane (its convolution window), then
    # a row of zeros, index -1, for positions before the sequence.
    source = torch.cat([fed, store.windows.view(-1, spec.channels), fed.new_zeros(1, spec.channels)])
    gated = _gate(source, a, b, spans, weights, spec)
    out = fed.new_zeros(total, heads, spec.value_dim)
    for span in spans.spans:
        _recur(span, gated, out, store)
    if spans.spans:
        store.windows[spans.lanes] = source[spans.closings]
        store.saved_windows[spans.slots] = source[spans.kept]
        tokens, places = spans.drafted
        store.fed[places] = fed[tokens]
    return _close(out, z, weights, spec)


# ------------------------------------------------------------------ before and after the state


def _gate(source: Tensor, a: Tensor, b: Tensor, spans: RecurrentSpans, weights: DeltaWeights, spec: DeltaSpec) -> DeltaGates:
    total = len(a)
    mixed = source[spans.taps[:, 0]] * weights.conv[0]  # [T, C]
    for tap in range(1, spec.conv):
        mixed += source[spans.taps[:, tap]] * weights.conv[tap]
    mixed = activated(mixed, "silu")
    keys = spec.key_heads * spec.key_dim
    q, k, v = torch.split(mixed, [keys, keys, spec.value_heads * spec.value_dim], dim=1)
    q, k = q.reshape(total, spec.key_heads, -1), k.reshape(total, spec.key_heads, -1)
    g = weights.decay * opened(a + weights.bias, "softplus")
    return DeltaGates(
        q=_unit(q) * spec.key_dim**-0.5,
        k=_unit(k),
        v=v.reshape(total, spec.value_heads, -1),
        g=g,
        decay=apply_elementwise(torch.exp, g),
        beta=opened(b.contiguous(), "sigmoid"),
    )


def _unit(x: Tensor) -> Tensor:
    return x * (ordered_sum(x.square()) + L2_EPS).rsqrt_().unsqueeze(-1)


def _close(out: Tensor, z: Tensor, weights: DeltaWeights, spec: DeltaSpec) -> Tensor:
    scale = ordered_sum(out.square()).mul_(1 / spec.value_dim).add_(weights.eps).rsqrt_().unsqueeze(-1)
    normed = out.mul_(scale).mul_(weights.norm)
    return normed.view(len(out), -1).mul_(activated(z.clone(), "silu"))


# ------------------------------------------------------------------ the state


def _recur(span: RecurrentSpan, gated: DeltaGates, out: Tensor, store: LaneStore) -> None:
    state = store.states[span.lane]  # [Hv, Dk, Dv], a view that is updated in place
    if span.fresh:
        state.zero_()
    saves = dict(span.saves)
    for start in range(0, span.prompt, CHUNK):
        stop = min(start + CHUNK, span.prompt)
        _chunk(state, gated, slice(span.first + start, span.first + stop), out)
        if stop in saves:
            store.saved_states[saves[stop]] = state
    for token in range(span.first + span.prompt, span.first + span.known):
        _step(state, gated, token, out)
    if span.drafts:
        _draft(span, state, gated, out, store)


def _draft(span: RecurrentSpan, state: Tensor, gated: DeltaGates, out: Tensor, store: LaneStore) -> None:
    """Compute every draft from its parent's state. If the parent is not the preceding draft, the parent's state is rebuilt from
    increments."""
    paths = draft_paths(span.drafts)
    work, last = state.clone(), -1
    for index, draft in enumerate(span.drafts):
        if draft.parent != last:
            work = state.clone()
            for index_before in paths[1 + draft.parent]:
                replay_draft(work, store, span.held + index_before)
        token, place = span.first + span.known + index, span.held + index
        store.decays[place], store.keys[place] = gated.decay[token], gated.k[token]
        store.changes[place] = _step(work, gated, token, out)
        last = index


def _step(state: Tensor, gated: DeltaGates, token: int, out: Tensor) -> Tensor:
    """The recurrent form for one token: update the state, store the output, and return the change [Hv, Dv] written into the
    state."""
    repeats = state.shape[0] // gated.k.shape[1]
    key, query = gated.k[token].repeat_interleave(repeats, 0), gated.q[token].repeat_interleave(repeats, 0)  # [Hv, Dk]
    decay = gated.decay[token]
    held = ordered_sum((state * decay[:, None, None] * key.unsqueeze(2)).transpose(1, 2))  # [Hv, Dv]
    change = (gated.v[token] - held) * gated.beta[token].unsqueeze(1)
    advance_state(state, decay, key, change)
    out[token] = ordered_sum((state * query.unsqueeze(2)).transpose(1, 2))
    return change


def _chunk(state: Tensor, gated: DeltaGates, tokens: slice, out: Tensor) -> None:
    """The chunked form for up to CHUNK tokens, padded with zeros to a whole chunk, so that the shape is fixed; padding does not
    change the state."""
    repeats = state.shape[0] // gated.k.shape[1]
    count = tokens.stop - tokens.start
    q, k = (_tile(x[tokens]).repeat_interleave(repeats, 0) for x in (gated.q, gated.k))  # [Hv, n, Dk]
    v, beta = _tile(gated.v[tokens]), _tile(gated.beta[tokens].unsqueeze(2))  # [Hv, n, Dv], [Hv, n, 1]
    total = _tile(gated.g[tokens].unsqueeze(2)).squeeze(2).cumsum(1)  # [Hv, n]
    apart = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill_(_above(state.device), float("-inf"))
    fade = apply_elementwise(torch.exp, apart)  # [Hv, n, n], zero above the diagonal
    so_far = apply_elementwise(torch.exp, total).unsqueeze(2)
    lower = torch.tril(beta * torch.bmm(k, k.transpose(1, 2)) * fade, diagonal=-1)
    right = beta * (v - so_far * torch.bmm(k, state))
    changes = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    seen = so_far * torch.bmm(q, state) + torch.bmm(torch.bmm(q, k.transpose(1, 2)) * fade, changes)
    out[tokens] = seen.transpose(0, 1)[:count]
    rest = apply_elementwise(torch.exp, total[:, -1:] - total).unsqueeze(2)
    state.mul_(so_far[:, -1:]).add_(torch.bmm((k * rest).transpose(1, 2), changes))


def _tile(x: Tensor) -> Tensor:
    """Pad the positions of a chunk with zeros and put heads first: [n, heads, W] → [heads, CHUNK, W] for heads of size W."""
    return F.pad(x, (0, 0, 0, 0, 0, CHUNK - len(x))).transpose(0, 1).contiguous()


def _above(device: torch.device) -> Tensor:
    return torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).triu_(1)

"""The training loss: how many drafts a block keeps when drafter and target share the noise.

At temperature T the target samples argmax(log p + g) and the drafter proposes argmax(log q + g), with the same Gumbel noise g; p
and q are their distributions at T. Each argmax is a race: token x arrives after an exponential time with rate p(x) for the target
and q(x) for the drafter, both computed from one uniform number, and the first token to arrive is sampled. So x is first in both
races with probability 1 / Σ_y max(p(y)/p(x), q(y)/q(x)). A draft is kept with probability
    a(p, q) = Σ_x 1 / Σ_y max(p(y) / p(x), q(y) / q(x)),
which is 1 for q = p. For a greedy request p is one token x, and a(p, q) = q(x): then -log a is the cross-entropy.

A block keeps Σ_k Π_{i<=k} a_i drafts on average. The gradient of that sum is the one of Σ_k w_k log a_k with the constants w_k =
Σ_{j>=k} Π_{i<=j} a_i. In these weights, (a + 1) / 2 stands for a, so that late slots of an untrained drafter learn too.

A block is a known token and the B - 1 slots after it, which are drafted at once. Axes: M slots, V vocabulary, K likeliest tokens
of the target, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_LOG = -30.0  # smaller log-probabilities are replaced by this one


@dataclass(frozen=True, slots=True)
class SlotLabels:
    """The target's tokens and probabilities at M drafted slots, which the drafter is trained to match."""

    token: Tensor  # [M] the token of the sequence
    likeliest: Tensor  # [M, K] token ids
    logprobs: Tensor  # [M, K] log-probabilities of `likeliest`, at temperature 1
    temperature: Tensor  # [M] the request's temperature; 0 is greedy


def keep_log_probability(logits: Tensor, labels: SlotLabels) -> Tensor:
    """log a(p, q) of every slot, [M], from the drafter's logits [M, V].

    The sums run over the target's likeliest tokens, and all other tokens count as one. For a greedy request the target's
    distribution is one token with probability 1.
    """
    greedy = labels.temperature == 0
    temperature = torch.where(greedy, 1.0, labels.temperature)[:, None]
    log_q = torch.log_softmax(logits.float() / temperature, dim=1)
    ids, log_p = labels.likeliest.long(), labels.logprobs / temperature
    rest = (1 - labels.logprobs.exp().sum(1, keepdim=True)).clamp(min=1e-9).log() / temperature
    log_p = torch.log_softmax(torch.cat([log_p, rest], dim=1), dim=1)  # [M, K + 1], the last for all other tokens
    q = log_q.gather(1, ids)
    log_q_rest = torch.log1p(-q.exp().sum(1, keepdim=True).clamp(max=1 - 1e-6))
    both = torch.cat([q, log_q_rest], dim=1).clamp(min=LEAST_LOG)
    log_p = log_p.clamp(min=LEAST_LOG)
    beaten = torch.maximum(log_p[:, None] - log_p[:, :-1, None], both[:, None] - both[:, :-1, None])  # [M, x: K, y: K + 1]
    kept = torch.logsumexp(-torch.logsumexp(beaten, dim=2), dim=1)
    return torch.where(greedy, log_q.gather(1, labels.token[:, None])[:, 0], kept)


def length_weights(kept: Tensor, live: Tensor) -> Tensor:
    """The weight of every slot [N, B - 1] from the probability that it is kept, and whether the sequence reaches it."""
    reached = ((kept + 1) / 2).cumprod(1) * live
    return reached.flip(1).cumsum(1).flip(1) * live


def expected_length(kept: Tensor, live: Tensor) -> Tensor:
    """The expected number of kept drafts of every block, [N]."""
    return (kept * live).cumprod(1).sum(1)


def decay_weights(live: Tensor, gamma: float = 4.0) -> Tensor:
    """The weight of every slot in the alternative loss: it decreases with the slot's number, by the factor e^(-1 / gamma)."""
    return torch.exp(-torch.arange(live.shape[1], device=live.device) / gamma) * live


def cross_entropy(logits: Tensor, labels: SlotLabels, *, soft: bool) -> Tensor:
    """Cross-entropy of every slot, [M]: against the target's likeliest tokens at temperature 1, or against the sequence's
    token."""
    log_q = torch.log_softmax(logits.float(), dim=1)
    own = log_q.gather(1, labels.token[:, None])[:, 0]
    if not soft:
        return -own
    outside = (labels.likeliest != labels.token[:, None]).all(1)
    return -(labels.logprobs.exp() * log_q.gather(1, labels.likeliest.long())).sum(1) - own * outside

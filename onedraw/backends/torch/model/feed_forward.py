"""The feed-forward of a layer: one gated product, or a mixture of experts.

In: normed tokens h [T, E] (and, for a router with a norm of its own, the residual). Out: [T, E]. Experts compute the tokens that
are routed to them and are added in expert order, so neither the batch nor the grouping changes a token's sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onedraw.backends.torch.model.weight_loader import LANE, WeightLoader
from onedraw.backends.torch.ops.base import GatedProduct, Ops
from onedraw.backends.torch.ops.plain.experts import ExpertBank
from onedraw.backends.torch.ops.plain.linear import Linear
from onedraw.models.spec import Activation, MlpSpec, MoeSpec


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(act(gate) * up). Padding adds zero rows and columns, whose products are exact zeros."""

    gate_up: Linear
    gated_product: GatedProduct | None  # the same product with the activation fused, where there is such an operation
    down: Linear
    activation: Activation

    @staticmethod
    def load(index: int, spec: MlpSpec, loader: WeightLoader, names: tuple[str, str, str] = ("gate", "up", "down")) -> Mlp:
        gate, up, down = names
        gate_up = loader.linear(
            index,
            gate,
            up,
            bias=loader.kept(index, f"{gate}_bias", f"{up}_bias", pad=LANE) if spec.bias else None,
            pad=LANE,
        )
        gated_product = loader.ops.gated_product(gate_up, spec.activation)
        return Mlp(
            gate_up=gated_product if isinstance(gated_product, Linear) else gate_up,
            gated_product=gated_product,
            down=loader.linear(index, down, bias=loader.kept(index, f"{down}_bias") if spec.bias else None, pad_columns=LANE),
            activation=spec.activation,
        )

    @property
    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def __call__(self, h: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        return self.down(self._gated(h, ops))

    def added(self, h: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        """The same plus the residual."""
        return self.down.added(self._gated(h, ops), residual)

    def _gated(self, h: Tensor, ops: Ops) -> Tensor:
        return ops.gated(self.gate_up(h), self.activation) if self.gated_product is None else self.gated_product.gated(h)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    spec: MoeSpec
    router: Linear
    select_bias: Tensor | None
    expert_scale: Tensor | None
    router_scale: Tensor | None  # of the router's own norm
    bank: ExpertBank
    shared: Mlp | None
    shared_route: Linear | None
    eps: float

    @staticmethod
    def load(index: int, spec: MoeSpec, loader: WeightLoader, eps: float) -> MixtureOfExperts:
        shared = MlpSpec(spec.shared, spec.activation)
        return MixtureOfExperts(
            spec=spec,
            router=loader.linear(index, "router", pad=LANE),
            select_bias=loader.wide(index, "select_bias") if spec.select_bias else None,
            expert_scale=loader.wide(index, "expert_scale") if spec.expert_scale else None,
            router_scale=loader.wide(index, "router_scale") if spec.own_router_norm else None,
            bank=loader.bank(index, spec.activation),
            shared=Mlp.load(index, shared, loader, ("shared_gate", "shared_up", "shared_down")) if spec.shared else None,
            shared_route=loader.linear(index, "shared_route", pad=LANE) if spec.shared_gate else None,
            eps=eps,
        )

    @property
    def linears(self) -> list[Linear]:
        shared = [] if self.shared is None else self.shared.linears
        return [self.router, *self.bank.linears, *shared, *([self.shared_route] if self.shared_route else [])]

    def __call__(self, h: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        out = self._experts(h, residual, ops)
        return out if self.shared is None else self._joined(out, h, residual, ops, added=False)

    def added(self, h: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        """The same plus the residual."""
        out = self._experts(h, residual, ops)
        return residual + out.to(residual.dtype) if self.shared is None else self._joined(out, h, residual, ops, added=True)

    def _joined(self, out: Tensor, h: Tensor, residual: Tensor, ops: Ops, *, added: bool) -> Tensor:
        assert self.shared is not None
        gate = None if self.shared_route is None else self.shared_route(h)
        return ops.join_shared(out, self.shared(h, residual, ops), gate, residual if added else None)

    def _experts(self, h: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        seen = h
        if self.router_scale is not None:
            normed = ops.rms_norm(residual, None, self.eps)
            seen = (normed.float() * self.router_scale * h.shape[1] ** -0.5).to(h.dtype)
        ids, weights = ops.choose_experts(self.router(seen), self.spec, bias=self.select_bias, factors=self.expert_scale)
        return self.bank(h, ids, weights, self.spec.scale)


FeedForward = Mlp | MixtureOfExperts


def load_feed_forward(index: int, spec: MlpSpec | MoeSpec, loader: WeightLoader, eps: float) -> FeedForward:
    if isinstance(spec, MoeSpec):
        return MixtureOfExperts.load(index, spec, loader, eps)
    return Mlp.load(index, spec, loader)

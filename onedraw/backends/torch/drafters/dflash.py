"""A DFlash drafter on the device: features of the target's committed tokens in, drafts for the next row out.

In: after every step, the captured residual streams and the kept tokens. Out: drafts per row. Context keys and values are
written once per committed position, into pages numbered like the target's; a block of [last token, mask …] then drafts several
positions in one pass, through the target's own embedding and head. The block's keys are past the committed positions, where the
next commit overwrites them before anything reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.torch.drafters.base import CompletedStep, Ranker, room_ahead
from onedraw.backends.torch.model.layer import AttentionMixer, Layer, load_layer, rope_tables, run_layer
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.model.weight_loader import WeightLoader
from onedraw.backends.torch.ops.base import PreparedInputs
from onedraw.backends.torch.ops.plain.linear import Linear
from onedraw.backends.torch.runner.inputs import InputLayout, Inputs, Span, lay_out
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.model_state import ModelState, StateSizes
from onedraw.models.dflash import DrafterWeights
from onedraw.models.spec import DrafterSpec
from onedraw.sampling.draft_ranking import Floats, Ids
from onedraw.types import Draft, Plan, Row, RowOutcome

# Candidates per depth, best first → a tree of drafts.
Arrange = Callable[[Sequence[Sequence[tuple[int, float]]]], tuple[Draft, ...]]


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """One row's block: the last sampled token at `start`, and masks after it."""

    index: int  # of the row in the plan
    row: Row
    token: int
    start: int
    count: int


class DflashDrafter:
    """Owner: the backend. Complete when constructed."""

    def __init__(
        self,
        spec: DrafterSpec,
        weights: DrafterWeights,
        *,
        target: Transformer,
        layout: InputLayout,
        lanes: int,
        max_context: int,
        arrange: Arrange,
    ) -> None:
        self._spec, self._target, self._layout, self._arrange = spec, target, layout.alone, arrange
        self._max_context = max_context
        self._ops, self._device = target.ops, target.device
        loader = WeightLoader(weights, ops=self._ops, dtype=target.dtype, device=self._device)
        self._fc = loader.linear(None, "fc")
        self._hidden_norm, self._norm = loader.kept(None, "hidden_norm"), loader.kept(None, "norm")
        self._embedding = loader.kept(None, "embed") if spec.own_embedding else None
        self._head = loader.linear(None, "head") if spec.own_head else target.head
        self._target_ids = weights.target_ids()
        self._layers: list[Layer] = []
        self._contexts: list[Linear] = []  # keys and values of a committed position, from its feature
        for index, layer in enumerate(spec.layers):
            self._layers.append(load_layer(index, layer, loader, self._ops, spec.eps))
            self._contexts.append(loader.linear(index, "k", "v"))
        sizes = StateSizes(pages=self._layout.scratch, page_size=layout.page_size)
        self.state = ModelState(spec.layers, sizes, dtype=target.dtype, device=self._device)
        self._ropes = rope_tables(spec.layers, max_context + spec.block, dtype=target.dtype, device=self._device)
        self._ranker = Ranker(lanes)

    @property
    def name(self) -> str:
        return "dflash"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Each once, in the order of the layers, as a step gives them."""
        return tuple(sorted(set(self._spec.target_layers)))

    @property
    def lookahead(self) -> int:
        return self._spec.block

    def open(self, rows: Sequence[Row]) -> None:
        self.state.open(rows)

    def draft(self, step: CompletedStep) -> list[tuple[Draft, ...]]:
        plan, rows = step.plan, step.rows
        self._ranker.learn(plan, rows)
        self._remember(plan, step.inputs, step.features, rows)
        blocks = [block for i, row in enumerate(plan.rows) if (block := self._block(i, row, rows[i])) is not None]
        found: list[tuple[Draft, ...]] = [()] * len(plan.rows)
        if blocks:
            for block, drafts in zip(blocks, self._draft(blocks), strict=True):
                found[block.index] = drafts
        return found

    # ------------------------------------------------------------------ context

    def _remember(self, plan: Plan, inputs: Inputs, features: list[Tensor], rows: tuple[RowOutcome, ...]) -> None:
        """Write keys and values of every committed position: known tokens, and kept drafts."""
        taken: list[int] = []
        spans: list[Span] = []
        for row, span, outcome in zip(plan.rows, inputs.spans, rows, strict=False):  # padding has spans of its own
            known = len(row.tokens)
            spans.append(Span(len(taken), known + len(outcome.kept), row.start))
            taken.extend(range(span.first, span.first + known))
            taken.extend(span.first + known + index for index in outcome.kept)
        if not taken:  # every row was restored from a checkpoint as a whole
            return
        placed = lay_out([0] * len(taken), spans, [row.pages[:1] for row in plan.rows], layout=self._layout, device=self._device)
        padding = len(placed.host_tokens) - len(taken)
        index = torch.tensor([*taken, *taken[-1:] * padding], dtype=torch.long, device=self._device)
        found = dict(zip(self.feature_layers, (feature.index_select(0, index) for feature in features), strict=True))
        joined = torch.cat([found[layer] for layer in self._spec.target_layers], dim=1).to(self._target.dtype)  # [M, n * Et]
        context = self._ops.rms_norm(self._fc(joined), self._hidden_norm, self._spec.eps)
        prepared = PreparedInputs(self._ops, placed, self._ropes)
        for layer, linear, store in zip(self._layers, self._contexts, self.state.stores, strict=True):
            own, mixer = layer.mixer, layer.spec.attention
            assert isinstance(own, AttentionMixer)
            assert isinstance(store, PageStore)
            prepared.attention(mixer).write(linear(context), spec=mixer, store=store, k_norm=own.k_norm, eps=self._spec.eps)

    # ------------------------------------------------------------------ block

    def _block(self, index: int, row: Row, outcome: RowOutcome) -> DraftBlock | None:
        """None for a middle chunk, at a reply's end, or without room for a draft."""
        limits = {"page_size": self._layout.page_size, "max_context": self._max_context}
        drafts = room_ahead(row, outcome, limit=self._spec.block - 1, **limits)
        if not drafts:
            return None
        return DraftBlock(index, row, outcome.sampled[-1].token, row.stop + len(outcome.kept), drafts + 1)

    def _draft(self, blocks: list[DraftBlock]) -> list[tuple[Draft, ...]]:
        mask = self._spec.mask_token
        tokens = [token for block in blocks for token in (block.token, *[mask] * (block.count - 1))]
        firsts = np.cumsum([0, *(block.count for block in blocks)]).tolist()
        spans = [Span(first, block.count, block.start, anchored=True) for first, block in zip(firsts, blocks, strict=False)]
        pages = [block.row.pages[:1] for block in blocks]
        placed = {
            causal: lay_out(
                tokens, [replace(span, whole=not causal) for span in spans], pages, layout=self._layout, device=self._device
            )
            for causal in set(self._spec.causal_in_block)
        }
        x = self._embed(next(iter(placed.values())).tokens)
        prepared = {causal: PreparedInputs(self._ops, inputs, self._ropes) for causal, inputs in placed.items()}
        for layer, causal, store in zip(self._layers, self._spec.causal_in_block, self.state.stores, strict=True):
            x = run_layer(x, layer, ops=self._ops, store=store, prepared=prepared[causal], eps=self._spec.eps)
        x = self._ops.rms_norm(x, self._norm, self._spec.eps)
        slots = [span.first + slot for span in spans for slot in range(1, span.count)]
        padding = self._layout.rule.padded(len(slots)) - len(slots)
        index = torch.tensor([*slots, *slots[-1:] * padding], dtype=torch.long, device=self._device)
        logits = self._head(x.index_select(0, index))[: len(slots), : self._spec.draft_vocab].float()
        ids, values = self._ranker.best(logits)
        return self._arranged(blocks, ids if self._target_ids is None else self._target_ids[ids], values)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._target.embed(tokens) if self._embedding is None else self._embedding.index_select(0, tokens)

    def _arranged(self, blocks: list[DraftBlock], ids: Ids, logits: Floats) -> list[tuple[Draft, ...]]:
        found: list[tuple[Draft, ...]] = []
        arm, slot = self._ranker.choose_arm(), 0
        for block in blocks:
            ranked = []
            for depth in range(1, block.count):
                position = block.start + depth
                ranked.append(self._ranker.rank(block.row, ids[slot], logits[slot], position=position, arm=arm))
                slot += 1
            drafts = self._arrange(ranked)
            self._ranker.remember(block.row, drafts, arm)
            found.append(drafts)
        return found

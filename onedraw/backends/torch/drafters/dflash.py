"""A DFlash drafter on the device: features of the target's committed tokens in, drafts for the next row out.

In: after every step, the captured residual streams and the kept tokens. Out: drafts per row. Context keys and values are
written once per committed position, into pages of the drafter's own that hold its windows (`context_pages.py`); a block of [last
token, mask …] then drafts several positions in one pass, with the target's embedding and head unless the drafter has its own. The
block's keys are past the committed positions, where the next commit overwrites them before anything reads them.

The target is the model that is drafted for. A feature is the target's residual stream at a position, after one of the
layers that the drafter names; the context is the drafter's keys and values of committed positions, computed from their features.
A lane is the slot of a sequence's state. Axes: T tokens of a step, n layers with features, E hidden width, Et that of the target,
M positions whose context is written together, V vocabulary. Formulas: `models/dflash.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.memory_plan import drafter_window
from onedraw.backends.torch.drafters.base import CompletedStep, DraftedPosition, Ranker, drafting_sampler, room_ahead
from onedraw.backends.torch.drafters.context_pages import ContextPages
from onedraw.backends.torch.model.block_convolution import LayerConvolutions
from onedraw.backends.torch.model.layer import AttentionMixer, Layer, load_layer, rope_tables, run_layer
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.model.weight_loader import LANE, WeightLoader
from onedraw.backends.torch.ops.base import PreparedInputs
from onedraw.backends.torch.ops.plain.linear import Linear
from onedraw.backends.torch.runner.inputs import InputLayout, Span, lay_out
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.models.dflash import DrafterWeights
from onedraw.models.source import LazyTensor
from onedraw.models.spec import DrafterSpec, LayerSpec
from onedraw.types import Draft, Row, RowOutcome

# On a CPU the drafter proposes the first third of the vocabulary, at least this many tokens: BPE vocabularies begin with the most
# frequent tokens, and a draft beyond this third is hardly ever kept, but every token costs a row of the head and noise.
SMALL_VOCAB = 16_384
# While no drafts are wanted for a row, its features are kept, and their keys and values are written later: writing many positions
# at once is cheaper, and those of a reply that ends without drafts are never written. If the features of a step do not fit into
# this many bytes any more, those that wait for its rows are written.
MOST_WAITING_BYTES = 32 * 2**20
# The features of this many steps are copied to where they wait at once, or earlier after a step with more than so many tokens.
STEPS_AT_ONCE, FEW_TOKENS = 16, 64
# A function that makes a tree of drafts from the candidates of each depth, best first: (token, score).
Arrange = Callable[[Sequence[Sequence[tuple[int, float]]]], tuple[Draft, ...]]


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """One row's block: the last sampled token at `start`, and masks after it."""

    index: int  # number of the row in the plan
    row: Row
    sampled: tuple[int, ...]  # the tokens that the row sampled; the last of them begins the block
    start: int
    count: int  # tokens of the block


@dataclass(slots=True)
class Context:
    """Committed positions of a sequence, from `start` on, whose keys and values are not written yet. Owner: the drafter."""

    row: Row  # the sequence's latest row; keys and values are written to its pages
    start: int
    stored: list[int]  # the numbers of the first positions' features in the drafter's store
    fresh: list[int]  # where those of the last positions are in the features of the step that was just completed

    @property
    def count(self) -> int:
        return len(self.stored) + len(self.fresh)

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class CandidateSelector:
    """Scores the likeliest tokens of a slot (a place in a block), given the token of the slot before it (formula:
    `models/dflash.py`).

    It runs on the host: few rows of the two codebooks are needed, and they are read from the mapped file.
    """

    top_k: int  # how many tokens of a slot are scored
    hidden: Linear  # [E] → [rank]
    predecessor: LazyTensor  # [V, rank]
    successor: LazyTensor  # [V, rank]

    def scores(
        self, before: int, ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float32], hidden: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """Scores of the tokens `ids` of one slot, after the token `before`.   [top_k]"""
        weights = self.predecessor.take_rows(np.array([before])).float32()[0] * hidden
        found: npt.NDArray[np.float32] = logits + self.successor.take_rows(ids).float32() @ weights
        return found


class DflashDrafter:
    """Drafts with a DFlash model. When it is constructed, its weights are loaded and its pages allocated. Owner: the backend."""

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
        width: int = 1,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Load the drafter. `width`: how many candidates per position `arrange` needs, 1 for a chain; it may get more.
        `kv_dtype`: that of its keys and values, by default of the target's products."""
        spec = replace(spec, layers=tuple(map(_with_window, spec.layers)))
        self._spec, self._target, self._arrange = spec, target, arrange
        self._max_context = max_context
        self._ops, self._device = target.ops, target.device
        loader = WeightLoader(weights, ops=self._ops, dtype=target.dtype, device=self._device)
        self._fc = loader.linear(None, "fc")
        self._hidden_norm, self._norm = loader.kept(None, "hidden_norm"), loader.kept(None, "norm")
        self._feature_norms = loader.kept(None, "feature_norms") if spec.feature_norms else None
        self._selector = None
        if spec.selector is not None:
            codebooks = weights.tensor(None, "predecessor"), weights.tensor(None, "successor")
            self._selector = CandidateSelector(spec.selector.top_k, loader.linear(None, "selector"), *codebooks)
        self._embedding = loader.kept(None, "embed") if spec.own_embedding else None
        self._head = loader.linear(None, "head") if spec.own_head else target.head
        ids = weights.target_ids()
        vocab = spec.draft_vocab
        if ids is None and width == 1:
            vocab = min(vocab, max(SMALL_VOCAB, vocab // 3) // LANE * LANE)
            self._head = self._head.first_outputs(vocab)
            if self._head.out_features != vocab:  # A GPU computes the whole product, which costs little there.
                vocab = spec.draft_vocab
        self._vocab = vocab
        self._target_ids = None if ids is None else torch.from_numpy(ids).to(self._device)
        self._width = width
        self._layers: list[Layer] = []
        self._contexts: list[Linear] = []  # by layer, the product that makes keys and values of the context
        for index, layer in enumerate(spec.layers):
            made = load_layer(index, layer, loader, self._ops, spec.eps)
            if spec.convolution is not None:
                made = replace(made, convolutions=LayerConvolutions.load(index, spec.convolution, loader), fused=None)
            self._layers.append(made)
            self._contexts.append(loader.linear(index, "k", "v"))
        self.state = ContextPages(
            spec.layers, target=layout, lanes=lanes, block=spec.block, dtype=kv_dtype or target.dtype, device=self._device
        )
        self._layout = self.state.layout
        self._ropes = rope_tables(spec.layers, max_context + spec.block, dtype=target.dtype, device=self._device)
        self._ranker = Ranker(lanes, *drafting_sampler(target, lanes, None if vocab == spec.draft_vocab else vocab))
        features = len(self.feature_layers) * spec.target_hidden
        places = max(MOST_WAITING_BYTES // (features * target.activation.itemsize), 1)
        # Features that wait, a ring. They are copied here, because memory that is used again is faster than that of a new tensor.
        self._store = torch.empty(places, features, dtype=target.activation, device=self._device)
        self._stored = 0  # how many features were ever kept; number i belongs in row i % places of the store
        self._uncopied: list[tuple[Sequence[Tensor], list[int]]] = []  # features of the last steps, and which of them to keep
        self._numbers = [self.feature_layers.index(layer) for layer in spec.target_layers]
        self._waiting: dict[int, Context] = {}  # by lane, context that is not written yet

    @property
    def name(self) -> str:
        return "dflash"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose outputs are the features, each once, in ascending order: the order in which a step returns
        their outputs."""
        return tuple(sorted(set(self._spec.target_layers)))

    @property
    def lookahead(self) -> int:
        return self._spec.block

    def open(self, rows: Sequence[Row]) -> None:
        self.state.open(rows)

    def draft(self, step: CompletedStep) -> list[tuple[Draft, ...]]:
        plan, rows = step.plan, step.rows
        self._ranker.learn(plan, rows)
        wanted = [index for index, row in enumerate(plan.rows) if row.draft_limit]
        blocks = [block for i in wanted if (block := self._block(i, plan.rows[i], rows[i])) is not None]
        ready, waiting = self._committed(step, {block.index for block in blocks})
        self._write_context(ready, step.features)
        self._keep(waiting, step.features)
        found: list[tuple[Draft, ...]] = [()] * len(plan.rows)
        if blocks:
            for block, drafts in zip(blocks, self._draft(blocks), strict=True):
                found[block.index] = drafts
        return found

    # ------------------------------------------------------------------ context

    def _committed(self, step: CompletedStep, drafting: set[int]) -> tuple[list[Context], list[Context]]:
        """Return the context to write now, and that to keep: of the known tokens and kept drafts of the step's rows, and of
        earlier tokens of these sequences that have waited.

        The features of generated tokens wait while no drafts are wanted for their row. Those that still wait when the reply ends
        are dropped: a later prompt that reuses the reply's pages gets worse drafts from there, but most replies that end without
        drafts have no such prompt, or one for which drafts do not pay off either.
        """
        ready: list[Context] = []
        waiting: list[Context] = []
        for index, (row, span, outcome) in enumerate(zip(step.plan.rows, step.inputs.spans, step.rows, strict=False)):
            first = span.first + len(row.tokens)
            fresh = [*range(span.first, first), *(first + draft for draft in outcome.kept)]
            context = self._waiting.pop(row.lane, None)
            if context is not None and (context.row.request_id != row.request_id or context.stop != row.start):
                context = None
            generates, drafts = len(row.tokens) == 1 and row.samples and row.start >= row.prompt_stop, index in drafting
            ends = not drafts and _ends(row, outcome)
            if context is None:
                context = Context(row, row.start, [], fresh)
            elif generates and ends:
                continue
            else:
                context.row, context.fresh = row, fresh
            if generates and not drafts and not ends:
                waiting.append(context)
            elif context.count:  # a row without tokens was restored whole from a checkpoint
                ready.append(context)
        # The number of the first features that are still in the store when those of this step have been copied.
        oldest = self._stored + sum(len(context.fresh) for context in waiting) - len(self._store)
        kept: list[Context] = []
        for context in waiting:
            first_number = context.stored[0] if context.stored else self._stored
            (kept if first_number >= oldest else ready).append(context)
        # Sequences that are not in this step may have been preempted, so nothing can be written for them.
        self._waiting = {lane: context for lane, context in self._waiting.items() if context.stored[0] >= oldest}
        return ready, kept

    def _keep(self, contexts: Sequence[Context], features: Sequence[Tensor]) -> None:
        """Keep the features of these contexts that are of the completed step."""
        fresh = [place for context in contexts for place in context.fresh]
        if not fresh:
            return
        if sum(len(places) for _, places in self._uncopied) + len(fresh) > len(self._store):
            self._copy()
        for context in contexts:
            context.stored += range(self._stored, self._stored + len(context.fresh))
            self._stored += len(context.fresh)
            context.fresh = []
            self._waiting[context.row.lane] = context
        self._uncopied.append((features, fresh))
        if len(self._uncopied) >= STEPS_AT_ONCE or len(features[0]) > FEW_TOKENS:
            self._copy()

    def _copy(self) -> None:
        """Copy the features of the last steps into the store."""
        if not self._uncopied:
            return
        layers = zip(*(features for features, _ in self._uncopied), strict=True)
        joined = torch.cat([torch.cat(steps) for steps in layers], dim=1)
        places, first = [], 0
        for features, fresh in self._uncopied:
            places += [first + place for place in fresh]
            first += len(features[0])
        self._uncopied.clear()
        if len(places) < first:
            joined = joined.index_select(0, self._indices(places))
        begin = (self._stored - len(places)) % len(self._store)
        part = self._store[begin : begin + len(places)]  # up to the end of the ring
        part.copy_(joined[: len(part)])
        self._store[: len(places) - len(part)].copy_(joined[len(part) :])

    def _write_context(self, contexts: Sequence[Context], features: Sequence[Tensor]) -> None:
        """Write the drafter's keys and values of committed positions."""
        if not contexts:
            return
        firsts = np.cumsum([0, *(context.count for context in contexts)]).tolist()
        spans = [Span(first, context.count, context.start) for first, context in zip(firsts, contexts, strict=False)]
        pages = [self.state.tables(context.row.pages[0], start=context.start, stop=context.stop) for context in contexts]
        placed = lay_out([0] * firsts[-1], spans, pages, layout=self._layout, device=self._device)
        joined = self._joined(contexts, features, len(placed.host_tokens))
        if self._feature_norms is not None:
            each = joined.view(-1, self._spec.target_hidden)  # [M * n, Et]
            normed = self._ops.rms_norm(each, None, self._spec.eps).view(len(joined), *self._feature_norms.shape)
            joined = (normed * self._feature_norms).view(len(joined), -1)
        context = self._ops.rms_norm(self._fc(joined), self._hidden_norm, self._spec.eps)
        prepared = PreparedInputs(self._ops, placed, self._ropes)
        for layer, linear, store in zip(self._layers, self._contexts, self.state.stores, strict=True):
            own, mixer = layer.mixer, layer.spec.attention
            assert isinstance(own, AttentionMixer)
            assert isinstance(store, PageStore)
            read = self._ops.rms_norm(context, layer.attn_norm, self._spec.eps) if self._spec.normed_context else context
            prepared.attention(mixer).write(linear(read), spec=mixer, store=store, k_norm=own.k_norm, eps=self._spec.eps)

    def _joined(self, contexts: Sequence[Context], features: Sequence[Tensor], rows: int) -> Tensor:
        """The features of all positions of the contexts, those of all layers side by side, and padding up to `rows`.
        [rows, n * Et]"""
        self._copy()
        stored = [number % len(self._store) for context in contexts for number in context.stored]
        fresh = [place for context in contexts for place in context.fresh]
        found = torch.cat([f.index_select(0, self._indices(fresh)) for f in features], dim=1)
        found = torch.cat([self._store.index_select(0, self._indices(stored)), found])
        order: list[int] = []  # a context's positions are apart in `found`: the stored ones of all contexts come first
        before, after = 0, len(stored)
        for context in contexts:
            order += range(before, before + len(context.stored))
            order += range(after, after + len(context.fresh))
            before, after = before + len(context.stored), after + len(context.fresh)
        order += order[-1:] * (rows - len(order))
        layers = found.index_select(0, self._indices(order)).view(rows, len(features), -1)
        return layers[:, self._numbers].view(rows, -1).to(self._target.dtype)

    def _indices(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.long, device=self._device)

    # ------------------------------------------------------------------ block

    def _block(self, index: int, row: Row, outcome: RowOutcome) -> DraftBlock | None:
        """The block that drafts for a row. None in the middle of a prompt, at a reply's end, or without room for a draft."""
        limits = {"page_size": self._layout.page_size, "max_context": self._max_context}
        drafts = room_ahead(row, outcome, limit=self._spec.block - 1, **limits)
        if not drafts:
            return None
        return DraftBlock(index, row, tuple(s.token for s in outcome.sampled), row.stop + len(outcome.kept), drafts + 1)

    def _draft(self, blocks: list[DraftBlock]) -> list[tuple[Draft, ...]]:
        mask = self._spec.mask_token
        tokens = [token for block in blocks for token in (block.sampled[-1], *[mask] * (block.count - 1))]
        firsts = np.cumsum([0, *(block.count for block in blocks)]).tolist()
        spans = [Span(first, block.count, block.start, anchored=True) for first, block in zip(firsts, blocks, strict=False)]
        pages = [
            self.state.tables(block.row.pages[0], start=block.start, stop=block.start + block.count, seen=block.start)
            for block in blocks
        ]
        placed = {
            causal: lay_out(
                tokens, [replace(span, whole=not causal) for span in spans], pages, layout=self._layout, device=self._device
            )
            for causal in set(self._spec.causal_in_block)
        }
        x = self._embed(next(iter(placed.values())).tokens)
        prepared = {causal: PreparedInputs(self._ops, inputs, self._ropes) for causal, inputs in placed.items()}
        places = torch.zeros(len(x), dtype=torch.long)  # slot of each token in its block; 0 for padding
        places[: len(tokens)] = torch.cat([torch.arange(block.count) for block in blocks])
        places = places.to(self._device)
        for layer, causal, store in zip(self._layers, self._spec.causal_in_block, self.state.stores, strict=True):
            x = run_layer(x, layer, ops=self._ops, store=store, prepared=prepared[causal], eps=self._spec.eps, slots=places)
        x = self._ops.rms_norm(x, self._norm, self._spec.eps)
        slots = [span.first + slot for span in spans for slot in range(1, span.count)]
        padding = self._layout.rule.padded(len(slots)) - len(slots)
        index = torch.tensor([*slots, *slots[-1:] * padding], dtype=torch.long, device=self._device)
        hidden = x.index_select(0, index)
        logits = self._head(hidden)[: len(slots), : self._vocab].float() * self._spec.logit_scale
        if self._spec.softcap is not None:
            logits = torch.tanh(logits / self._spec.softcap) * self._spec.softcap
        return self._arranged(blocks, logits, hidden)

    def _embed(self, tokens: Tensor) -> Tensor:
        return (
            self._target.embed(tokens).to(self._target.dtype)
            if self._embedding is None
            else self._embedding.index_select(0, tokens)
        )

    def _arranged(self, blocks: list[DraftBlock], logits: Tensor, hidden: Tensor) -> list[tuple[Draft, ...]]:
        """The drafts of each block, from the logits and the hidden states of all drafted positions."""
        arm = self._ranker.choose_arm()
        positions = [DraftedPosition(b.row, b.sampled, depth) for b in blocks for depth in range(1, b.count)]
        ranked: list[list[tuple[int, float]]]
        if self._selector is not None:
            ranked = self._selected(self._selector, blocks, logits, hidden, arm=arm)
        elif self._width == 1:
            ranked = [[(token, 0.0)] for token in self._ranker.best(logits, positions, arm=arm, ids=self._target_ids)]
        else:
            ids, values = self._ranker.candidates(logits)
            ids = ids if self._target_ids is None else self._target_ids.cpu().numpy()[ids]
            starts = [block.start for block in blocks for _ in range(1, block.count)]
            ranked = [
                self._ranker.rank(p.row, ids[slot], values[slot], position=start + p.depth, arm=arm)
                for slot, (p, start) in enumerate(zip(positions, starts, strict=True))
            ]
        found: list[tuple[Draft, ...]] = []
        for block in blocks:
            own, ranked = ranked[: block.count - 1], ranked[block.count - 1 :]
            drafts = self._arrange(own)
            self._ranker.remember(block.row, drafts, arm)
            found.append(drafts)
        return found

    def _selected(
        self, selector: CandidateSelector, blocks: list[DraftBlock], logits: Tensor, hidden: Tensor, *, arm: int
    ) -> list[list[tuple[int, float]]]:
        """The candidates of all positions, each scored after the best candidate of the position before it. In a tree
        all nodes of one depth share these candidates."""
        found = logits.topk(min(selector.top_k, logits.shape[1]), dim=1)
        ids, values = found.indices.cpu().numpy(), found.values.cpu().numpy()
        projected = selector.hidden(hidden).float().cpu().numpy()
        ranked: list[list[tuple[int, float]]] = []
        for block in blocks:
            before = block.sampled[-1]
            for depth in range(1, block.count):
                slot = len(ranked)
                scores = selector.scores(before, ids[slot], values[slot], projected[slot])
                ranked.append(self._ranker.rank(block.row, ids[slot], scores, position=block.start + depth, arm=arm))
                before = ranked[-1][0][0]
        return ranked


def _with_window(layer: LayerSpec) -> LayerSpec:
    """The layer with the window of `drafter_window`, also if its checkpoint gives it a larger one or none."""
    return replace(layer, mixer=replace(layer.attention, window=drafter_window(layer.attention.window)))


def _ends(row: Row, outcome: RowOutcome) -> bool:
    """Whether this is the last row of its reply, as far as the backend can tell."""
    sampled = outcome.sampled
    full = len(row.history.output) + len(sampled) >= row.params.max_tokens
    return outcome.no_token_left or full or (bool(sampled) and sampled[-1].token in row.params.stop_ids)

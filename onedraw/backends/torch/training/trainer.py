"""Trains a DFlash drafter on sequences and the target's features of them: one step after the other, resumable at any step.

In: ReadSequences with their tokens. Out: weights, and the expected number of drafts that a block keeps. The target is the model
that is drafted for; a feature is its residual stream after a layer that the drafter names. A step takes some sequences from the
buffer, begins blocks at random generated positions (anchors), and lowers the loss of `loss.py`. Everything random is a function
of the seed and the number of the step, so a resumed run takes the steps that it would have taken without the interruption; only
the buffer may hold other sequences. Axes: R sequences of a step, S positions, N blocks per sequence, B slots of a block, T
tokens, F features of a position, V vocabulary, E hidden width."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.training.feature_reader import ReadSequence
from onedraw.backends.torch.training.loss import (
    SlotLabels,
    cross_entropy,
    decay_weights,
    expected_length,
    keep_log_probability,
    length_weights,
)
from onedraw.backends.torch.training.trainable_drafter import GROUP, Blocks, TrainableDrafter, initial_weights
from onedraw.models.source import WeightSource
from onedraw.models.spec import DrafterSpec
from onedraw.models.weight_names import WeightKey

LOSSES = ("hard", "soft", "kept")
LOGIT_NUMBERS = 2**25  # logits that exist at once; the loss is computed in parts of whole blocks
WARM_UP = 0.04  # share of the run in which the learning rate rises to its full value
Arrays = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The recipe of a training run: loss, optimizer, learning rate and sizes. `python -m bench.draft_recipes` compares others
    with the defaults."""

    # "hard": cross-entropy with the sequence's tokens; "soft": with the target's likeliest next tokens; "kept": minus the
    # logarithm of the probability that the draft is kept
    loss: Literal["hard", "soft", "kept"] = "kept"
    # How the slots of a block are weighted in the loss. "length": a slot counts as much as it and the slots after it can add to
    # the expected number of kept drafts; "decay": later slots count less.
    weights: Literal["length", "decay"] = "length"
    optimizer: Literal["muon", "adamw"] = "muon"  # optimizer of the matrices; norms are always trained with AdamW
    rows: int = 8  # sequences per step
    anchors: int = 32  # blocks per sequence and step, a multiple of GROUP
    muon_rate: float = 0.02
    adamw_rate: float = 1e-3

    def __post_init__(self) -> None:
        assert self.loss in LOSSES
        assert self.anchors % GROUP == 0


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A sequence to train on: its tokens, and the target's features and likeliest next tokens."""

    tokens: Tensor  # [S] token ids, on the device
    generated: int  # position of the first token that the target sampled
    temperature: float
    read: ReadSequence


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a step or an evaluation: the expected number of kept drafts per block, and the loss."""

    kept: float
    loss: float


@dataclass
class SequenceBuffer:
    """The sequences from which training steps draw at random. When they exceed the limit in bytes, the oldest are dropped. Owner:
    the trainer."""

    limit: int
    sequences: deque[TrainingSequence] = field(default_factory=deque)
    held: int = 0

    def add(self, sequence: TrainingSequence) -> None:
        self.sequences.append(sequence)
        self.held += sequence.read.bytes
        while self.held > self.limit and len(self.sequences) > 1:
            self.held -= self.sequences.popleft().read.bytes


class Trainer:
    """Owns the drafter that is trained, its optimizers, and the buffer of sequences."""

    def __init__(
        self,
        drafter: TrainableDrafter,
        *,
        embed: Callable[[Tensor], Tensor],
        head: Tensor,
        softcap: float | None,
        recipe: Recipe,
        seed: int,
        buffer_bytes: int,
    ) -> None:
        """`embed` looks up the target's embeddings, [T] → [T, E]; `head` [V, E] is its output head."""
        self.drafter, self.buffer, self.steps = drafter, SequenceBuffer(buffer_bytes), 0
        self._embed, self._head, self._softcap, self._recipe, self._seed = embed, head, softcap, recipe, seed
        adamw = drafter.vectors if recipe.optimizer == "muon" else [*drafter.matrices, *drafter.vectors]
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.AdamW(adamw, betas=(0.9, 0.95), weight_decay=0.0), recipe.adamw_rate)
        ]
        if recipe.optimizer == "muon":
            self._optimizers.append((torch.optim.Muon(drafter.matrices, weight_decay=0.0), recipe.muon_rate))

    def step(self, progress: float) -> Measured:
        """Train on sequences of the buffer. `progress`: the share of the run that is over, which decides the learning rate."""
        recipe, random = self._recipe, np.random.default_rng((self._seed, self.steps))
        chosen = random.choice(len(self.buffer.sequences), size=min(recipe.rows, len(self.buffer.sequences)), replace=False)
        batch = [self.buffer.sequences[int(index)] for index in chosen]
        measured = self._loss(batch, random)
        # Linear warm-up, times a cosine that falls from 1 to 0.02.
        rate = min(1.0, (progress + 1e-3) / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))
        if recipe.optimizer == "adamw":  # the size of Muon's updates does not depend on the size of the gradient
            torch.nn.utils.clip_grad_norm_(self.drafter.weights.values(), 1.0)
        for optimizer, full in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = full * rate
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        return measured

    def evaluate(self, sequences: Sequence[TrainingSequence]) -> float:
        """The expected number of kept drafts per block on sequences that are not trained on."""
        random, total, count = np.random.default_rng(self._seed), 0.0, 0
        with torch.no_grad():
            for start in range(0, len(sequences), self._recipe.rows):
                batch = sequences[start : start + self._recipe.rows]
                total += self._loss(batch, random, learn=False).kept * len(batch)
                count += len(batch)
        return total / max(count, 1)

    # ------------------------------------------------------------------ one batch

    def _loss(self, batch: Sequence[TrainingSequence], random: np.random.Generator, *, learn: bool = True) -> Measured:
        """Compute the loss of a batch. With `learn`, add its gradients to those of the weights."""
        device, recipe = self._head.device, self._recipe
        anchors, usable = self._anchors(batch, random)
        places = anchors[..., None] + torch.arange(1, self.drafter.spec.block, device=device)  # [R, N, B - 1]
        tokens, live = self._tokens(batch, places)
        live = live * usable[..., None]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = self.drafter.hidden(self._blocks(batch, anchors))[:, :, 1:]  # [R, N, B - 1, E]
        labels = self._labels(batch, places, tokens)
        blocks, slots = live.shape[0] * live.shape[1], live.shape[2]
        live, flat = live.view(blocks, slots).float(), hidden.reshape(blocks, slots, -1)
        begun = live[:, 0].sum().clamp(min=1)
        # Losses of parts are differentiated up to `leaf`, so that only one part's logits exist at once; then the gradient of
        # `leaf` goes through the drafter in one backward pass.
        leaf = flat.detach().requires_grad_(learn)
        total_loss = total_kept = 0.0
        for part in torch.split(torch.arange(blocks, device=device), max(LOGIT_NUMBERS // (slots * len(self._head)), 1)):
            wanted = SlotLabels(*(value.reshape(blocks, slots, -1)[part].flatten(0, 1).squeeze(-1) for value in labels))
            logits = F.linear(leaf[part].flatten(0, 1).to(self._head.dtype), self._head).float()
            if self._softcap is not None:
                logits = self._softcap * torch.tanh(logits / self._softcap)
            kept_log = keep_log_probability(logits, wanted)
            kept = kept_log.detach().exp().view(len(part), slots)
            cost = -kept_log if recipe.loss == "kept" else cross_entropy(logits, wanted, soft=recipe.loss == "soft")
            weights = decay_weights(live[part]) if recipe.weights == "decay" else length_weights(kept, live[part])
            loss = (cost.view(len(part), slots) * weights).sum() / (begun * slots / 2)
            if learn:
                loss.backward()  # type: ignore[no-untyped-call]
            total_loss += float(loss.detach())
            total_kept += float(expected_length(kept, live[part]).sum())
        if learn:
            assert leaf.grad is not None
            flat.backward(leaf.grad)  # type: ignore[no-untyped-call]
        return Measured(total_kept / float(begun), total_loss)

    def _anchors(self, batch: Sequence[TrainingSequence], random: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Random positions of generated tokens but the last, [R, N], ascending; and whether each is used, since short replies
        have fewer."""
        count = self._recipe.anchors
        anchors = np.ones((len(batch), count), np.int64)
        usable = np.zeros((len(batch), count), np.bool_)
        for row, sequence in enumerate(batch):
            # The first token after a prompt is sampled before anything is drafted, so the first anchor is that token.
            choices = np.arange(max(sequence.generated, 1), len(sequence.tokens) - 1)
            picked = np.sort(random.permutation(choices)[:count])
            anchors[row, : len(picked)], usable[row, : len(picked)] = picked, True
        device = self._head.device
        return torch.from_numpy(anchors).to(device), torch.from_numpy(usable).to(device)

    def _blocks(self, batch: Sequence[TrainingSequence], anchors: Tensor) -> Blocks:
        features = torch.nn.utils.rnn.pad_sequence([sequence.read.features for sequence in batch], batch_first=True)
        slots = self.drafter.spec.block
        tokens = anchors.new_full((*anchors.shape, slots), self.drafter.spec.mask_token)
        tokens[..., 0], _ = self._tokens(batch, anchors)
        with torch.no_grad():
            embedded = self._embed(tokens.flatten()).view(*tokens.shape, -1)
        return Blocks(features, embedded, anchors)

    def _tokens(self, batch: Sequence[TrainingSequence], places: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens at these positions, and which of the positions the sequences reach."""
        padded = torch.nn.utils.rnn.pad_sequence([sequence.tokens for sequence in batch], batch_first=True)
        lengths = torch.tensor([len(sequence.tokens) for sequence in batch], device=padded.device)
        inside = places < lengths.view(-1, *[1] * (places.ndim - 1))
        found = padded.gather(1, places.clamp(max=padded.shape[1] - 1).flatten(1)).view(places.shape)
        return found, inside

    def _labels(self, batch: Sequence[TrainingSequence], places: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Labels of the tokens at these positions, which the positions before them predict: the fields of SlotLabels."""
        pad = torch.nn.utils.rnn.pad_sequence
        before = (places - 1).flatten(1)
        rows = torch.arange(len(batch), device=places.device)[:, None]
        ids = pad([sequence.read.likeliest for sequence in batch], batch_first=True)
        logprobs = pad([sequence.read.logprobs for sequence in batch], batch_first=True, padding_value=-30.0)
        before = before.clamp(max=ids.shape[1] - 1)
        temperature = torch.tensor([sequence.temperature for sequence in batch], device=places.device)
        shape = (*places.shape, ids.shape[2])
        return (
            tokens,
            ids[rows, before].view(shape),
            logprobs[rows, before].view(shape),
            temperature[:, None, None].expand(places.shape),
        )

    # ------------------------------------------------------------------ state between runs

    def state(self) -> Arrays:
        """Return the arrays from which a later run can continue, except for the sequences."""
        found = {f"weight/{_name(key)}": weight for key, weight in self.drafter.weights.items()}
        found["feature_scale"] = self.drafter.feature_scale
        for name, field_name, value in self._optimizer_tensors():
            found[f"optimizer/{name}/{field_name}"] = value
        arrays = {name: value.detach().float().cpu().numpy() for name, value in found.items()}
        arrays["steps"] = np.asarray([self.steps], np.float32)
        return arrays

    def restore(self, arrays: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Continue from the state of an earlier run with this recipe."""
        device = self._head.device
        self.drafter.feature_scale.copy_(torch.from_numpy(arrays["feature_scale"]))
        with torch.no_grad():
            for key, weight in self.drafter.weights.items():
                weight.copy_(torch.from_numpy(arrays[f"weight/{_name(key)}"]))
        names = {f"weight/{_name(key)}": weight for key, weight in self.drafter.weights.items()}
        for name, array in arrays.items():
            kind, _, rest = name.partition("/")
            if kind != "optimizer":
                continue
            owner, _, field_name = rest.rpartition("/")
            weight = names[f"weight/{owner}"]
            for optimizer, _ in self._optimizers:
                if any(weight is own for group in optimizer.param_groups for own in group["params"]):
                    place = torch.device("cpu") if field_name == "step" else device  # where torch's optimizers keep this field
                    optimizer.state[weight][field_name] = torch.tensor(array, device=place)
        self.steps = int(arrays["steps"][0])

    def _optimizer_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        keys = {id(weight): key for key, weight in self.drafter.weights.items()}
        for optimizer, _ in self._optimizers:
            for weight, fields in optimizer.state.items():
                for field_name, value in fields.items():
                    yield _name(keys[id(weight)]), field_name, value


def _name(key: WeightKey) -> str:
    return f"{'outer' if key[0] is None else key[0]}/{key[1]}"


def make_trainer(
    spec: DrafterSpec,
    initial: Mapping[WeightKey, npt.NDArray[np.float32]] | None,
    *,
    target: Transformer,
    weights: WeightSource,
    examples: Sequence[TrainingSequence],
    positions: int,
    recipe: Recipe,
    seed: int,
    buffer_bytes: int,
) -> Trainer:
    """Return the trainer of a drafter that begins with `initial` weights, or with random ones. The scale of features is measured
    on `examples`; sequences have up to `positions` tokens."""
    device = target.device
    head = torch.from_numpy(weights.tensor(None, "embed" if target.spec.tied else "head").float32())
    head = head.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    if initial is None:
        begun = initial_weights(spec, head=head, generator=torch.Generator().manual_seed(seed))
    else:
        begun = {key: torch.from_numpy(array) for key, array in initial.items()}
    scale = feature_scale(examples, len(spec.target_layers)).to(device)
    drafter = TrainableDrafter(spec, begun, feature_scale=scale, positions=positions + spec.block, device=device)
    return Trainer(
        drafter,
        embed=target.embed,
        head=head,
        softcap=target.spec.softcap,
        recipe=recipe,
        seed=seed,
        buffer_bytes=buffer_bytes,
    )


def training_sequence(tokens: Sequence[int], generated: int, temperature: float, read: ReadSequence) -> TrainingSequence:
    """A sequence with what was read of it, on the device of its features."""
    return TrainingSequence(torch.tensor(tokens, device=read.features.device), generated, temperature, read)


def feature_scale(sequences: Sequence[TrainingSequence], layers: int) -> Tensor:
    """One over the root mean square of each layer's features, [F], so that all layers count alike in the product with `fc`. The
    first four positions of the first sequence are left out."""
    features = torch.cat([sequence.read.features.float() for sequence in sequences])
    by_layer = features.view(len(features), layers, -1)
    rms = by_layer[4:].square().mean((0, 2)).sqrt().clamp(min=1e-3)
    return (1 / rms).repeat_interleave(by_layer.shape[2])

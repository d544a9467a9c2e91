"""The trainable drafter against the reference one, the loss against samples with shared noise, and saved state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from onedraw.backends.torch.training.feature_reader import ReadSequence
from onedraw.backends.torch.training.loss import (
    SlotLabels,
    cross_entropy,
    expected_length,
    keep_log_probability,
    length_weights,
)
from onedraw.backends.torch.training.trainable_drafter import GROUP, Blocks, TrainableDrafter
from onedraw.backends.torch.training.trainer import Recipe, SequenceBuffer, Trainer, TrainingSequence, training_sequence
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.dflash import DrafterInfo, read_drafter_info
from onedraw.models.weight_names import WeightKey
from tests.reference.dflash import block_hidden

DRAFTER = Path(__file__).parents[2] / "fixtures" / "trained" / "trained_dflash_qwen3"


def read(**changes: object) -> tuple[DrafterInfo, dict[WeightKey, torch.Tensor]]:
    info = read_drafter_info(open_checkpoint(DRAFTER))
    info = DrafterInfo(replace(info.spec, **changes), info.weights)  # type: ignore[arg-type]
    info.weights.spec = info.spec
    found: dict[WeightKey, torch.Tensor] = {(None, k): torch.from_numpy(v) for k, v in info.weights.outer().items()}
    for index in range(len(info.spec.layers)):
        found |= {(index, k): torch.from_numpy(v) for k, v in info.weights.layer(index).items()}
    return info, found


def trainer(seed: int = 0, **recipe: object) -> Trainer:
    info, weights = read()
    random = torch.Generator().manual_seed(7)
    head = torch.randn(info.spec.vocab, info.spec.hidden, generator=random)
    scale = torch.full((info.spec.feature_width,), 0.5)
    drafter = TrainableDrafter(info.spec, weights, feature_scale=scale, positions=64, device=torch.device("cpu"))
    embed = lambda tokens: torch.nn.functional.embedding(tokens, head)  # noqa: E731
    made = Recipe(rows=3, anchors=GROUP, **recipe)  # type: ignore[arg-type]
    found = Trainer(drafter, embed=embed, head=head, softcap=None, recipe=made, seed=seed, buffer_bytes=10**9)
    for sequence in sequences(info.spec.vocab, info.spec.feature_width):
        found.buffer.add(sequence)
    return found


def sequences(vocab: int, width: int, count: int = 6) -> list[TrainingSequence]:
    random = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        length = 20 + 3 * number
        tokens = torch.randint(0, vocab, (length,), generator=random).tolist()
        features = torch.randn(length, width, generator=random)
        logits = torch.randn(length, 16, generator=random)
        ids = torch.randint(0, vocab, (length, 16), generator=random, dtype=torch.int32)
        read = ReadSequence(features, ids, torch.log_softmax(logits, 1) - 0.1)
        found.append(training_sequence(tokens, 5, (0.0, 0.7, 1.0)[number % 3], read))
    return found


@pytest.mark.parametrize("window", [None, 5])
def test_blocks_that_are_trained_are_those_of_the_reference(window: int | None) -> None:
    """Padding, blocks in one product and other sequences in the batch change nothing."""
    info, _ = read()
    mixers = tuple(replace(layer, mixer=replace(layer.attention, window=window)) for layer in info.spec.layers)
    info, weights = read(layers=mixers, causal_in_block=(window is not None,) * len(mixers))
    spec, random = info.spec, np.random.default_rng(0)
    embed = random.normal(size=(spec.vocab, spec.hidden)).astype(np.float32)
    scale = torch.from_numpy(random.uniform(0.5, 2, spec.feature_width).astype(np.float32))
    drafter = TrainableDrafter(spec, weights, feature_scale=scale, positions=64, device=torch.device("cpu"))
    features = random.normal(size=(2, 30, spec.feature_width)).astype(np.float32)
    features[1, 20:] = 0  # the second sequence is shorter
    anchors = np.sort(random.integers(1, 18, (2, 2 * GROUP)), axis=1)
    tokens = np.full((*anchors.shape, spec.block), spec.mask_token)
    tokens[..., 0] = random.integers(0, spec.vocab, anchors.shape)
    with torch.no_grad():
        blocks = Blocks(torch.from_numpy(features), torch.from_numpy(embed[tokens]), torch.from_numpy(anchors))
        found = drafter.hidden(blocks).numpy()
    norm = info.weights.outer()["norm"]
    for row in range(2):
        for number in (0, GROUP - 1, GROUP, 2 * GROUP - 1):
            context = features[row, : anchors[row, number]]
            x = block_hidden(info.weights, context, int(tokens[row, number, 0]), embed=embed)
            expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.eps) * norm
            np.testing.assert_allclose(found[row, number], expected, rtol=2e-4, atol=2e-4)


def test_exported_weights_are_those_that_were_read() -> None:
    _, weights = read()
    exported = trainer().drafter.exported()
    assert exported.keys() == weights.keys()
    for key, weight in weights.items():
        np.testing.assert_allclose(exported[key], weight.numpy(), rtol=1e-6)


# ------------------------------------------------------------------ loss


def labels(p: torch.Tensor, temperature: float, token: int = 0) -> SlotLabels:
    """Labels of slots whose target distribution at temperature 1 is p [M, V], all tokens of which are kept."""
    ids = torch.arange(p.shape[1], dtype=torch.int32).expand(len(p), -1)
    return SlotLabels(torch.full((len(p),), token), ids, p.log(), torch.full((len(p),), temperature))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_keep_probability_is_how_often_shared_noise_picks_one_token(temperature: float) -> None:
    random = torch.Generator().manual_seed(0)
    p = torch.softmax(2 * torch.randn(3, 9, generator=random), 1)
    logits = torch.log(p) + 0.7 * torch.randn(3, 9, generator=random)
    noise = -torch.log(-torch.log(torch.rand(100_000, 1, 9, generator=random).clamp(1e-7, 1 - 1e-7)))
    target = (p.log() / temperature + noise).argmax(-1)
    same = (target == (logits / temperature + noise).argmax(-1)).float().mean(0)
    torch.testing.assert_close(keep_log_probability(logits, labels(p, temperature)).exp(), same, atol=6e-3, rtol=0)


def test_a_drafter_with_the_targets_distribution_keeps_everything() -> None:
    p = torch.softmax(torch.randn(4, 9, generator=torch.Generator().manual_seed(1)), 1)
    for temperature in (0.5, 1.0, 2.0):
        torch.testing.assert_close(keep_log_probability(p.log(), labels(p, temperature)).exp(), torch.ones(4), atol=1e-4, rtol=0)


def test_the_loss_of_a_greedy_request_is_the_cross_entropy_with_its_token() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(2))
    greedy = labels(torch.softmax(torch.randn(5, 9), 1), 0.0, token=3)
    torch.testing.assert_close(-keep_log_probability(logits, greedy), cross_entropy(logits, greedy, soft=False))


def test_slot_weights_are_the_gradient_of_the_expected_length() -> None:
    """With a for (a + 1) / 2, the weight of a slot is the derivative of the length by the logarithm of its probability."""
    kept = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()
    live = torch.ones(4, 6)
    live[1, 3:] = 0
    expected_length(kept, live).sum().backward()
    assert kept.grad is not None
    weights = length_weights(2 * kept.detach() - 1, live)
    torch.testing.assert_close(weights, kept.grad * kept.detach())


# ------------------------------------------------------------------ steps and state


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_that_goes_on_from_saved_state_is_training_that_was_not_interrupted(optimizer: str) -> None:
    whole, first, second = (trainer(optimizer=optimizer) for _ in range(3))
    for _ in range(6):
        whole.step(0.5)
    for _ in range(3):
        first.step(0.5)
    second.restore(first.state())
    for _ in range(3):
        second.step(0.5)
    assert whole.steps == second.steps == 6
    for key, weight in whole.drafter.weights.items():
        torch.testing.assert_close(second.drafter.weights[key], weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", ["hard", "soft", "kept"])
def test_steps_raise_the_expected_number_of_kept_drafts(loss: str) -> None:
    made = trainer(loss=loss)
    before = made.evaluate(list(made.buffer.sequences))
    for _ in range(30):
        made.step(0.3)
    assert made.evaluate(list(made.buffer.sequences)) > 3 * before


def test_the_buffer_drops_the_oldest_sequences_beyond_its_bytes() -> None:
    found = sequences(50, 8)
    buffer = SequenceBuffer(found[4].read.bytes + found[5].read.bytes)
    for sequence in found:
        buffer.add(sequence)
    assert list(buffer.sequences) == found[4:]
    assert buffer.held == sum(sequence.read.bytes for sequence in found[4:])

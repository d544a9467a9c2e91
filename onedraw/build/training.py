"""Build what training needs: the two parts of a drafter's training (the reader of the target's features, and the trainer), and a
model as a differentiable torch module.

In: Settings, and perhaps a drafter to begin with. Out: a DraftTraining, on the thread that made it; or a TorchForward with
float32 parameters on the CPU. The target is the model that is drafted for; a feature is its residual stream after a layer that
the drafter names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onedraw.build.checkpoint import Progress, describe, find_checkpoint, open_drafter, read_text
from onedraw.build.fit_devices import DrafterBytes
from onedraw.build.llm import torch_backend
from onedraw.engine.engine import Engine, Event
from onedraw.engine.scheduler import Scheduler
from onedraw.errors import OnedrawError, UnsupportedModel
from onedraw.memory.allocator import Allocator
from onedraw.models.dflash import check_drafter_fits, read_drafter_info
from onedraw.models.registry import ModelInfo
from onedraw.models.spec import AttentionSpec, DrafterSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.models.weight_names import WeightKey
from onedraw.settings import Settings
from onedraw.speculation.speculator import Speculator
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import Request, SamplingParams

if TYPE_CHECKING:
    from onedraw.backends.torch.training.feature_reader import FeatureReader
    from onedraw.backends.torch.training.torch_forward import TorchForward
    from onedraw.backends.torch.training.trainer import Trainer, TrainingSequence

SCALE_EXAMPLES = 8  # sequences on which the scale of features is measured
MOST_LAYERS, MOST_FEATURES = 4, 5  # layers of a new drafter, and target layers that it reads; fewer if the target has few
DEFAULT_THETA = 1e6  # base of the rotary positions of a drafter whose target has none


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence to learn from: a prompt and the target's reply to it."""

    tokens: tuple[int, ...]
    generated: int  # position of the first generated token, which is the number of prompt tokens
    temperature: float


def target_info(settings: Settings) -> ModelInfo:
    """Return the description of the target."""
    with closing(find_checkpoint(settings)) as checkpoint:
        return describe(settings, checkpoint)


def new_drafter_spec(target: ModelSpec, *, mask_token: int, block: int, layers: int | None = None) -> DrafterSpec:
    """The shape of a new drafter: the target's width and attention heads, a smaller feed-forward, and features of layers that are
    spread evenly over the target."""
    depth = len(target.layers)
    count = layers or max(min(MOST_LAYERS, depth // 3), 1)
    attention = next((m for layer in target.layers if isinstance(m := layer.mixer, AttentionSpec)), None)
    head_dim = attention.head_dim if attention is not None else 64
    heads = attention.heads if attention is not None else max(target.hidden // head_dim, 1)
    kv_heads = attention.kv_heads if attention is not None else heads
    theta = attention.rope.theta if attention is not None else DEFAULT_THETA
    mixer = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=RopeSpec(theta=theta, dims=head_dim),
        scale=head_dim**-0.5,
        qk_norm=True,
    )
    width = -(-target.hidden * 5 // 3 // 64) * 64
    return DrafterSpec(
        layout="z-lab",
        layers=(LayerSpec(mixer, MlpSpec(width)),) * count,
        causal_in_block=(False,) * count,
        hidden=target.hidden,
        target_hidden=target.hidden,
        vocab=target.vocab,
        draft_vocab=target.vocab,
        eps=1e-6,
        block=block,
        mask_token=mask_token,
        target_layers=feature_layers(min(MOST_FEATURES, count + 1), depth),
        max_context=target.max_context,
        target_depth=depth,
    )


def feature_layers(count: int, depth: int) -> tuple[int, ...]:
    """`count` layers, or fewer, spread evenly from the second layer to the third last of a target of `depth` layers; for one, the
    middle layer."""
    last = max(depth - 3, 0)
    first = min(1, last)
    if count == 1:
        return (depth // 2,)
    return tuple(sorted({round(first + index * (last - first) / (count - 1)) for index in range(count)}))


def read_initial(path: Path, target: ModelSpec) -> tuple[DrafterSpec, dict[WeightKey, npt.NDArray[np.float32]]]:
    """Return shape and weights of the drafter that training begins with."""
    with closing(open_drafter(path)) as checkpoint:
        info = read_drafter_info(checkpoint, len(target.layers))
        check_drafter_fits(info.spec, target)
        if reason := _why_untrainable(info.spec):
            raise UnsupportedModel(f"{path} cannot be trained, because it has {reason}; use a plain DFlash drafter")
        found: dict[WeightKey, npt.NDArray[np.float32]] = {(None, k): v for k, v in info.weights.outer().items()}
        for index in range(len(info.spec.layers)):
            found |= {(index, k): v for k, v in info.weights.layer(index).items()}
        return replace(info.spec, layout="z-lab"), found


def _why_untrainable(spec: DrafterSpec) -> str:
    """Name a property of this drafter that training does not support; empty if there is none."""
    parts = {
        "an embedding or a head of its own": spec.own_embedding or spec.own_head,
        "norms of features or of the context": spec.feature_norms or spec.normed_context,
        "convolutions or a candidate selector": spec.convolution is not None or spec.selector is not None,
        "scaled or capped logits": spec.logit_scale != 1 or spec.softcap is not None,
        "gated attention": any(layer.attention.gate is not None for layer in spec.layers),
    }
    return next((name for name, present in parts.items() if present), "")


@dataclass(frozen=True, slots=True)
class ReaderBuilder:
    """Makes a FeatureReader for the target where serving would make a drafter, and appends it to `made`. Implements
    DeviceDrafter."""

    layers: tuple[int, ...]
    made: list[FeatureReader] = field(default_factory=list)

    @property
    def named(self) -> str:
        return "the reader of features"

    def size(self, info: ModelInfo) -> DrafterBytes | None:
        return None

    def maker(self, settings: Settings, target: ModelInfo, *, max_context: int) -> Callable[[Any, Any, Any], Any]:
        from onedraw.backends.torch.training.feature_reader import FeatureReader

        def make(transformer: Any, sampler: object, layout: Any) -> FeatureReader:
            self.made.append(FeatureReader(self.layers, target=transformer, layout=layout))
            return self.made[-1]

        return make


class TargetReader:
    """Runs known sequences through the target and reads their features. Its methods belong to the thread that made it."""

    def __init__(self, settings: Settings, info: ModelInfo, layers: tuple[int, ...], notify: Progress, *, weights: str) -> None:
        """`weights`: the fingerprint of the checkpoint."""
        builder = ReaderBuilder(layers)
        self._backend: Any = torch_backend(settings, info, notify, builder, weights=weights, warm_up=False)
        [self._reader] = builder.made
        capacity = self._backend.capacity
        self.max_context: int = capacity.max_context
        scheduler = Scheduler(
            allocator=Allocator(capacity, reuse=False),  # A cached prefix would not be computed, so it would have no features.
            capacity=capacity,
            speculator=Speculator([], draft_tokens=None, tree_nodes=0),
            step_tokens=settings.step_tokens,
        )
        self._engine = Engine(backend=self._backend, scheduler=scheduler)
        self._numbers = itertools.count()

    @property
    def target(self) -> Any:
        """The target model, a Transformer, whose features are read."""
        return self._backend.model

    def read(self, examples: Sequence[Example]) -> list[TrainingSequence]:
        """Read sequences that fit into the context. The whole sequence runs as a prompt, which is faster than token by token."""
        from onedraw.backends.torch.training.trainer import training_sequence

        errors: list[OnedrawError] = []

        def sink(event: Event) -> None:
            if event.error is not None:
                errors.append(event.error)

        names = []
        for example in examples:
            names.append(f"read-{next(self._numbers)}")
            self._engine.add(Request(names[-1], example.tokens, SamplingParams(temperature=0.0, max_tokens=1)), sink)
        while self._engine.busy:
            self._engine.step()
        if errors:
            raise errors[0]
        return [
            training_sequence(example.tokens, example.generated, example.temperature, self._reader.take(name))
            for example, name in zip(examples, names, strict=True)
        ]

    def close(self) -> None:
        self._engine.close()


class DraftTraining:
    """A target whose features are read, and the trainer of its drafter. Its methods belong to the thread that made it."""

    def __init__(
        self,
        settings: Settings,
        *,
        examples: Sequence[Example],
        initial: Path | None,
        block: int,
        layers: int | None,
        mask_token: int | None = None,
        recipe: Mapping[str, Any],
        seed: int,
        buffer_bytes: int,
        notify: Progress,
    ) -> None:
        """Load the target, and make the trainer of a drafter that begins as `initial` or random. `examples`: all sequences of the
        run. The mask token of a new drafter is `mask_token`, or else a token that no example has."""
        from onedraw.backends.torch.training.trainer import Recipe, make_trainer

        with closing(find_checkpoint(settings, notify)) as checkpoint:
            info = describe(settings, checkpoint)
            tokenizer, _ = read_text(checkpoint)
            weights = None
            if initial is None:
                mask = mask_token
                if mask is None:
                    mask = unused_token(tokenizer, info, (example.tokens for example in examples))
                self.spec = new_drafter_spec(info.spec, mask_token=mask, block=block, layers=layers)
                check_drafter_fits(self.spec, info.spec)
            else:
                self.spec, weights = read_initial(initial, info.spec)
            self.reader = TargetReader(settings, info, self.spec.target_layers, notify, weights=checkpoint.fingerprint())
            try:
                self.trainer: Trainer = make_trainer(
                    self.spec,
                    weights,
                    target=self.reader.target,
                    weights=info.weights,
                    examples=self.reader.read(examples[:SCALE_EXAMPLES]),
                    positions=self.reader.max_context,
                    recipe=Recipe(**recipe),
                    seed=seed,
                    buffer_bytes=buffer_bytes,
                )
            except BaseException:
                self.reader.close()
                raise

    def close(self) -> None:
        self.reader.close()


def unused_token(tokenizer: Tokenizer, info: ModelInfo, sequences: Iterable[tuple[int, ...]]) -> int:
    """Return a token for the slots to be drafted: a special token, else the last ordinary one, that no sequence has and that
    ends no reply."""
    used = {token for sequence in sequences for token in sequence} | set(info.eos_ids)
    ids = range(min(tokenizer.vocab_size, info.spec.vocab))
    for candidates in ((i for i in ids if tokenizer.is_special(i)), reversed(ids)):
        for token in candidates:
            if token not in used:
                return token
    raise UnsupportedModel("every token of the vocabulary occurs in the data, so none is left for the slots to be drafted")


def build_torch_forward(model: Path | str, progress: Progress | None = None) -> TorchForward:
    """Open a model, by its name or path, as a differentiable torch module."""
    from onedraw.backends.torch.training.torch_forward import TorchForward

    settings = Settings.of(model=str(model))
    with closing(find_checkpoint(settings, progress)) as checkpoint:
        return TorchForward(describe(settings, checkpoint), cache=settings.cache_folder)

"""Select and build the drafters of a model: proposers on the host, and at most one drafter on the device.

The target is the model whose tokens are drafted. A proposer drafts from text that is known already (the history or a prediction);
a device drafter is a trained model: a DFlash drafter, the target's own MTP head, or a smaller model. The input is Settings, and
for a device drafter the target's open checkpoint. The output is a Speculator, and a DrafterBuilder, which makes the drafter once
the target is loaded. A drafter that does not fit the target is an error that says why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from onedraw.backends.devices import float_dtype
from onedraw.backends.memory_plan import INT4_MULTIPLE, MemoryPlan, drafter_pages, drafter_window
from onedraw.backends.packing import gpu_packed_savings, is_gpu_packed
from onedraw.build.checkpoint import Progress, open_drafter, read_text
from onedraw.build.fit_devices import DrafterBytes
from onedraw.checkpoints import drafters
from onedraw.checkpoints.base import Checkpoint
from onedraw.checkpoints.catalogue import find_in_catalogue
from onedraw.checkpoints.download import resolve_model
from onedraw.checkpoints.random_weights import DRAFTER_SHAPES, is_random
from onedraw.errors import BadSetting, ModelError, UnsupportedModel
from onedraw.models.dflash import check_drafter_fits, is_drafter, read_drafter_info
from onedraw.models.mtp import MtpSpec, has_mtp, read_mtp_info
from onedraw.models.registry import ModelInfo, read_model_info
from onedraw.models.source import ModelSource
from onedraw.models.spec import DTYPE_BYTES, AttentionSpec, DrafterSpec, ModelSpec, kv_head_bytes
from onedraw.settings import DRAFT_WORDS, Settings
from onedraw.speculation.draft_tree import build_tree
from onedraw.speculation.proposers import NgramProposer, PredictionProposer, Proposer
from onedraw.speculation.speculator import Speculator
from onedraw.text.tokenizer import Tokenizer

HOST_WEIGHTS = ("predecessor", "successor")  # weights of a drafter that stay in its file, from which the host reads single rows
DRAFT_MODEL_TOKENS = 4  # how many tokens a draft model drafts if --draft-tokens is not given
NAME_KEYS = ("general.name", "general.basename", "_name_or_path")  # metadata keys under which a checkpoint names its model
PROPOSERS: Mapping[str, Callable[[], Proposer]] = {"prediction": PredictionProposer, "ngram": NgramProposer}


def make_speculator(settings: Settings) -> Speculator:
    """Return a Speculator with the proposers on the host. The drafts of the backend's own drafter reach it with the outcome of
    every step."""
    return Speculator(
        [PROPOSERS[name]() for name in proposer_names(settings)],
        draft_tokens=settings.draft_tokens,
        tree_nodes=settings.tree_budget,
    )


def proposer_names(settings: Settings) -> tuple[str, ...]:
    """Return the names of the host proposers that --draft enables, the cheapest first whatever their order in --draft."""
    return tuple(name for name in PROPOSERS if name in settings.draft or "auto" in settings.draft)


def drafter_names(settings: Settings) -> tuple[str, ...]:
    """Return the paths and hub ids in --draft, which name drafters and draft models that run on the device."""
    return tuple(entry for entry in settings.draft if entry not in DRAFT_WORDS)


def select_drafter(
    settings: Settings, info: ModelInfo, checkpoint: Checkpoint, progress: Progress | None = None
) -> Path | Literal["mtp"] | None:
    """Return the drafter on the device: the one that --draft names, downloaded first if needed, or with `auto` a drafter that
    ships for this model, else the downloaded one that the catalogue names for it, else the model's MTP head. None if there is
    none."""
    named: list[str] = [*drafter_names(settings), *(["mtp"] if "mtp" in settings.draft else [])]
    if len(named) > 1:
        raise BadSetting(
            f"--draft: only one drafter can run on the device, not {len(named)}; auto, ngram and prediction may be added"
        )
    if named == ["mtp"]:
        return "mtp"
    if named:
        return Path(named[0]) if is_random(named[0]) else resolve_model(named[0], settings.cache_folder, progress)
    if "auto" not in settings.draft:
        return None
    built_in = find_built_in_drafter(info.spec, checkpoint) or find_downloaded_drafter(settings, info, checkpoint)
    return built_in or ("mtp" if has_mtp(checkpoint, info) else None)


def find_downloaded_drafter(settings: Settings, info: ModelInfo, checkpoint: Checkpoint) -> Path | None:
    """Return the drafter that the catalogue names for this model, if it was downloaded, as `onedraw pull` does, and fits."""
    known = find_in_catalogue(settings.model, checkpoint.path)
    if known is None or known.drafter is None:
        return None
    try:
        path = resolve_model(known.drafter, settings.cache_folder, offline=True)
        drafter = open_drafter(path)
    except ModelError:
        return None
    try:
        check_drafter_fits(read_drafter_info(drafter, len(info.spec.layers)).spec, info.spec)
    except UnsupportedModel:
        return None
    finally:
        drafter.close()
    return path


def known_drafter(info: ModelInfo, *, packed: bool) -> Path | None:
    """Return a DFlash drafter of a known shape that fits this model, so that memory can be planned although no drafter is named.
    `packed` is whether the model's weights stay quantized."""
    for name in DRAFTER_SHAPES:
        path = Path(f"random:{name}-q4_k_m" if packed else f"random:{name}")
        try:
            check_drafter_fits(read_drafter_info(open_drafter(path)).spec, info.spec)
        except UnsupportedModel:
            continue
        return path
    return None


def drafter_bytes(source: Path | Literal["mtp"] | None, info: ModelInfo, checkpoint: Checkpoint) -> DrafterBytes | None:
    """Return the bytes of a drafter as a function of the memory plan. The model's embedding and head are not counted, because the
    drafter shares them."""
    if source is None:
        return None
    spec: DrafterSpec | ModelSpec | MtpSpec
    saved = twice = 0  # bytes that packed weights save; number of weights that are stored twice
    if isinstance(source, Path):
        with closing(open_drafter(source)) as own:
            if is_drafter(own):
                drafter = read_drafter_info(own, len(info.spec.layers))
                spec = drafter.spec
                # The weights that project to keys and values are stored twice: the second time for the context, the target's
                # features.
                contexts = [drafter.weights.tensor(index, name) for index in range(len(spec.layers)) for name in ("k", "v")]
                twice, saved = sum(math.prod(tensor.shape) for tensor in contexts), gpu_packed_savings(contexts)
                # Weights that stay in the file take no bytes on the device.
                codebooks = [drafter.weights.tensor(None, name) for name in HOST_WEIGHTS if name in drafter.spec.outer_shapes()]
                twice -= sum(math.prod(tensor.shape) for tensor in codebooks)
                saved -= gpu_packed_savings(codebooks)
            else:
                spec = read_model_info(own).spec
            saved += gpu_packed_savings(own.tensors.values())
    else:
        spec = read_mtp_info(checkpoint, info).spec
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]

    def size(plan: MemoryPlan) -> int:
        dtype = float_dtype(plan.dtype)
        weights = DTYPE_BYTES[dtype] * (spec.parameters + twice) - (saved if is_gpu_packed(plan.dtype) else 0)
        pages = [plan.pages[0]] * len(mixers)  # a draft model or an MTP head has the target's pages
        if isinstance(spec, DrafterSpec):
            given = {"target_pages": plan.pages[0], "lanes": plan.max_batch, "block": spec.block, "page_size": plan.page_size}
            pages = [drafter_pages(drafter_window(mixer.window), **given) for mixer in mixers]
            dtype = drafter_kv_dtype(spec, plan.kv_dtype)
        slots = [2 * mixer.kv_heads * kv_head_bytes(mixer.head_dim, dtype) * plan.page_size for mixer in mixers]
        return weights + sum(size * (count + 1) for size, count in zip(slots, pages, strict=True))

    return size


def drafter_kv_dtype(spec: DrafterSpec, target: str) -> str:
    """Return the dtype of a DFlash drafter's keys and values: the target's, where the drafter's heads can have it."""
    narrow = target == "int4" and any(layer.attention.head_dim % INT4_MULTIPLE for layer in spec.layers)
    return "int8" if narrow else target


class DeviceDrafter(Protocol):
    """A component on the device that reads the target's features: a drafter, or a reader for training."""

    @property
    def named(self) -> str:
        """The component's name in messages to the user."""
        ...

    def size(self, info: ModelInfo) -> DrafterBytes | None:
        """Return the component's bytes as a function of the memory plan, or None if it needs none."""
        ...

    def maker(self, settings: Settings, target: ModelInfo, *, max_context: int) -> Callable[[Any, Any, Any], Any]:
        """Return a function that makes the component once the target is loaded."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterBuilder:
    """A device drafter for a target: a DFlash drafter, the target's own MTP head, or a smaller model."""

    source: Path | Literal["mtp"]
    tokenizer: Tokenizer
    target: Checkpoint  # The target's checkpoint stays open until the backend is built.

    @property
    def named(self) -> str:
        return self.source.name if isinstance(self.source, Path) else "the model's own head"

    def size(self, info: ModelInfo) -> DrafterBytes | None:
        return drafter_bytes(self.source, info, self.target)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the drafter's weights; a constant for an MTP head, whose weights are in the model's fingerprint. It
        is part of the fingerprint of snapshots, so its definition must never change."""
        if not isinstance(self.source, Path):
            return "its own head"
        with closing(open_drafter(self.source)) as checkpoint:
            return f"{checkpoint.fingerprint()} {checkpoint.stamp()}"

    def maker(self, settings: Settings, target: ModelInfo, *, max_context: int) -> Callable[[Any, Any, Any], Any]:
        """Return a function that makes the drafter once the target is loaded. Raise UnsupportedModel if the drafter does not
        fit."""
        from onedraw.backends.torch.drafters.base import CANDIDATES
        from onedraw.backends.torch.drafters.dflash import DflashDrafter
        from onedraw.backends.torch.drafters.draft_model import DraftingModel, DraftModel, MtpHead, SmallModel
        from onedraw.backends.torch.model.transformer import Transformer
        from onedraw.backends.torch.runner.pipeline import StageDevice
        from onedraw.backends.torch.state.kv_pages import KV_DTYPES

        sizes = {"lanes": settings.lanes, "max_context": max_context}

        def ahead(model: DraftingModel, layout: Any) -> DraftModel:
            return DraftModel(model, layout=layout, length=settings.draft_tokens or DRAFT_MODEL_TOKENS, **sizes)

        def make(transformer: Transformer, sampler: object, layout: Any) -> DflashDrafter | DraftModel:
            if not isinstance(self.source, Path):
                head = read_mtp_info(self.target, target)
                return ahead(MtpHead(head.spec, head.weights, target=transformer, layout=layout, max_context=max_context), layout)
            with closing(open_drafter(self.source)) as checkpoint:
                if is_drafter(checkpoint):
                    drafter = read_drafter_info(checkpoint, len(target.spec.layers))
                    check_drafter_fits(drafter.spec, target.spec)
                    arrange = lambda candidates: build_tree(candidates, settings.tree_budget)  # noqa: E731
                    width = CANDIDATES if settings.tree_budget else 1
                    kept = "" if settings.kv_dtype == "auto" else drafter_kv_dtype(drafter.spec, settings.kv_dtype)
                    return DflashDrafter(
                        drafter.spec,
                        drafter.weights,
                        target=transformer,
                        layout=layout,
                        arrange=arrange,
                        width=width,
                        kv_dtype=KV_DTYPES.get(kept),
                        **sizes,
                    )
                model = read_model_info(checkpoint)
                self._check_model(self.source, checkpoint, model, target)
                small = Transformer(
                    model.spec,
                    model.weights,
                    dtype=transformer.dtype,
                    stage_devices=[StageDevice(transformer.device, transformer.ops)],
                    max_context=max_context + 1,
                )
                return ahead(SmallModel(small, layout=layout), layout)

        return make

    def _check_model(self, path: Path, checkpoint: Checkpoint, model: ModelInfo, target: ModelInfo) -> None:
        if model.spec.recurrent:
            raise UnsupportedModel(
                f"{path.name} cannot draft: its recurrent state cannot be rolled back; "
                "use a model without recurrent layers, or a DFlash drafter"
            )
        if model.spec.vocab != target.spec.vocab:
            raise UnsupportedModel(
                f"{path.name} cannot draft: its vocabulary has {model.spec.vocab} tokens, the model's {target.spec.vocab}"
            )
        if read_text(checkpoint)[0].fingerprint != self.tokenizer.fingerprint:
            raise UnsupportedModel(f"{path.name} cannot draft: its tokenizer differs from the model's")


@dataclass(frozen=True, slots=True)
class BuiltInDrafter:
    """A DFlash drafter that ships with the package, and the target that it was trained for."""

    file: str  # the name of its file in the folder checkpoints/drafters
    family: str
    layers: int
    hidden: int
    vocab: int
    name: str  # regular expression for the target's name in lower case without punctuation

    def belongs_to(self, spec: ModelSpec, names: list[str]) -> bool:
        shape = (spec.family, len(spec.layers), spec.hidden, spec.vocab)
        return shape == (self.family, self.layers, self.hidden, self.vocab) and any(re.search(self.name, name) for name in names)


BUILT_IN_DRAFTERS = (
    BuiltInDrafter("smollm2-dflash.q8_0.gguf", family="llama", layers=30, hidden=576, vocab=49152, name="smollm2"),
)


def find_built_in_drafter(spec: ModelSpec, source: ModelSource) -> Path | None:
    """Return the path of the built-in drafter of this target, or None if there is none.

    A built-in drafter belongs to a target that has the shape and a name for which it was trained. The names of a target are
    general.name and general.basename of a GGUF file, _name_or_path of a config, and the names of the file and its folder. A wrong
    match only makes drafts worse; it never changes a token.
    """
    given = [source.config.get(key) for key in NAME_KEYS]
    # Only the names of the file and of its folder count, because folders further up are not named after the model.
    given += [source.path.name, source.path.parent.name]
    names = [re.sub(r"[^a-z0-9]", "", value.lower()) for value in given if isinstance(value, str)]
    for drafter in BUILT_IN_DRAFTERS:
        if drafter.belongs_to(spec, names):
            return Path(drafters.__path__[0]) / drafter.file
    return None

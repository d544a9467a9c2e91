"""Settings → a running model behind its door. The only file that names concrete classes.

In: Settings. Out: a Door whose service is ready. Errors say what is missing; nothing half-built stays behind.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onedraw import __version__
from onedraw.backends.base import Backend, Capacity, Exports, require_state_dtype
from onedraw.backends.devices import Device
from onedraw.backends.fake import FakeBackend
from onedraw.backends.packing import PACKED_DTYPES, hold, is_narrow, matrix_kinds, product_dtype
from onedraw.backends.plan import DRAFTS_PER_LANE, MemoryPlan, memory_plan
from onedraw.backends.precision import activation_precision
from onedraw.backends.split import SplitPlan, plan_split, with_advice
from onedraw.checkpoints.base import Checkpoint, open_checkpoint
from onedraw.checkpoints.pull import resolve
from onedraw.door import Door
from onedraw.drafters import built_in
from onedraw.engine.engine import Engine, Observer
from onedraw.engine.scheduler import Scheduler
from onedraw.engine.service import Service
from onedraw.engine.shelf import Shelf
from onedraw.errors import BadSetting, NoRoom, UnsupportedModel
from onedraw.memory.disk import SnapshotFolder
from onedraw.memory.ledger import Ledger
from onedraw.models.dflash import check_fit, describe_drafter, is_drafter
from onedraw.models.loading import Described, describe
from onedraw.models.mtp import MtpSpec, describe_mtp, has_mtp
from onedraw.models.spec import DTYPE_BYTES, AttentionSpec, DrafterSpec, ModelSpec
from onedraw.settings import DRAFT_WORDS, Settings, default_cache_dir
from onedraw.speculation.ngram import NgramProposer
from onedraw.speculation.prediction import PredictionProposer
from onedraw.speculation.proposer import Proposer
from onedraw.speculation.speculator import Speculator
from onedraw.speculation.tree import build_tree
from onedraw.text.template import ChatTemplate
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.toy import READABLE, toy_template, toy_tokenizer
from onedraw.text.trace import Tracer
from onedraw.types import ModelCard

if TYPE_CHECKING:
    from onedraw.backends.torch.selfcheck import SelfCheck
    from onedraw.backends.xla.selfcheck import SelfCheck as XlaCheck

log = logging.getLogger("onedraw")
Progress = Callable[[str], None]
DrafterBytes = Callable[[MemoryPlan], int]
DRAFT_MODEL_TOKENS = 4  # how far a draft model runs ahead where nobody said
PROPOSERS: Mapping[str, Callable[[], Proposer]] = {"prediction": PredictionProposer, "ngram": NgramProposer}


def open_door(settings: Settings, progress: Progress | None = None, *, speculator: Speculator | None = None) -> Door:
    """Load a model and start its engine. `progress` hears one line per stage."""
    tell = progress or (lambda line: None)
    match settings.backend:
        case "fake":
            return _fake_door(settings, speculator or make_speculator(settings))
        case "torch" | "xla":
            return _model_door(settings, tell, speculator or make_speculator(settings))


def make_speculator(settings: Settings) -> Speculator:
    """Those who guess on the host. What a backend's own drafter guesses is offered to it turn by turn."""
    return Speculator([PROPOSERS[name]() for name in proposer_names(settings)], draft_tokens=settings.draft_tokens)


def proposer_names(settings: Settings) -> tuple[str, ...]:
    """Who guesses on the host under --draft, in order of cost. What it costs to ask, not how --draft was written, decides."""
    return tuple(name for name in PROPOSERS if name in settings.draft or "auto" in settings.draft)


def drafter_paths(settings: Settings) -> tuple[Path, ...]:
    """The drafters and draft models that --draft names, which the backend runs."""
    return tuple(Path(entry) for entry in settings.draft if entry not in DRAFT_WORDS)


def chosen_drafter(settings: Settings, described: Described, checkpoint: Checkpoint) -> Path | Literal["mtp"] | None:
    """Who drafts on the device: who --draft names, or under auto what comes with this model, a shipped drafter or its head."""
    named: list[Path | Literal["mtp"]] = [*drafter_paths(settings)]
    if "mtp" in settings.draft:
        named.append("mtp")
    if len(named) > 1:
        raise BadSetting(f"--draft: one drafter on the device, not {len(named)}; auto, ngram and prediction may stand beside it")
    if named:
        return named[0]
    if "auto" not in settings.draft:
        return None
    return built_in(described.spec, checkpoint) or ("mtp" if has_mtp(checkpoint, described) else None)


def make_service(
    make_backend: Callable[[], Backend],
    settings: Settings,
    speculator: Speculator,
    *,
    weights: str = "",
    observer: Observer | None = None,
) -> Service:
    """The engine around a backend, both made on the engine's own thread. `weights`: a fingerprint of the model, and of the
    drafter beside it."""

    def make_engine() -> Engine:
        backend = make_backend()
        capacity = backend.capacity
        ledger = Ledger(capacity, reuse=settings.prefix_cache)
        scheduler = Scheduler(ledger=ledger, capacity=capacity, speculator=speculator, turn_tokens=settings.turn_tokens)
        shelf = _shelf(settings, backend, ledger, weights)
        return Engine(backend=backend, scheduler=scheduler, observer=observer, shelf=shelf)

    return Service(make_engine, queue_limit=settings.queue_limit)


def _shelf(settings: Settings, backend: Backend, ledger: Ledger, weights: str) -> Shelf | None:
    """Snapshots in the cache folder, where a budget was given. Their fingerprint is all that decides about bits."""
    if settings.cache_budget is None:
        return None
    assert isinstance(backend, Exports)
    capacity = backend.capacity
    fingerprint = (
        f"onedraw {__version__}, weights {weights}, {backend.identity}, {_dtypes(capacity)}, chunk {capacity.chunk}, "
        f"page {capacity.page_size}, windows {[group.window for group in capacity.groups]}, drafter {capacity.drafter or 'none'}"
    )
    folder = SnapshotFolder(
        (settings.cache_dir or default_cache_dir()) / "snapshots",
        fingerprint=fingerprint,
        page_size=capacity.page_size,
        budget=settings.cache_budget,
    )
    return Shelf(folder, ledger=ledger, backend=backend)


def find_checkpoint(settings: Settings, progress: Progress | None = None) -> Checkpoint:
    """The model's name → an open checkpoint, pulled first where it must be."""
    path = resolve(settings.model, settings.cache_dir or default_cache_dir(), progress=progress)
    return open_checkpoint(path)


def plan_memory(settings: Settings, described: Described, *, dtype: str) -> MemoryPlan:
    return memory_plan(
        described.spec,
        dtype=dtype,
        weights=hold(described.weights).weights if dtype in PACKED_DTYPES else None,
        max_context=settings.max_context,
        max_batch=settings.max_batch,
        page_size=settings.page_size,
        turn_tokens=settings.turn_tokens,
        kv_memory=settings.kv_memory,
        drafts=0 if "none" in settings.draft else max(settings.draft_tokens or 0, settings.tree_budget, DRAFTS_PER_LANE),
        draft_memory=settings.draft_memory,
        checkpoint_memory=settings.checkpoint_memory if settings.prefix_cache else 0,
    )


def plan_devices(
    settings: Settings,
    described: Described,
    devices: Sequence[Device],
    *,
    drafter: DrafterBytes | None = None,
    no_kernels: str = "",
) -> tuple[MemoryPlan, SplitPlan]:
    """Sizes for these devices and the bytes of each, or NoRoom that says what would fit. One device is a split of one.

    `no_kernels`: why a CPU cannot multiply with packed weights here.
    """
    dtype = product_dtype(
        devices,
        asked=settings.dtype,
        activations=settings.cpu_activations,
        stream=settings.activation_dtype,
        narrow=is_narrow(matrix_kinds(described.weights)),
        no_kernels=no_kernels,
    )
    activation = activation_precision(devices, asked=settings.activation_dtype, products=settings.dtype)
    plan = plan_memory(settings, described, dtype=dtype)

    def split(context: int) -> SplitPlan:
        sizes = plan_memory(replace(settings, max_context=context), described, dtype=dtype)
        return plan_split(
            described.spec,
            sizes,
            devices,
            split=settings.split,
            activation=activation,
            turn_tokens=settings.turn_tokens,
            beside=0 if drafter is None else drafter(sizes),
        )

    return plan, with_advice(split, plan.max_context)


def drafter_bytes(chosen: Path | Literal["mtp"] | None, described: Described, checkpoint: Checkpoint) -> DrafterBytes | None:
    """What a drafter takes beside the model. It reads the model's own embedding and head, so there is no copy of those."""
    if chosen is None:
        return None
    spec: DrafterSpec | ModelSpec | MtpSpec
    if isinstance(chosen, Path):
        own = open_checkpoint(chosen)
        try:
            spec = describe_drafter(own).spec if is_drafter(own) else describe(own).spec
        finally:
            own.close()
    else:
        spec = describe_mtp(checkpoint, described).spec
    numbers = sum(2 * m.kv_heads * m.head_dim for layer in spec.layers if isinstance(m := layer.mixer, AttentionSpec))

    def size(plan: MemoryPlan) -> int:
        return DTYPE_BYTES[plan.kv_dtype] * (spec.parameters + numbers * plan.page_size * (plan.pages[0] + 1))

    return size


def read_text(checkpoint: Checkpoint) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and chat template, from the folder's files or the GGUF's key-values."""
    if checkpoint.dialect == "gguf":
        return Tokenizer.from_gguf(checkpoint.config), ChatTemplate.from_gguf(checkpoint.config)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)


# ---------------------------------------------------------------------- the two kinds of door


def _fake_door(settings: Settings, speculator: Speculator) -> Door:
    require_state_dtype(settings.state_dtype, "states of recurrent layers")
    if drafter_paths(settings) or "mtp" in settings.draft:
        raise BadSetting("--draft: the fake backend runs no drafter; auto, none, ngram and prediction work there")
    tokenizer = toy_tokenizer()
    context = settings.max_context or 2048
    per_sequence = -(-context // settings.page_size)
    if settings.kv_memory is not None and settings.kv_memory < per_sequence:
        raise NoRoom(f"one sequence of {context} tokens needs {per_sequence} pages and --kv-memory gives {settings.kv_memory}")

    def make_backend() -> Backend:
        return FakeBackend(
            vocab=tokenizer.vocab_size,
            pages=settings.kv_memory or settings.max_batch * per_sequence,  # a fake page weighs one byte
            lanes=settings.max_batch,
            page_size=settings.page_size,
            max_context=context,
            checkpoints=16 if settings.cache_budget is not None else 0,
            favoured=tokenizer.encode(READABLE, add_special=False),
        )

    service = make_service(make_backend, settings, speculator, weights="fake", observer=_observer(settings, tokenizer))
    card = _card(settings, family="fake", weights="fake", capacity=service.capacity, eos=(tokenizer.eos_id or 0,), defaults={})
    return Door(service=service, tokenizer=tokenizer, template=toy_template(), card=card)


def _model_door(settings: Settings, tell: Progress, speculator: Speculator) -> Door:
    """A checkpoint behind a backend that computes."""
    if settings.backend == "xla":
        _require_jax()
    checkpoint = find_checkpoint(settings, tell)
    try:
        described = describe(checkpoint)
        spec = described.spec
        tell(f"loading {checkpoint.path.name} ({spec.family}, {spec.parameters / 1e6:.0f} M parameters)")
        tokenizer, template = read_text(checkpoint)
        weights = checkpoint.fingerprint()
        chosen = None if settings.backend == "xla" else chosen_drafter(settings, described, checkpoint)
        drafting = None if chosen is None else Drafting(chosen, tokenizer, checkpoint)

        def make_backend() -> Backend:
            if settings.backend == "xla":
                return _xla_backend(settings, described, tell)
            return _torch_backend(settings, described, tell, drafting)

        service = make_service(
            make_backend,
            settings,
            speculator,
            weights=weights + ("" if drafting is None else f" and {drafting.fingerprint}"),
            observer=_observer(settings, tokenizer),
        )
    finally:
        checkpoint.close()
    card = _card(
        settings,
        family=spec.family,
        weights=weights,
        capacity=service.capacity,
        eos=tuple(described.eos_ids),
        defaults=described.defaults,
    )
    return Door(service=service, tokenizer=tokenizer, template=template, card=card)


def _torch_backend(settings: Settings, described: Described, tell: Progress, drafting: Drafting | None) -> Backend:
    from onedraw.backends.torch.backend import TorchBackend
    from onedraw.backends.torch.device import find_devices, pick_ops, set_threads, why_no_kernels
    from onedraw.backends.torch.stack import Site

    require_state_dtype(settings.state_dtype, "states of recurrent layers")
    cache = settings.cache_dir or default_cache_dir()
    size = None if drafting is None else drafter_bytes(drafting.source, described, drafting.target)
    devices = find_devices(settings.device_names)
    on_cpu = all(device.kind == "cpu" for device in devices)
    plan, split = plan_devices(
        settings, described, devices, drafter=size, no_kernels=why_no_kernels(cache) if on_cpu and settings.dtype != "f32" else ""
    )

    names = dict.fromkeys(stage.device.name for stage in split.stages)  # stages on one device share its team of threads
    given: dict[str, Any] = {"activation": split.activation, "cache": cache, "threads": settings.threads, "warn": log.warning}
    ops = {name: pick_ops(name, plan.dtype, **given) for name in names}
    set_threads(settings.threads, list(ops.values()))
    backend = TorchBackend(
        described.spec,
        described.weights,
        dtype=plan.dtype,
        activation=split.activation,
        sites=[Site.named(stage.device.name, ops[stage.device.name], stop=stage.stop) for stage in split.stages],
        rows=split.staging.rows,
        lanes=settings.max_batch,
        pages=plan.pages,
        page_size=settings.page_size,
        max_context=plan.max_context,
        drafts=plan.draft_positions,
        checkpoints=plan.checkpoints,
        check=settings.self_check,
        make_drafter=None if drafting is None else drafting.maker(settings, described, max_context=plan.max_context),
    )
    _tell_check(backend.report, tell)
    if backend.capacity.drafter and drafting is not None:
        tell(f"drafting with {drafting.named} ({backend.capacity.drafter})")
    return backend


def _require_jax() -> None:
    if importlib.util.find_spec("jax") is None:
        raise BadSetting('--backend xla needs jax, which is not installed here: pip install "onedraw[xla]"')


def _xla_backend(settings: Settings, described: Described, tell: Progress) -> Backend:
    from onedraw.backends.xla.backend import DRAFTS, Site, XlaBackend
    from onedraw.backends.xla.platform import find_devices, keep_compiled, resolve_platform
    from onedraw.backends.xla.weights import require_interpreted

    require_state_dtype(settings.state_dtype, "states of recurrent layers")
    require_interpreted(described.spec)
    platform = resolve_platform(settings.xla_platform)
    devices, found = find_devices(platform, settings.device_names)
    kept = keep_compiled((settings.cache_dir or default_cache_dir()) / "xla")
    plan, split = plan_devices(settings, described, devices, no_kernels="the xla backend has none")
    drafts = 0 if "none" in settings.draft else DRAFTS
    by_name = dict(zip((device.name for device in devices), found, strict=True))
    begin = time.perf_counter()
    backend = XlaBackend(
        described.spec,
        described.weights,
        dtype=plan.dtype,
        activation=split.activation,
        sites=[Site(by_name[stage.device.name], stage.stop) for stage in split.stages],
        lanes=settings.max_batch,
        pages=plan.pages,
        page_size=settings.page_size,
        max_context=plan.max_context,
        turn_tokens=settings.turn_tokens,
        drafts=min(drafts, plan.draft_positions) if described.spec.recurrent else drafts,
        checkpoints=plan.checkpoints,
        check=settings.self_check,
        tell=tell,
    )
    tell(f"xla: ready after {time.perf_counter() - begin:.1f} s on {platform}; compiled programs are kept in {kept}")
    _tell_check(backend.report, tell)
    return backend


def export_graphs(settings: Settings, folder: Path, tell: Progress) -> Path:
    """A model as StableHLO graphs, in the sizes of these settings; gives the manifest's path."""
    _require_jax()
    from onedraw.backends.xla.export import export_model

    checkpoint = find_checkpoint(settings, tell)
    try:
        described = describe(checkpoint)
        plan = plan_memory(settings, described, dtype="f32")
        return export_model(
            described.spec,
            described.weights,
            folder,
            lanes=settings.max_batch,
            page_size=settings.page_size,
            pages=plan.pages,
            max_context=plan.max_context,
            turn_tokens=settings.turn_tokens,
            version=__version__,
            tell=tell,
        )
    finally:
        checkpoint.close()


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter and what it is to draft for: a block drafter, the target's own head, or any smaller model."""

    source: Path | Literal["mtp"]
    tokenizer: Tokenizer
    target: Checkpoint  # open while the backend is being made

    @property
    def named(self) -> str:
        return self.source.name if isinstance(self.source, Path) else "the model's own head"

    @property
    def fingerprint(self) -> str:
        """Of its weights; those of a model's own head are in the model's."""
        if not isinstance(self.source, Path):
            return "its own head"
        checkpoint = open_checkpoint(self.source)
        try:
            return checkpoint.fingerprint()
        finally:
            checkpoint.close()

    def maker(self, settings: Settings, target: Described, *, max_context: int) -> Callable[[Any, Any, Any], Any]:
        """Makes the drafter around the target's stack, once that is loaded. What does not fit is refused here."""
        from onedraw.backends.torch.draft_model import Ahead, DraftModel, SmallModel
        from onedraw.backends.torch.drafter import DflashDrafter
        from onedraw.backends.torch.mtp import MtpHead
        from onedraw.backends.torch.stack import Site, Stack

        sizes = {"lanes": settings.max_batch, "max_context": max_context}

        def ahead(model: Ahead, shape: Any) -> DraftModel:
            return DraftModel(model, shape=shape, length=settings.draft_tokens or DRAFT_MODEL_TOKENS, **sizes)

        def make(stack: Stack, sampler: object, shape: Any) -> DflashDrafter | DraftModel:
            if not isinstance(self.source, Path):
                head = describe_mtp(self.target, target)
                return ahead(MtpHead(head.spec, head.weights, target=stack, shape=shape, max_context=max_context), shape)
            checkpoint = open_checkpoint(self.source)
            try:
                if is_drafter(checkpoint):
                    drafter = describe_drafter(checkpoint)
                    check_fit(drafter.spec, target.spec)
                    arrange = lambda candidates: build_tree(candidates, settings.tree_budget)  # noqa: E731
                    return DflashDrafter(drafter.spec, drafter.weights, target=stack, shape=shape, arrange=arrange, **sizes)
                model = describe(checkpoint)
                self._check_model(self.source, checkpoint, model, target)
                small = Stack(
                    model.spec,
                    model.weights,
                    dtype=stack.dtype,
                    sites=[Site(stack.device, stack.ops)],
                    max_context=max_context + 1,
                )
                return ahead(SmallModel(small, shape=shape), shape)
            finally:
                checkpoint.close()

        return make

    def _check_model(self, path: Path, checkpoint: Checkpoint, model: Described, target: Described) -> None:
        if model.spec.recurrent:
            raise UnsupportedModel(
                f"{path.name} cannot draft: its state only moves forward, and a draft model runs ahead and comes back; "
                "pass a model without recurrent layers, or a DFlash drafter"
            )
        if model.spec.vocab != target.spec.vocab:
            raise UnsupportedModel(
                f"{path.name} cannot draft: its vocabulary has {model.spec.vocab} tokens, the model's {target.spec.vocab}"
            )
        if read_text(checkpoint)[0].fingerprint != self.tokenizer.fingerprint:
            raise UnsupportedModel(f"{path.name} cannot draft: its tokenizer is not the model's")


def _observer(settings: Settings, tokenizer: Tokenizer) -> Observer | None:
    return Tracer(tokenizer) if settings.trace_verify else None


def _tell_check(report: SelfCheck | XlaCheck | None, tell: Progress) -> None:
    if report is None:
        tell("self-check skipped")
    elif report.holds:
        tell(f"self-check: {len(report.findings)} of {len(report.findings)} hold, a row computes from its row")
    else:
        for finding in report.findings:
            if not finding.holds:
                log.warning("self-check: does NOT hold on this machine: %s; batching may change low bits", finding.what)


def _card(
    settings: Settings,
    *,
    family: str,
    weights: str,
    capacity: Capacity,
    eos: tuple[int, ...],
    defaults: dict[str, float | int],
) -> ModelCard:
    return ModelCard(
        name=settings.served_name or _name_of(settings.model),
        family=family,
        vocab=capacity.vocab,
        max_context=capacity.max_context,
        eos_ids=eos,
        defaults=defaults,
        fingerprint=f"onedraw-{__version__}-{weights[:12]}-{capacity.device}-{_dtypes(capacity)}-c{capacity.chunk}",
        created=int(time.time()),
        dtype=capacity.dtype,
        device=capacity.device,
    )


def _dtypes(capacity: Capacity) -> str:
    """Of the products, and of the residual stream where it has another. Packed weights go with a float32 stream."""
    usual = "f32" if capacity.dtype in PACKED_DTYPES else capacity.dtype
    return capacity.dtype + ("" if capacity.activation in (usual, capacity.dtype) else f"-{capacity.activation}")


def _name_of(model: str) -> str:
    """What clients call the model: of a path the last part, else the name as it was given (a hub id has dots of its own)."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model

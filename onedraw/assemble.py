"""Settings → a running model behind its door. The only file that names concrete classes.

In: Settings. Out: a Door whose service is ready. Errors say what is missing; nothing half-built stays behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onedraw import __version__
from onedraw.backends.base import Backend, Capacity
from onedraw.backends.fake import FakeBackend
from onedraw.backends.plan import MemoryPlan, memory_plan
from onedraw.checkpoints.base import Checkpoint, open_checkpoint
from onedraw.checkpoints.pull import resolve
from onedraw.door import Door
from onedraw.engine.engine import Engine, Observer
from onedraw.engine.scheduler import Scheduler
from onedraw.engine.service import Service
from onedraw.errors import NoRoom
from onedraw.memory.ledger import Ledger
from onedraw.models.loading import Described, describe
from onedraw.settings import DRAFT_WORDS, Settings, default_cache_dir
from onedraw.speculation.ngram import NgramProposer
from onedraw.speculation.prediction import PredictionProposer
from onedraw.speculation.proposer import Proposer
from onedraw.speculation.speculator import Speculator
from onedraw.text.template import ChatTemplate
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.toy import READABLE, toy_template, toy_tokenizer
from onedraw.text.trace import Tracer
from onedraw.types import ModelCard

if TYPE_CHECKING:
    from onedraw.backends.torch.selfcheck import SelfCheck

Progress = Callable[[str], None]
PROPOSERS: Mapping[str, Callable[[], Proposer]] = {"prediction": PredictionProposer, "ngram": NgramProposer}


def open_door(settings: Settings, progress: Progress | None = None, *, speculator: Speculator | None = None) -> Door:
    """Load a model and start its engine. `progress` hears one line per stage."""
    tell = progress or (lambda line: None)
    match settings.backend:
        case "fake":
            return _fake_door(settings, speculator or make_speculator(settings))
        case "torch":
            return _torch_door(settings, tell, speculator or make_speculator(settings))


def make_speculator(settings: Settings) -> Speculator:
    """Those who guess on the host. What a backend's own drafter guesses is offered to it turn by turn."""
    return Speculator([PROPOSERS[name]() for name in proposer_names(settings)], draft_tokens=settings.draft_tokens)


def proposer_names(settings: Settings) -> tuple[str, ...]:
    """Who guesses on the host under --draft, in order of cost. What it costs to ask, not how --draft was written, decides."""
    return tuple(name for name in PROPOSERS if name in settings.draft or "auto" in settings.draft)


def drafter_paths(settings: Settings) -> tuple[Path, ...]:
    """The drafters and draft models that --draft names, which the backend runs."""
    return tuple(Path(entry) for entry in settings.draft if entry not in DRAFT_WORDS)


def make_service(
    make_backend: Callable[[], Backend], settings: Settings, speculator: Speculator, *, observer: Observer | None = None
) -> Service:
    """The engine around a backend, both made on the engine's own thread."""

    def make_engine() -> Engine:
        backend = make_backend()
        capacity = backend.capacity
        # Pages alone do not restore a recurrent state, so such backends compute every prompt.
        ledger = Ledger(
            pages=capacity.pages,
            lanes=capacity.lanes,
            page_size=capacity.page_size,
            reuse=settings.prefix_cache and not capacity.recurrent,
        )
        scheduler = Scheduler(ledger=ledger, capacity=capacity, speculator=speculator, turn_tokens=settings.turn_tokens)
        return Engine(backend=backend, scheduler=scheduler, observer=observer)

    return Service(make_engine, queue_limit=settings.queue_limit)


def find_checkpoint(settings: Settings, progress: Progress | None = None) -> Checkpoint:
    """The model's name → an open checkpoint, pulled first where it must be."""
    path = resolve(settings.model, settings.cache_dir or default_cache_dir(), progress=progress)
    return open_checkpoint(path)


def plan_memory(settings: Settings, described: Described, *, dtype: str) -> MemoryPlan:
    return memory_plan(
        described.spec,
        dtype=dtype,
        max_context=settings.max_context,
        max_batch=settings.max_batch,
        page_size=settings.page_size,
        kv_memory=settings.kv_memory,
    )


def read_text(checkpoint: Checkpoint) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and chat template, from the folder's files or the GGUF's key-values."""
    if checkpoint.dialect == "gguf":
        return Tokenizer.from_gguf(checkpoint.config), ChatTemplate.from_gguf(checkpoint.config)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)


# ---------------------------------------------------------------------- the two kinds of door


def _fake_door(settings: Settings, speculator: Speculator) -> Door:
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
            favoured=tokenizer.encode(READABLE, add_special=False),
        )

    service = make_service(make_backend, settings, speculator, observer=_observer(settings, tokenizer))
    card = _card(settings, family="fake", weights="fake", capacity=service.capacity, eos=(tokenizer.eos_id or 0,), defaults={})
    return Door(service=service, tokenizer=tokenizer, template=toy_template(), card=card)


def _torch_door(settings: Settings, tell: Progress, speculator: Speculator) -> Door:
    checkpoint = find_checkpoint(settings, tell)
    try:
        described = describe(checkpoint)
        spec = described.spec
        tell(f"loading {checkpoint.path.name} ({spec.family}, {spec.parameters / 1e6:.0f} M parameters)")
        tokenizer, template = read_text(checkpoint)
        weights = checkpoint.fingerprint()
        service = make_service(
            lambda: _torch_backend(settings, described, tell),
            settings,
            speculator,
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


def _torch_backend(settings: Settings, described: Described, tell: Progress) -> Backend:
    from onedraw.backends.torch.backend import TorchBackend
    from onedraw.backends.torch.device import pick_device, pick_ops, set_threads

    set_threads(settings.threads)
    device, dtype = pick_device(settings.device, settings.dtype)
    plan = plan_memory(settings, described, dtype=dtype)
    backend = TorchBackend(
        described.spec,
        described.weights,
        dtype=dtype,
        device=device,
        lanes=settings.max_batch,
        pages=plan.pages,
        page_size=settings.page_size,
        max_context=plan.max_context,
        ops=pick_ops(device, dtype, cache=settings.cache_dir or default_cache_dir(), tell=tell),
        check=settings.self_check,
    )
    _tell_check(backend.report, tell)
    return backend


def _observer(settings: Settings, tokenizer: Tokenizer) -> Observer | None:
    return Tracer(tokenizer) if settings.trace_verify else None


def _tell_check(report: SelfCheck | None, tell: Progress) -> None:
    if report is None:
        tell("self-check skipped")
    elif report.holds:
        tell(f"self-check: {len(report.findings)} of {len(report.findings)} hold, a row computes from its row")
    else:
        for finding in report.findings:
            if not finding.holds:
                tell(f"self-check: does NOT hold on this machine: {finding.what}; batching may change low bits")


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
        fingerprint=f"onedraw-{__version__}-{weights[:12]}-{capacity.device}-{capacity.dtype}-c{capacity.chunk}",
        created=int(time.time()),
        dtype=capacity.dtype,
        device=capacity.device,
    )


def _name_of(model: str) -> str:
    """What clients call the model: of a path the last part, else the name as it was given (a hub id has dots of its own)."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model

"""Build a running LLM from Settings: checkpoint, backend, engine, service. Only the `build` package names concrete backends.

The LLM that is returned is ready to serve. If a part cannot be built, everything built before it is closed.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onedraw import __version__
from onedraw.backends.base import Backend, Capacity, SelfCheck, SupportsSnapshots, require_state_dtype
from onedraw.backends.devices import RAY, Device, can_overlap, float_dtype, packed_kernels, parse_device
from onedraw.backends.fake import FakeBackend, ScriptedBackend
from onedraw.backends.packing import SPAN_BYTES, matrix_kinds
from onedraw.backends.placement import SplitPlan
from onedraw.build.checkpoint import Progress, describe, find_checkpoint, read_text
from onedraw.build.drafters import DeviceDrafter, DrafterBuilder, drafter_names, make_speculator, select_drafter
from onedraw.build.engine_process import StartEngine
from onedraw.build.fit_devices import longest_draft, plan_devices, reduced_context, require_host_memory, with_device_sizes
from onedraw.build.weight_updates import EngineWeightUpdates, ServedWeights
from onedraw.build.xla import Export, find_export, iree_backend, require_jax, xla_backend
from onedraw.engine.checkpoint_offload import CheckpointOffload
from onedraw.engine.client import EngineClient, refuse_constraints
from onedraw.engine.engine import Engine, Observer, nothing
from onedraw.engine.remote import EventSender
from onedraw.engine.scheduler import Scheduler
from onedraw.engine.service import Service
from onedraw.errors import BadSetting, ModelError, OutOfMemory
from onedraw.llm.llm import LLM
from onedraw.memory.allocator import Allocator
from onedraw.memory.disk_snapshots import SnapshotFolder
from onedraw.models.registry import ModelInfo
from onedraw.settings import Settings
from onedraw.speculation.speculator import Speculator
from onedraw.text.chat_template import ChatTemplate
from onedraw.text.constraints.factory import ConstraintFactory
from onedraw.text.fake_tokenizer import READABLE, fake_chat_template, fake_tokenizer
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.verify_trace import VerifyTracer
from onedraw.types import ModelCard

if TYPE_CHECKING:
    from onedraw.backends.torch.ops.base import Ops
    from onedraw.backends.torch.runner.pipeline import Pipeline, StageDevice
    from onedraw.build.ray_stages import RayCluster

log = logging.getLogger("onedraw")


def build_llm(
    settings: Settings,
    progress: Progress | None = None,
    *,
    speculator: Speculator | None = None,
    warm_up: bool = True,
    start_engine: StartEngine | None = None,
    sender: EventSender | None = None,
) -> LLM:
    """Load a model and start its engine. `progress` receives one line for each stage of loading. With `warm_up`, CUDA graphs are
    captured before the first request, on devices that use them. `start_engine` starts an engine elsewhere, such as
    `EngineProcess` in a process of its own, which gets only the settings and loads the weights itself. In that process
    `build_llm` is called with `sender`, which sends the engine's events to the client."""
    notify = progress or (lambda line: None)
    _require_snapshot_dir(settings)
    engine: dict[str, Any] = {"speculator": speculator, "start_engine": start_engine, "sender": sender}
    if settings.backend == "fake":
        return _build_ready(_fake_model(settings), settings, notify, **engine)
    if (export := find_export(settings)) is not None:
        return _build_ready(_exported_model(export, settings, notify), settings, notify, **engine)
    return _build_model(settings, notify, warm_up=warm_up, **engine)


def make_service(
    make_backend: Callable[[], Backend],
    settings: Settings,
    speculator: Speculator | None,
    *,
    weights: str = "",
    observer: Observer | None = None,
    constraints: ConstraintFactory | None = None,
    sender: EventSender | None = None,
) -> Service:
    """Return a service whose engine and backend are made on the engine's thread. `weights` is the fingerprint of the model and of
    its drafter."""
    options: dict[str, Any] = {} if sender is None else {"delivered": sender.flush}

    def make_engine() -> Engine:
        backend = make_backend()
        capacity = backend.capacity
        allocator = Allocator(capacity, reuse=settings.prefix_cache)
        offload = _checkpoint_offload(settings, backend, allocator, weights)
        scheduler = Scheduler(
            allocator=allocator,
            capacity=capacity,
            speculator=speculator or make_speculator(settings),
            step_tokens=capacity.step_tokens or settings.step_tokens,
            step_seconds=settings.step_seconds or None,
            fetch=None if offload is None else offload.fetch,
            fair=settings.scheduling_policy == "fair",
        )
        return Engine(backend=backend, scheduler=scheduler, observer=observer, offload=offload, **options)

    return Service(
        make_engine,
        queue_limit=settings.queue_limit,
        build_constraint=refuse_constraints if constraints is None else constraints.build,
        on_stats=nothing if sender is None else sender.publish,
    )


def _checkpoint_offload(settings: Settings, backend: Backend, allocator: Allocator, weights: str) -> CheckpointOffload | None:
    """Return the object that keeps prompts as snapshots on disk, or None without --cache-budget. The fingerprint of snapshots
    contains everything that influences the bits of their state, so that no other model or setting reads them."""
    if settings.cache_budget is None:
        return None
    return CheckpointOffload(_snapshot_folder(settings, backend, weights), allocator=allocator, backend=backend)


def _snapshot_folder(settings: Settings, backend: Backend, weights: str) -> SnapshotFolder:
    """Open the folder of the snapshots of these weights."""
    assert isinstance(backend, SupportsSnapshots)
    assert settings.cache_budget is not None
    capacity = backend.capacity
    fingerprint = (
        f"onedraw {__version__}, weights {weights}, {backend.identity}, {_dtypes(capacity)}, chunk {capacity.chunk}, "
        f"page {capacity.page_size}, windows {[group.window for group in capacity.groups]}, drafter {capacity.drafter or 'none'}"
    )
    root = settings.snapshot_folder
    try:
        return SnapshotFolder(root, fingerprint=fingerprint, page_size=capacity.page_size, budget=settings.cache_budget)
    except OSError as error:
        raise _unusable(root, error) from None


def _require_snapshot_dir(settings: Settings) -> None:
    """Raise if the snapshot folder cannot be written, before the slow loading of a model."""
    if settings.cache_budget is None:
        return
    root = settings.snapshot_folder
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise _unusable(root, error) from None


def _unusable(root: Path, error: OSError) -> BadSetting:
    return BadSetting(
        f"--snapshot-dir: {root} cannot be used ({error.strerror or error}); name a writable folder, or omit --cache-budget "
        f"to keep no snapshots"
    )


# ---------------------------------------------------------------------- with and without weights


@dataclass(frozen=True, slots=True)
class _ReadyModel:
    """A model without a checkpoint: the fake backend's, or an export of `onedraw export`."""

    family: str
    weights: str  # fingerprint of the weights
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos: tuple[int, ...]
    defaults: dict[str, float | int]  # sampling values
    make_backend: Callable[[], Backend]


def _fake_model(settings: Settings) -> _ReadyModel:
    require_state_dtype(settings.state_dtype)
    if settings.kv_dtype != "auto":
        raise BadSetting("--kv-dtype: the fake backend has no keys and values; leave it at auto")
    if drafter_names(settings) or "mtp" in settings.draft:
        raise BadSetting("--draft: the fake backend has no drafters on the device; use auto, none, ngram or prediction")
    tokenizer = fake_tokenizer()
    context = settings.max_context or 2048
    per_sequence = -(-context // settings.page_size)
    if settings.kv_memory is not None and settings.kv_memory < per_sequence:
        raise OutOfMemory(
            f"one sequence of {context} tokens needs {per_sequence} pages and --kv-memory gives {settings.kv_memory}"
        )

    def make_backend() -> Backend:
        kind = ScriptedBackend if settings.model == "scripted" else FakeBackend
        return kind(
            vocab=tokenizer.vocab_size,
            pages=settings.kv_memory or settings.lanes * per_sequence,  # A page of the fake backend counts as 1 byte.
            lanes=settings.lanes,
            page_size=settings.page_size,
            max_context=context,
            checkpoints=16 if settings.cache_budget is not None else 0,
            async_scheduling=settings.ahead == "on",
            favoured=tokenizer.encode(READABLE, add_special=False),
        )

    return _ReadyModel("fake", "fake", tokenizer, fake_chat_template(), (tokenizer.eos_id or 0,), {}, make_backend)


def _exported_model(export: Export, settings: Settings, notify: Progress) -> _ReadyModel:
    """Return the model of an export of `onedraw export`, which IREE runs."""
    tokenizer, template = Tokenizer.from_folder(export.folder), ChatTemplate.from_folder(export.folder)

    def make_backend() -> Backend:
        backend = iree_backend(export, notify, check=settings.self_check)
        _report_self_check(backend.report, notify)
        return backend

    return _ReadyModel(export.family, export.fingerprint, tokenizer, template, export.eos_ids, export.defaults, make_backend)


def _build_ready(
    model: _ReadyModel,
    settings: Settings,
    notify: Progress,
    *,
    speculator: Speculator | None,
    start_engine: StartEngine | None,
    sender: EventSender | None,
) -> LLM:
    constraints = ConstraintFactory(model.tokenizer, model.eos, isolated=sender is None)
    service: EngineClient
    if start_engine is not None:
        with start_engine(settings) as process:
            service = process.client(constraints.build, notify)
    else:
        service = make_service(
            model.make_backend,
            settings,
            speculator,
            weights=model.weights,
            observer=_observer(settings, model.tokenizer),
            constraints=constraints,
            sender=sender,
        )
    card = model_card(
        settings,
        family=model.family,
        weights=model.weights,
        capacity=service.capacity,
        eos=model.eos,
        defaults=model.defaults,
    )
    return LLM(service=service, tokenizer=model.tokenizer, template=model.template, card=card, constraints=constraints)


def _build_model(
    settings: Settings,
    notify: Progress,
    *,
    warm_up: bool,
    speculator: Speculator | None,
    start_engine: StartEngine | None,
    sender: EventSender | None,
) -> LLM:
    """Build the LLM of a checkpoint, with the torch or the xla backend."""
    if settings.backend == "xla":
        require_jax()
    with ExitStack() as stack:
        checkpoint = stack.enter_context(closing(find_checkpoint(settings, notify)))
        # An engine in another process loads its weights while this process reads the tokenizer and the chat template.
        process = None if start_engine is None else stack.enter_context(start_engine(settings))
        info = describe(settings, checkpoint)
        tokenizer, template = read_text(checkpoint)
        weights = checkpoint.fingerprint()
        constraints = ConstraintFactory(tokenizer, info.eos_ids, isolated=sender is None)
        served, beside = ServedWeights.of(checkpoint, info), ""
        service: EngineClient
        if process is not None:
            service = process.client(constraints.build, notify)
        else:
            notify(f"loading {checkpoint.path.name} ({info.spec.family}, {info.spec.parameters / 1e6:.0f} M parameters)")
            source = None if settings.backend == "xla" else select_drafter(settings, info, checkpoint, notify)
            drafter = None if source is None else DrafterBuilder(source, tokenizer, checkpoint)

            def make_backend() -> Backend:
                if settings.backend == "xla":
                    backend = xla_backend(settings, info, notify, progress=partial(report_layers, notify))
                    _report_self_check(backend.report, notify)
                    return backend
                return torch_backend(settings, info, notify, drafter, weights=weights, warm_up=warm_up)

            beside = "" if drafter is None else f" and {drafter.fingerprint}"
            service = make_service(
                make_backend,
                settings,
                speculator,
                weights=f"{weights} {checkpoint.stamp()}{beside}",
                observer=_observer(settings, tokenizer),
                constraints=constraints,
                sender=sender,
            )
    card = model_card(
        settings,
        family=info.spec.family,
        weights=weights,
        capacity=service.capacity,
        eos=tuple(info.eos_ids),
        defaults=info.defaults,
    )
    if process is not None and process.fingerprint != card.fingerprint:
        service.close()
        constraints.close()
        raise ModelError(
            f"the engine has {process.fingerprint}, and the model here is {card.fingerprint}: have the same model and version on "
            "all machines"
        )
    updates = EngineWeightUpdates(
        served,
        service,
        fingerprint=lambda weights: _fingerprint(weights, service.capacity),
        snapshots=lambda backend, weights: _snapshot_folder(settings, backend, weights + beside),
    )
    return LLM(
        service=service, tokenizer=tokenizer, template=template, card=card, constraints=constraints, weight_updates=updates
    )


def torch_backend(
    settings: Settings,
    info: ModelInfo,
    notify: Progress,
    drafter: DeviceDrafter | None,
    *,
    weights: str = "",
    warm_up: bool = True,
) -> Backend:
    """Load the model on its devices. `weights`: the fingerprint of its checkpoint, which copies on a Ray cluster's nodes must
    have too."""
    devices, cluster = _find_all_devices(settings)
    try:
        return _torch_backend_on(devices, cluster, settings, info, notify, drafter, weights=weights, warm_up=warm_up)
    except BaseException:
        if cluster is not None:
            cluster.close()
        raise


def _torch_backend_on(
    devices: Sequence[Device],
    cluster: RayCluster | None,
    settings: Settings,
    info: ModelInfo,
    notify: Progress,
    drafter: DeviceDrafter | None,
    *,
    weights: str,
    warm_up: bool,
) -> Backend:
    from onedraw.backends.torch.backend import TorchBackend
    from onedraw.backends.torch.device import available_memory, why_no_cpu_kernels, why_no_gpu_kernels, why_no_triton

    require_state_dtype(settings.state_dtype)
    settings = with_device_sizes(settings, info.spec, devices)
    cache = settings.cache_folder
    size = None if drafter is None else drafter.size(info)
    on_cpu = all(device.kind == "cpu" for device in devices)
    quantized = not SPAN_BYTES.keys().isdisjoint(matrix_kinds(info.weights))
    kernels = {packed_kernels(device) for device in devices}
    reasons = {
        "cpu": why_no_cpu_kernels(cache) if "cpu" in kernels and settings.dtype in ("auto", "packed") else "",
        "tensor cores": why_no_gpu_kernels() if "tensor cores" in kernels and quantized else "",
        "triton": why_no_triton() if "triton" in kernels and quantized else "",
    }
    no_kernels = {kind: reason for kind, reason in reasons.items() if reason}
    plan, split = plan_devices(settings, info, devices, drafter=size, no_kernels=no_kernels)
    if on_cpu and cluster is None:
        require_host_memory(settings, plan, available_memory())
    if reduced := reduced_context(settings, info.spec.max_context, plan.max_context):
        log.warning("%s", reduced)
    for stage in split.stages:
        reason = no_kernels.get(packed_kernels(stage.device) or "")
        if reason and stage.device.kind != "cpu" and settings.dtype == "auto":
            log.warning("packed weights are dequantized to %s, because their kernels cannot run: %s", stage.dtype, reason)
            break

    overlap = len(devices) > 1 and (settings.overlap == "on" or (settings.overlap == "auto" and can_overlap(devices)))
    if overlap and info.spec.recurrent and 0 < plan.draft_positions < len(split.stages):
        log.warning(
            "--draft-memory gives %d positions, fewer than the %d steps in flight, so nothing is drafted; raise it or use "
            "--overlap off",
            plan.draft_positions,
            len(split.stages),
        )
    group = None if cluster is None else cluster.group(settings, info.spec, plan, split, weights=weights)
    pipeline = None
    try:
        local, pipeline = _stage_devices(settings, split, cache=cache, overlap=overlap)
        remote = iter([] if group is None else group.stages)
        stage_devices = [next(remote) if place is None else place for place in local]
        backend = TorchBackend(
            info.spec,
            info.weights,
            dtype=plan.dtype,
            activation=split.activation,
            kv_dtype=plan.kv_dtype,
            stage_devices=stage_devices,
            stage_dtypes=[stage.dtype for stage in split.stages],
            stage_group=group,
            rows=split.staging.rows,
            step_tokens=settings.step_tokens,
            lanes=settings.lanes,
            pages=plan.pages,
            page_size=settings.page_size,
            max_context=plan.max_context,
            drafts=plan.draft_positions,
            checkpoints=plan.checkpoints,
            check=settings.self_check,
            pipeline=pipeline,
            max_in_flight=len(stage_devices) if overlap else 1,
            ahead={"auto": None, "on": True, "off": False}[settings.ahead],
            make_drafter=None
            if drafter is None
            else drafter.maker(replace(settings, kv_dtype=plan.kv_dtype), info, max_context=plan.max_context),
            progress=partial(report_layers, notify),
        )
    except BaseException:
        if pipeline is not None:
            pipeline.close()
        raise
    _report_self_check(backend.report, notify)
    if warm_up:
        try:
            backend.warm_up(notify, drafts=longest_draft(settings))
        except BaseException:
            backend.close()
            raise
    if backend.capacity.drafter and drafter is not None:
        notify(f"drafting with {drafter.named} ({backend.capacity.drafter})")
    return backend


def _find_all_devices(settings: Settings) -> tuple[list[Device], RayCluster | None]:
    """Return the devices that the settings name, with their memory, and the Ray cluster if some are on its nodes."""
    from onedraw.backends.torch.device import available_memory, find_devices

    named = settings.device_names
    if not any(name.startswith(RAY) for name in named):
        return find_devices(named), None
    from onedraw.build.ray_stages import RayCluster, require_last_here

    require_last_here([parse_device(name) for name in named if name != "auto"])
    cluster = RayCluster()
    try:
        found = find_devices([name for name in named if not name.startswith(RAY)])
        local = iter(replace(one, memory=available_memory()) if one.kind == "cpu" else one for one in found)
        return [cluster.find(parse_device(name)) if name.startswith(RAY) else next(local) for name in named], cluster
    except BaseException:
        cluster.close()
        raise


def _stage_devices(
    settings: Settings, split: SplitPlan, *, cache: Path, overlap: bool
) -> tuple[list[StageDevice | None], Pipeline | None]:
    """Return the device and operations of each stage (the layers on one device), None for a stage on another node, and a pipeline
    of threads if stages run in parallel or on cores of their own."""
    from onedraw.backends.torch.device import on_cores, pick_ops, set_threads
    from onedraw.backends.torch.runner.pipeline import Pipeline, StageDevice

    given: dict[str, Any] = {"cache": cache, "warn": log.warning}
    made: dict[object, Ops] = {}  # Stages on one device share an Ops and its thread pool, unless they run in parallel.
    stage_devices: list[StageDevice | None] = []
    openings: list[Callable[[], None]] = []
    for number, stage in enumerate(split.stages):
        if stage.device.node:
            stage_devices.append(None)
            openings.append(lambda: None)
            continue
        device, key = stage.device, number if overlap else stage.device.name
        place = "cpu" if device.kind == "cpu" else device.name
        threads = min(settings.threads or len(device.cores), len(device.cores)) if device.cores else settings.threads
        if key not in made:
            with on_cores(device.cores):  # A thread pool stays on the cores on which it was created.
                made[key] = pick_ops(place, stage.dtype, threads=threads, **given)
        stage_devices.append(StageDevice.named(place, made[key], stop=stage.stop))
        openings.append(partial(set_threads, settings.threads, [made[key]], device.cores))
    pinned = any(stage.device.cores and not stage.device.node for stage in split.stages)
    pipeline = Pipeline(openings) if overlap or pinned else None
    set_threads(settings.threads, list(made.values()))
    return stage_devices, pipeline


def _observer(settings: Settings, tokenizer: Tokenizer) -> Observer | None:
    return VerifyTracer(tokenizer) if settings.trace_verify else None


def report_layers(notify: Progress, done: int, layers: int) -> None:
    """Report progress after each quarter of a model's layers, if it has many."""
    if layers >= 16 and done < layers and 4 * done // layers != 4 * (done - 1) // layers:
        notify(f"loaded {done} of {layers} layers")


def _report_self_check(report: SelfCheck | None, notify: Progress) -> None:
    if report is None or not report.results:
        notify("Self-check skipped.")
    elif report.passed:
        notify(f"Self-check passed ({len(report.results)}/{len(report.results)}): batching does not change results.")
    else:
        for result in report.results:
            if not result.passed:
                log.warning("Self-check FAILED on this machine: %s. Batching may change the rounding of results.", result.check)


def model_card(
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
        fingerprint=_fingerprint(weights, capacity),
        created=int(time.time()),
        dtype=capacity.dtype,
        device=capacity.device,
    )


def _fingerprint(weights: str, capacity: Capacity) -> str:
    return f"onedraw-{__version__}-{weights[:12]}-{capacity.device}-{_dtypes(capacity)}-c{capacity.chunk}"


def _dtypes(capacity: Capacity) -> str:
    """Return the dtypes to show at start: that of matrix products, and those of the residual stream and of keys and values if
    they differ from it."""
    usual = float_dtype(capacity.dtype)
    stream = "" if capacity.activation in (usual, capacity.dtype) else f"-{capacity.activation}"
    return capacity.dtype + stream + ("" if capacity.kv_dtype in (usual, "") else f"-kv-{capacity.kv_dtype}")


def _name_of(model: str) -> str:
    """Return the default model name for clients: the last part of a path without .gguf, or else the name as given, since a hub id
    may contain dots."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model

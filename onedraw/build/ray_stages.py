"""Pipeline stages on the nodes of a Ray cluster: `--devices ray:NODE/cuda:0,ray:NODE/cuda:0,cpu`.

In: devices with a node, and how layers are divided. Out: a connected StageGroup. Each stage is an actor on its node, which loads
its layers from the node's own copy of the model (or a shared folder) and then serves steps over the link, the connection of all
stages' processes, until that closes. Ray starts actors, reports that one died, and carries the messages that find, load and start
stages, as bytes; the rows and residual streams of steps go over the link (`backends/torch/remote`). NODE is a node's name, its
address, or its number, counted from the head node. The cluster is the one that RAY_ADDRESS names or that runs on this machine.
Ray is imported for such devices only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onedraw import __version__
from onedraw.backends.devices import Device
from onedraw.backends.memory_plan import MemoryPlan
from onedraw.backends.placement import SplitPlan
from onedraw.backends.torch.device import DTYPES, available_memory, find_devices, on_cores, pick_ops, set_threads
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.remote.group import HostedStage, StageGroup
from onedraw.backends.torch.remote.host_messages import FoundDevice, LoadedStage, LoadStage, ServeStage, decode, encode
from onedraw.backends.torch.remote.link import ENGINE, Link, Rendezvous
from onedraw.backends.torch.remote.stage import StageFacts, StreamShape
from onedraw.backends.torch.remote.worker import StageSizes, StageWorker
from onedraw.build.checkpoint import describe, find_checkpoint
from onedraw.build.ray_connection import connected
from onedraw.errors import BadSetting, ModelError, OnedrawError, StateLost
from onedraw.models.spec import ModelSpec
from onedraw.settings import Settings, default_cache_dir

log = logging.getLogger("onedraw")
STAGE_SECONDS = 300.0  # how long to wait until a stage has connected, or has computed a step
START_SECONDS = 120.0  # how long to wait until an actor runs
LOAD_SECONDS = 3600.0  # how long to wait until an actor has loaded its layers
LOOPBACK = "127.0.0.1"


# ---------------------------------------------------------------------- in the actor


class StageProcess:
    """The actor of a stage. It runs one method at a time: `serve` lasts until the link closes."""

    def __init__(self) -> None:
        self._loaded: tuple[bytes, StageWorker] | None = None

    def find(self, device: str) -> bytes:
        """Return a FoundDevice that describes the device with this name on this node."""
        try:
            [found] = find_devices([device])
        except OnedrawError as error:
            return encode(FoundDevice(error=str(error)))
        memory = available_memory() if found.kind == "cpu" else found.memory
        return encode(FoundDevice(found.kind, found.arch, memory, found.cores))

    def load(self, message: bytes) -> bytes:
        """Load the stage that a LoadStage describes, unless it is loaded already, and return a LoadedStage."""
        try:
            if self._loaded is None or self._loaded[0] != message:
                self._loaded = None
                self._loaded = message, self._worker(decode(LoadStage, message))
        except OnedrawError as error:
            return encode(LoadedStage(error=str(error)))
        facts = self._loaded[1].facts
        return encode(
            LoadedStage(
                pid=os.getpid(),
                weights=facts.weights,
                name=facts.name,
                hardware=facts.hardware,
                choices=facts.choices,
                floor=facts.rule.floor,
                block=facts.rule.block,
                borders=facts.borders,
            )
        )

    def _worker(self, stage: LoadStage) -> StageWorker:
        if stage.version != __version__:
            raise ModelError(f"this node has Onedraw {__version__}, and the engine {stage.version}; install the same version")
        cache = Path(stage.cache_dir) if stage.cache_dir else default_cache_dir()
        settings = Settings(model=stage.model, cache_dir=cache)
        checkpoint = find_checkpoint(settings)
        try:
            info = describe(settings, checkpoint)
            threads = stage.threads or len(stage.cores or os.sched_getaffinity(0))
            with on_cores(stage.cores):
                ops = pick_ops(stage.device, stage.dtype, cache=cache, threads=threads, warn=log.warning)
            set_threads(threads, [ops], stage.cores)
            fingerprint = checkpoint.fingerprint()
            return StageWorker(info.spec, info.weights, stage.sizes(), weights=fingerprint, device=stage.device, ops=ops)
        finally:
            checkpoint.close()

    def serve(self, message: bytes) -> None:
        assert self._loaded is not None, "the stage is loaded before it serves"
        call = decode(ServeStage, message)
        place = Rendezvous(call.host, call.port, call.incarnation, call.rank, call.size)
        try:
            link = Link(place, address=call.address, seconds=STAGE_SECONDS)
        except StateLost as error:
            log.warning("this stage could not connect: %s", error)
            return
        self._loaded[1].serve(link, source=call.source, target=call.target)


# ---------------------------------------------------------------------- in the engine's process


class RayHost:
    """The actor of one stage, and its replacements. Owner: a StageGroup, and before that RayCluster."""

    def __init__(self, ray: Any, name: str, device: str, *, node_id: str, address: str) -> None:
        self.name, self._device = name, device
        self.address = address
        self.plan: LoadStage | None = None  # set by RayCluster before `load` is called
        self.pid = 0  # the actor's process id; 0 until its layers are loaded
        self._ray, self._node_id = ray, node_id
        self._actor: Any = None

    def find(self) -> FoundDevice:
        return decode(FoundDevice, self._call("find", self._device, seconds=START_SECONDS))

    def load(self, sizes: StageSizes) -> StageFacts:
        assert self.plan is not None
        assert self.plan.sizes() == sizes
        found = decode(LoadedStage, self._call("load", encode(self.plan), seconds=LOAD_SECONDS))
        if found.error:
            raise ModelError(f"{self.name}: {found.error}")
        self.pid = found.pid
        log.info("%s: layers %d to %d in process %d", self.name, self.plan.start, self.plan.stop - 1, found.pid)
        rule = RowRule(found.floor, found.block)
        return StageFacts(found.weights, found.name, found.hardware, found.choices, rule, found.borders)

    def serve(self, place: Rendezvous, *, source: int, target: int) -> None:
        call = ServeStage(
            place.host, place.port, place.incarnation, place.rank, place.size, self.address, source=source, target=target
        )
        self._actor.serve.remote(encode(call))

    def _call(self, method: str, argument: object, *, seconds: float) -> bytes:
        """Call the actor, or a new one if it has died."""
        errors = self._ray.exceptions
        for _ in range(2):
            if self._actor is None:
                self._actor = self._new_actor()
            try:
                found: bytes = self._ray.get(getattr(self._actor, method).remote(argument), timeout=seconds)
                return found
            except errors.GetTimeoutError:
                self.close()
                raise StateLost(f"{self.name} did not answer within {seconds:g} s") from None
            except errors.RayActorError as error:
                self.close()
                reason = str(error).partition("\n")[0]
            except errors.RayError as error:
                raise StateLost(f"{self.name}: {error}") from None
        raise StateLost(f"{self.name} does not start: {reason}")

    def _new_actor(self) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(node_id=self._node_id, soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": here, "max_restarts": 0}
        return self._ray.remote(StageProcess).options(**options).remote()

    def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None and self._ray.is_initialized():
            self._ray.kill(actor, no_restart=True)


class RayCluster:
    """The nodes of the cluster, and a host for each device that is named on them. Owner: the build of one backend."""

    def __init__(self) -> None:
        self._ray = connected("--devices")
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        self._nodes = sorted(nodes, key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"]))
        own = self._ray.util.get_node_ip_address()
        alone = all(node["NodeManagerAddress"] == own for node in nodes)
        self.address = LOOPBACK if alone else own  # the address at which the engine's process listens
        self._alone = alone
        self.hosts: list[RayHost] = []

    def find(self, device: Device) -> Device:
        """Ask the device's node for the architecture and memory of the device, and return the device with both."""
        node = self._node(device)
        address = LOOPBACK if self._alone else node["NodeManagerAddress"]
        host = RayHost(self._ray, device.name, device.local_name, node_id=node["NodeID"], address=address)
        self.hosts.append(host)
        try:
            found = host.find()
        except StateLost as error:
            raise BadSetting(f"--devices: {error}") from None
        if found.error:
            raise BadSetting(f"--devices: node {device.node}: {found.error}")
        return Device(device.name, device.kind, found.arch, found.memory, found.cores, device.node)

    def _node(self, device: Device) -> dict[str, Any]:
        wanted = device.node
        if wanted.isascii() and wanted.isdecimal() and int(wanted) < len(self._nodes):
            return dict(self._nodes[int(wanted)])
        keys = ("NodeName", "NodeManagerHostname", "NodeManagerAddress", "NodeID")
        found = [node for node in self._nodes if wanted in [node[key] for key in keys]]
        if len(found) != 1:
            known = ", ".join(f"{i} ({node['NodeName']})" for i, node in enumerate(self._nodes))
            problem = "several nodes are" if found else "no node is"
            raise BadSetting(f"--devices: {problem} called {wanted!r} in this Ray cluster; it has {known}")
        return dict(found[0])

    def group(self, settings: Settings, spec: ModelSpec, plan: MemoryPlan, split: SplitPlan, *, weights: str) -> StageGroup:
        """Load and connect the stages of the devices that were found, in that order."""
        remote = [number for number, stage in enumerate(split.stages) if stage.device.node]
        ranks = {number: rank for rank, number in enumerate(remote, start=1)}
        hosted = []
        for number, host in zip(remote, self.hosts, strict=True):
            stage = split.stages[number]
            device = stage.device
            host.plan = LoadStage(
                version=__version__,
                model=settings.model,
                cache_dir=None if settings.cache_dir is None else str(settings.cache_dir),
                device="cpu" if device.kind == "cpu" else device.local_name,
                cores=device.cores,
                threads=settings.threads,
                start=stage.start,
                stop=stage.stop,
                dtype=stage.dtype,
                activation=split.activation,
                kv_dtype=plan.kv_dtype,
                max_context=plan.max_context,
                rows=split.staging.rows,
                pages=plan.pages,
                page_size=settings.page_size,
                windows=spec.windows,
                lanes=settings.lanes,
                drafts=plan.draft_positions if spec.recurrent else 0,
                checkpoints=plan.checkpoints,
            )
            source, target = ranks.get(number - 1, ENGINE), ranks.get(number + 1, ENGINE)
            hosted.append(HostedStage(host, host.plan.sizes(), source=source, target=target))
        shape = StreamShape(spec.hidden, len(spec.layers), spec.inputs, split.staging.rows, DTYPES[split.activation])
        return StageGroup(hosted, shape, weights=weights, address=self.address, seconds=STAGE_SECONDS)

    def close(self) -> None:
        for host in self.hosts:
            host.close()


def require_last_here(devices: Sequence[Device]) -> None:
    """Raise if the last stage would be on another node: tokens are sampled and drafted on its device by the engine's process."""
    if devices[-1].node:
        raise BadSetting(
            f"--devices: the last device must be one of this machine, where tokens are sampled, and not {devices[-1].name}; "
            "add cpu or cuda:0 at the end"
        )

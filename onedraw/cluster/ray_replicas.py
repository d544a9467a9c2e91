"""Replicas in a Ray cluster: `onedraw serve MODEL --replicas N` or `--replicas MIN..MAX`.

In: settings, and how many replicas. Out: the ReplicaSet of engines that run as Ray actors, each with its backend and weights. An
actor that ends is replaced, on whichever node Ray finds room. With MIN..MAX replicas start and end with the load
(`autoscaling.py`). This process has the HTTP app and the tokenizer, but no weights.

The replicas are plain actors and no Ray Serve deployment. Serve counts calls of a handle, and ends a replica when its calls are
over or a timeout is. So each request would have to be a call, with one message per token, while an actor sends all events of an
engine step in one message. And Serve's controller would pick the replica that ends, before its streams could move.

An actor's method `serve` yields the messages of its engine as long as the engine runs; its method `deliver` takes the messages
of the engine's client, in the order in which they were sent. All messages are bytes in the format of `engine/wire.py`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Queue, SimpleQueue
from typing import Any

from onedraw.build.checkpoint import Progress
from onedraw.build.engine_process import ReportHandler, encode_settings, engine_client, serve_engine
from onedraw.build.ray_connection import connected, require_loopback, started_here, uses_token
from onedraw.cluster.autoscaling import AutoscalingConfig, Change, scaled
from onedraw.cluster.replica_set import ReplicaSet
from onedraw.engine.client import BuildConstraint
from onedraw.engine.remote import RemoteEngine
from onedraw.engine.stats import Stats
from onedraw.errors import BadSetting, EngineLost, OnedrawError
from onedraw.settings import Settings

log = logging.getLogger("onedraw.cluster")

MESSAGES_AHEAD = 64  # The engine waits while its client has not read this many of its messages.
IN_ORDER = "messages"  # the concurrency group of `deliver` and `place`; it has one thread, so calls run in order
PLACE_SECONDS = 30.0  # While Ray finds no node for a replica, a warning is logged each time that this long has passed.
SILENT_SECONDS = 300.0  # A replica that has requests and sends nothing for this long is replaced.
CHECK_SECONDS = 5.0  # how often it is checked whether a replica has ended or is silent
SCALE_SECONDS = 1.0  # how often the number of replicas is compared with the load
LONGEST_PAUSE = 60.0  # the longest pause between attempts to start a replica; it is one second at first and doubles
FLAG = "--replicas"


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    scaling: AutoscalingConfig  # how many replicas
    address: str | None = None  # address of a running Ray cluster; None starts a cluster of this machine alone
    # GPUs of each replica; None: one for each CUDA device in the settings, or one if the cluster has any.
    gpus: float | None = None


# ---------------------------------------------------------------------- in the actor


class Outbox:
    """Passes the engine's messages to the call that yields them. `send` waits while MESSAGES_AHEAD messages are unread."""

    def __init__(self) -> None:
        self._messages: Queue[bytes | None] = Queue(MESSAGES_AHEAD)

    def send(self, message: bytes) -> None:
        self._messages.put(message)

    def close(self) -> None:
        self._messages.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while (message := self._messages.get()) is not None:
            yield message


class ReplicaActor:
    """The process of one replica."""

    def __init__(self) -> None:
        self._incoming: SimpleQueue[bytes | None] = SimpleQueue()

    def place(self) -> tuple[int, bool]:
        """Return the process id, and whether calls to processes of this Ray node need a token."""
        return os.getpid(), uses_token()

    def deliver(self, message: bytes) -> None:
        self._incoming.put(message)

    def serve(self, settings: bytes) -> Iterator[bytes]:
        """Build an engine, and yield its messages until its client closes it."""
        outbox = Outbox()
        threading.Thread(target=self._run, args=(settings, outbox), name="onedraw-replica", daemon=True).start()
        yield from outbox

    def _run(self, settings: bytes, outbox: Outbox) -> None:
        logger = logging.getLogger("onedraw")
        logger.addHandler(ReportHandler(outbox))
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            serve_engine(settings, outbox, self._incoming, lambda: None)
        except Exception:
            log.exception("this replica failed")
        finally:
            outbox.close()


# ---------------------------------------------------------------------- in the process of the HTTP app


class ActorChannel:
    """The messages between this process and one actor. Closing it ends the actor."""

    def __init__(self, ray: Any, actor: Any, settings: bytes) -> None:
        self._ray, self._actor = ray, actor
        self._deliver = actor.deliver.options(concurrency_group=IN_ORDER)
        self._how = "it was closed"
        streaming = {"num_returns": "streaming", "_generator_backpressure_num_objects": MESSAGES_AHEAD}
        self._messages = actor.serve.options(**streaming).remote(settings)

    def send(self, message: bytes) -> None:
        try:
            self._deliver.remote(message)
        except self._ray.exceptions.RayError as error:
            raise ConnectionError(str(error)) from None

    def receive(self) -> bytes | None:
        try:
            message: bytes = self._ray.get(next(self._messages))
            return message
        except StopIteration:
            return None
        except Exception as error:  # The actor, its node or the cluster has died.
            self._how = str(error).partition("\n")[0].strip().rstrip(".")
            return None

    def close(self) -> None:
        with suppress(Exception):  # The cluster may be ending.
            if self._ray.is_initialized():  # otherwise the call would start a new cluster
                self._ray.kill(self._actor, no_restart=True)

    def end(self, seconds: float) -> str:
        """End the actor at once, whose engine has ended or does not answer. Return as text why its messages ended."""
        self.close()
        return self._how


class RayReplicas:
    """Starts replicas, replaces each one that ends, and changes their number with the load. It is an EngineSource (starts engines
    outside of this process) for one LLM. Once `client` has returned a client, that client owns and closes the RayReplicas."""

    def __init__(self, settings: Settings, options: ReplicaOptions) -> None:
        if options.gpus is not None and options.gpus < 0:
            raise BadSetting(f"--replica-gpus: must be 0 or more, not {options.gpus:g}")
        self._scaling = options.scaling
        self.fingerprint = ""
        self.cpus = settings.threads or 1
        self._owns_ray = False
        if options.address is not None:
            self.ray = connected(FLAG, options.address)
            if not uses_token():
                require_loopback(self.ray, FLAG)
        else:
            if settings.threads is None:  # All replicas share this machine, and each would take all of its cores.
                self.cpus = max(len(os.sched_getaffinity(0)) // self._scaling.max_replicas, 1)
                settings = replace(settings, threads=None if settings.backend == "xla" else self.cpus)
            self.ray = started_here(FLAG, cpus=self.cpus * self._scaling.max_replicas)
            self._owns_ray = True
        self.settings = settings
        self.gpus = _gpus(settings, self.ray.cluster_resources()) if options.gpus is None else options.gpus
        self.actor_class = self.ray.remote(concurrency_groups={IN_ORDER: 1})(ReplicaActor)
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards `_keepers` and `first`
        self._keepers: dict[int, Keeper] = {}  # by the number of the replica, which it keeps when it is replaced
        self.first: Future[ReplicaSet] = Future()  # the replica set, once one replica serves
        self._scaler: threading.Thread | None = None
        self._scaling_ends = threading.Event()

    def __enter__(self) -> RayReplicas:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()

    @property
    def wanted(self) -> int:
        """How many replicas there should be."""
        return len(self._keepers)

    def client(self, build_constraint: BuildConstraint, notify: Progress) -> ReplicaSet:
        """Start the first replicas, wait until one serves, and return one client of all replicas. If a replica fails before that,
        its error is raised."""

        def report(line: str) -> None:
            (log.info if self.first.done() else notify)(line)

        start = partial(Keeper, self, build_constraint, report)
        for number in range(self._scaling.min_replicas):
            self._add(number, start)
        replicas = self.first.result()
        self.fingerprint = replicas.fingerprint
        if self._scaling.max_replicas > self._scaling.min_replicas:
            self._scaler = threading.Thread(target=self._scale, args=(replicas, start), name="onedraw-scaler", daemon=True)
            self._scaler.start()
        return replicas

    def started(self, name: str, engine: RemoteEngine) -> ReplicaSet:
        """Add a replica that has started to the replica set, and return that. The first one decides the fingerprint of all."""
        with self._lock:
            found = self.first.result() if self.first.done() else RayReplicaSet(engine.fingerprint, self)
            found.add(name, engine, fingerprint=engine.fingerprint)
            if not self.first.done():  # Only now, since the set has no capacity before it has a replica.
                self.first.set_result(found)
        return found

    def failed(self, error: BaseException) -> bool:
        """Note that a replica has not started. Return whether that is the end, because none has ever served."""
        with self._lock:
            if self.first.done() and self.first.exception() is None:
                return False
            if not self.first.done():
                self.first.set_exception(error)
            return True

    def restart(self) -> None:
        """Replace the replicas one after the other. Their requests continue on others meanwhile."""
        replicas = self.first.result()
        with self._lock:
            keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.restart(replicas)
        log.info("all replicas are replaced")

    def close(self) -> None:
        """End all replicas, and the cluster if it was started here. A second call does nothing."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self.stop_scaling()
        keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.stop()
        for keeper in keepers:
            keeper.join()
        if self._owns_ray:
            self.ray.shutdown()

    # ------------------------------------------------------------------ the number of replicas

    def stop_scaling(self) -> None:
        """Keep the number of replicas from now on. Returns when none is being added or removed."""
        self._scaling_ends.set()
        if self._scaler is not None:
            self._scaler.join()

    def _add(self, number: int, start: Callable[[int], Keeper]) -> None:
        with self._lock:
            if not self._closing.is_set():
                self._keepers[number] = start(number)

    def _scale(self, replicas: ReplicaSet, start: Callable[[int], Keeper]) -> None:
        """Change the number of replicas with the load, until `stop_scaling`."""
        change: Change | None = None
        while not self._scaling_ends.wait(SCALE_SECONDS):
            wanted, ongoing = self.wanted, replicas.ongoing
            desired = self._scaling.desired(ongoing, lanes=replicas.capacity.lanes)
            count, change = scaled(self._scaling, change, replicas=wanted, desired=desired, now=time.monotonic())
            if count != wanted:
                log.info("scaling from %d to %d replicas: %d requests are running and waiting", wanted, count, ongoing)
            for number in range(self._scaling.max_replicas):
                if self.wanted < count and number not in self._keepers:
                    self._add(number, start)
            while self.wanted > count and not self._scaling_ends.is_set():
                self._remove_one(replicas)

    def _remove_one(self, replicas: ReplicaSet) -> None:
        """End a replica that does not serve yet, else the one with the fewest requests. So one that serves is left if there is
        any."""
        requests = {status.name: status.requests for status in replicas.statuses()}
        number = min(reversed(self._keepers), key=lambda one: requests.get(self._keepers[one].name, -1))
        keeper = self._keepers[number]
        keeper.leave(replicas)
        keeper.join()  # A new replica with this number would have the same snapshot folder.
        with self._lock:
            del self._keepers[number]


class Keeper:
    """Keeps one replica running: starts it, and another one whenever it has ended. It has a thread, which ends after `leave` or
    `stop`. RayReplicas owns it."""

    def __init__(self, source: RayReplicas, build_constraint: BuildConstraint, report: Progress, number: int) -> None:
        self._source, self._ray, self._number = source, source.ray, number
        self._build_constraint, self._report = build_constraint, report
        self.name = ""  # the name of the replica that is started or serves
        self._serves = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # guards `_channel`
        self._channel: ActorChannel | None = None
        self._thread = threading.Thread(target=self._keep, name=f"onedraw-replica-{number}", daemon=True)
        self._thread.start()

    def leave(self, replicas: ReplicaSet) -> None:
        """End the replica for good. Its requests continue on others."""
        self._stopping.set()
        if not self._close_engine(replicas):
            self.stop()

    def restart(self, replicas: ReplicaSet) -> None:
        """Replace the replica, unless it is being started, and wait until the new one serves."""
        if not self._serves.is_set():
            return
        log.info("replacing replica %s", self.name)
        self._serves.clear()
        self._close_engine(replicas)
        while not self._serves.wait(0.1) and not self._stopping.is_set():
            pass

    def stop(self) -> None:
        """End the replica's process at once."""
        self._stopping.set()
        with self._lock:
            if self._channel is not None:
                self._channel.close()

    def join(self) -> None:
        self._thread.join()

    def _close_engine(self, replicas: ReplicaSet) -> bool:
        """Let the replica leave the set and end. Return whether it was a member."""
        engine = replicas.remove(self.name)
        if engine is not None:
            engine.close()
        return engine is not None

    # ------------------------------------------------------------------ the keeper's thread

    def _keep(self) -> None:
        pause, incarnation = 1.0, 0
        while not self._stopping.is_set():
            self.name = f"{self._number}.{incarnation}" if incarnation else str(self._number)
            incarnation += 1
            try:
                channel, pid = self._start()
                report = partial(_named, self._report, self.name)
                engine = engine_client(channel, self._build_constraint, report, end_process=channel.end)
                self._serve(engine, channel, pid)
                pause = 1.0
            except Exception as error:
                if self._channel is not None:
                    self._channel.close()
                if self._stopping.is_set() or self._source.failed(error):
                    break
                known = isinstance(error, (OnedrawError, self._ray.exceptions.RayError))
                log.error("replica %s does not start: %s; next attempt in %g s", self.name, error, pause, exc_info=not known)
                self._stopping.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        self._source.failed(EngineLost("the replicas were closed before one of them served"))

    def _start(self) -> tuple[ActorChannel, int]:
        """Return the channel and the process id of a new actor, once a node has room for it. While none has, Ray's own autoscaler
        may add one."""
        source = self._source
        actor = source.actor_class.options(
            num_cpus=source.cpus, num_gpus=source.gpus, scheduling_strategy="SPREAD", max_restarts=0
        ).remote()
        channel = ActorChannel(self._ray, actor, encode_settings(_own_snapshots(source.settings, self._number)))
        with self._lock:
            self._channel = channel
            if self._stopping.is_set():
                channel.close()
        place = actor.place.options(concurrency_group=IN_ORDER).remote()
        while not self._ray.wait([place], timeout=PLACE_SECONDS)[0]:
            log.warning(
                "replica %s has not started yet; it needs a node with %g free CPUs and %g GPUs",
                self.name,
                source.cpus,
                source.gpus,
            )
        try:
            pid, token = self._ray.get(place)
        except self._ray.exceptions.RayError as error:
            raise EngineLost(f"replica {self.name} does not start: {str(error).partition(chr(10))[0]}") from None
        if not token:
            require_loopback(self._ray, FLAG)
        return channel, pid

    def _serve(self, engine: RemoteEngine, channel: ActorChannel, pid: int) -> None:
        """Let the replica take requests until it has ended."""
        try:
            replicas = self._source.started(self.name, engine)
        except OnedrawError:
            engine.close()
            raise
        log.info("replica %s serves in process %d", self.name, pid)
        self._serves.set()
        if self._stopping.is_set():  # `leave` has come before the replica was a member.
            self._close_engine(replicas)
        while not engine.join(CHECK_SECONDS):
            if engine.silent_seconds > SILENT_SECONDS:
                log.error("replica %s has sent nothing for %g s and is replaced", self.name, SILENT_SECONDS)
                channel.close()
        self._serves.clear()
        replicas.lost(self.name)


class RayReplicaSet(ReplicaSet):
    """A ReplicaSet whose replicas and cluster end with it."""

    def __init__(self, fingerprint: str, source: RayReplicas) -> None:
        super().__init__(fingerprint)
        self._source = source

    def stats(self) -> Stats:
        return replace(super().stats(), replicas_wanted=self._source.wanted)

    def close(self, drain_seconds: float = 0.0) -> None:
        self._source.stop_scaling()  # A replica that left now could not give its requests to others.
        super().close(drain_seconds)
        self._source.close()


def _named(report: Progress, name: str, line: str) -> None:
    report(f"replica {name}: {line}")


def _gpus(settings: Settings, resources: dict[str, float]) -> float:
    """Return the number of GPUs that one replica needs."""
    named = [name for name in settings.device_names if name.startswith("cuda")]
    if named:
        return len(set(named))
    return float(settings.backend != "fake" and settings.device_names == ["auto"] and resources.get("GPU", 0) > 0)


def _own_snapshots(settings: Settings, slot: int) -> Settings:
    """Give each replica a snapshot folder of its own: an engine indexes its folder when it starts, and would not notice the files
    that other engines add or delete."""
    if settings.cache_budget is None:
        return settings
    return replace(settings, snapshot_dir=settings.snapshot_folder / f"replica-{slot}")

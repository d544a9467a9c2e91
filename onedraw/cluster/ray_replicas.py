"""Replicas in a Ray cluster: `onedraw serve MODEL --replicas N`.

In: settings, and how many replicas. Out: the ReplicaSet of engines that run as Ray actors, each with its backend and weights. An
actor that ends is replaced, on whichever node Ray finds room. This process has the HTTP app and the tokenizer, but
no weights.

The replicas are plain actors and no Ray Serve deployment. A handle of Serve chooses the replica of each call itself. Here a
request must go to the replica whose prefix cache has the beginning of its prompt, and a cancellation to the replica that has the
request. A stream through a handle costs one message per token of each request, while an actor sends all events of an engine step
in one message.

An actor's method `serve` yields the messages of its engine as long as the engine runs; its method `deliver` takes the messages
of the engine's client, in the order in which they were sent. All messages are bytes in the format of `engine/wire.py`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Queue, SimpleQueue
from typing import Any

from onedraw.build.checkpoint import Progress
from onedraw.build.engine_process import ReportHandler, encode_settings, engine_client, serve_engine
from onedraw.build.ray_connection import connected, require_loopback, started_here, uses_token
from onedraw.cluster.replica_set import ReplicaSet
from onedraw.engine.client import BuildConstraint
from onedraw.engine.remote import RemoteEngine
from onedraw.errors import BadSetting, EngineLost, OnedrawError
from onedraw.settings import Settings, default_cache_dir

log = logging.getLogger("onedraw.cluster")

MESSAGES_AHEAD = 64  # The engine waits while its client has not read this many of its messages.
IN_ORDER = "messages"  # the concurrency group of `deliver` and `place`; it has one thread, so calls run in order
PLACE_SECONDS = 30.0  # While Ray finds no node for a replica, a warning is logged each time that this long has passed.
SILENT_SECONDS = 300.0  # A replica that has requests and sends nothing for this long is replaced.
CHECK_SECONDS = 5.0  # how often it is checked whether a replica has ended or is silent
LONGEST_PAUSE = 60.0  # the longest pause between attempts to start a replica; it is one second at first and doubles
FLAG = "--replicas"


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    count: int
    address: str | None = None  # address of a running Ray cluster; None starts a cluster of this machine alone
    gpus: float | None = (
        None  # GPUs of each replica; None: one for each CUDA device in the settings, or one if the cluster has any
    )


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
    """Starts replicas, and replaces each one that ends. It is an EngineSource (starts engines outside of this process) for one
    LLM. Once `client` has returned a client, that client owns and closes the RayReplicas."""

    def __init__(self, settings: Settings, options: ReplicaOptions) -> None:
        if options.count < 1:
            raise BadSetting(f"{FLAG}: must be at least 1, not {options.count}")
        if options.gpus is not None and options.gpus < 0:
            raise BadSetting(f"--replica-gpus: must be 0 or more, not {options.gpus:g}")
        self._options = options
        self.fingerprint = ""
        self._cpus = settings.threads or 1
        self._owns_ray = False
        if options.address is not None:
            self._ray = connected(FLAG, options.address)
            if not uses_token():
                require_loopback(self._ray, FLAG)
        else:
            if settings.threads is None:  # All replicas share this machine, and each would take all of its cores.
                self._cpus = max(len(os.sched_getaffinity(0)) // options.count, 1)
                settings = replace(settings, threads=None if settings.backend == "xla" else self._cpus)
            self._ray = started_here(FLAG, cpus=self._cpus * options.count)
            self._owns_ray = True
        self._settings = settings
        self._gpus = _gpus(settings, self._ray.cluster_resources()) if options.gpus is None else options.gpus
        self._actor_class = self._ray.remote(concurrency_groups={IN_ORDER: 1})(ReplicaActor)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._channels: dict[int, ActorChannel] = {}  # by slot (the number of a replica, kept when it is replaced)
        self._names: dict[int, str] = {}  # by slot, the name of each replica that serves
        self.pids: dict[int, int] = {}  # by slot, the process id of the latest actor
        self._first: Future[ReplicaSet] = Future()  # the replica set, once one replica serves
        self._keepers: list[threading.Thread] = []

    def __enter__(self) -> RayReplicas:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()

    def client(self, build_constraint: BuildConstraint, notify: Progress) -> ReplicaSet:
        """Start all replicas, wait until one serves, and return one client of all replicas. If a replica fails before that, its
        error is raised."""

        def report(line: str) -> None:
            (log.info if self._first.done() else notify)(line)

        for slot in range(self._options.count):
            keeper = threading.Thread(target=self._keep, args=(slot, build_constraint, report), daemon=True)
            keeper.start()
            self._keepers.append(keeper)
        replicas = self._first.result()
        self.fingerprint = replicas.fingerprint
        return replicas

    def restart(self) -> None:
        """Replace the replicas one after the other. Their requests continue on others meanwhile."""
        replicas = self._first.result()
        for slot in range(self._options.count):
            old = self._names.pop(slot, None)
            if old is None:  # The replica is being started.
                continue
            log.info("replacing replica %s", old)
            engine = replicas.remove(old)
            if engine is not None:
                engine.close()
            while slot not in self._names and not self._closing.wait(0.1):
                pass
        log.info("all replicas are replaced")

    def close(self) -> None:
        """End all replicas, and the cluster if it was started here. A second call does nothing."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            for channel in self._channels.values():
                channel.close()
        for keeper in self._keepers:
            keeper.join()
        if self._owns_ray:
            self._ray.shutdown()

    # ------------------------------------------------------------------ one thread for each replica

    def _keep(self, slot: int, build_constraint: BuildConstraint, report: Progress) -> None:
        """Start a replica, and another one whenever it has ended."""
        pause, incarnation = 1.0, 0
        while not self._closing.is_set():
            name = f"{slot}.{incarnation}" if incarnation else str(slot)
            incarnation += 1
            try:
                channel = self._start(slot, name)
                engine = engine_client(channel, build_constraint, partial(_named, report, name), end_process=channel.end)
                self._serve(slot, name, engine, channel)
                pause = 1.0
            except Exception as error:
                self._channels[slot].close()
                if self._closing.is_set():
                    break
                if not self._first.done():
                    self._fail(error)
                    break
                known = isinstance(error, (OnedrawError, self._ray.exceptions.RayError))
                log.error("replica %s does not start: %s; next attempt in %g s", name, error, pause, exc_info=not known)
                self._closing.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        self._fail(EngineLost("the replicas were closed before one of them served"))

    def _start(self, slot: int, name: str) -> ActorChannel:
        """Return the channel of a new actor, once a node has room for it."""
        actor = self._actor_class.options(
            num_cpus=self._cpus, num_gpus=self._gpus, scheduling_strategy="SPREAD", max_restarts=0
        ).remote()
        channel = ActorChannel(self._ray, actor, encode_settings(_own_snapshots(self._settings, slot)))
        with self._lock:
            self._channels[slot] = channel
            if self._closing.is_set():
                channel.close()
        place = actor.place.options(concurrency_group=IN_ORDER).remote()
        while not self._ray.wait([place], timeout=PLACE_SECONDS)[0]:
            log.warning(
                "replica %s has not started yet; it needs a node with %g free CPUs and %g GPUs", name, self._cpus, self._gpus
            )
        try:
            self.pids[slot], token = self._ray.get(place)
        except self._ray.exceptions.RayError as error:
            raise EngineLost(f"replica {name} does not start: {str(error).partition(chr(10))[0]}") from None
        if not token:
            require_loopback(self._ray, FLAG)
        return channel

    def _serve(self, slot: int, name: str, engine: RemoteEngine, channel: ActorChannel) -> None:
        """Let a replica take requests until it has ended."""
        with self._lock:
            if not self._first.done():
                self._first.set_result(RayReplicaSet(engine.fingerprint, self))
        replicas = self._first.result()
        try:
            replicas.add(name, engine, fingerprint=engine.fingerprint)
        except OnedrawError:
            engine.close()
            raise
        self._names[slot] = name
        log.info("replica %s serves in process %d", name, self.pids[slot])
        while not engine.join(CHECK_SECONDS):
            if engine.silent_seconds > SILENT_SECONDS:
                log.error("replica %s has sent nothing for %g s and is replaced", name, SILENT_SECONDS)
                channel.close()
        self._names.pop(slot, None)
        replicas.lost(name)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if not self._first.done():
                self._first.set_exception(error)


class RayReplicaSet(ReplicaSet):
    """A ReplicaSet whose replicas and cluster end with it."""

    def __init__(self, fingerprint: str, source: RayReplicas) -> None:
        super().__init__(fingerprint)
        self._source = source

    def close(self, drain_seconds: float = 0.0) -> None:
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
    folder = settings.snapshot_dir or (settings.cache_dir or default_cache_dir()) / "snapshots"
    return replace(settings, snapshot_dir=folder / f"replica-{slot}")

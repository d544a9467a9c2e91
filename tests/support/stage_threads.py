"""Remote stages in threads of this process: they use the link and the messages of real ones, and start fast."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from onedraw.backends.torch.backend import DTYPES, TorchBackend
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.remote.group import HostedStage, StageGroup
from onedraw.backends.torch.remote.link import Link, Rendezvous
from onedraw.backends.torch.remote.stage import StageFacts, StreamShape
from onedraw.backends.torch.remote.worker import StageSizes, StageWorker
from onedraw.backends.torch.runner.pipeline import Pipeline, StageDevice
from onedraw.backends.torch.state.model_state import StateSizes
from onedraw.checkpoints.open import open_checkpoint
from onedraw.errors import StateLost
from onedraw.models.registry import read_model_info

LOOPBACK = "127.0.0.1"
SECONDS = 60.0


class StageThread:
    """A stage host whose process is a thread."""

    def __init__(self, path: Path, number: int) -> None:
        self.name = f"thread {number}"
        self._path = path
        self.worker: StageWorker | None = None
        self._link: Link | None = None
        self._thread: threading.Thread | None = None
        self.loads = 0
        self.broken = False  # whether the process cannot be started

    def load(self, sizes: StageSizes) -> StageFacts:
        if self.broken:
            raise StateLost(f"{self.name} does not start (planted)")
        if self.worker is None or getattr(self.worker, "dead", False):  # a planted death takes the layers with it
            checkpoint = open_checkpoint(self._path)
            info = read_model_info(checkpoint)
            ops = TorchOps(torch.device("cpu"))
            self.worker = StageWorker(info.spec, info.weights, sizes, weights=checkpoint.fingerprint(), device="cpu", ops=ops)
            self.loads += 1
        return self.worker.facts

    def serve(self, place: Rendezvous, *, source: int, target: int) -> None:
        self._leave()
        self._thread = threading.Thread(target=self._serve, args=(self.worker, place, source, target), daemon=True)
        self._thread.start()

    def _serve(self, worker: StageWorker, place: Rendezvous, source: int, target: int) -> None:
        self._link = Link(place, address=LOOPBACK, seconds=SECONDS)
        worker.serve(self._link, source=source, target=target)

    def _leave(self) -> None:
        if self._thread is not None:
            if self._link is not None:
                self._link.close()
            self._thread.join(SECONDS)
            assert not self._thread.is_alive()
        self._thread = self._link = None

    def close(self) -> None:
        self._leave()


def make_remote_backend(
    path: Path,
    *,
    cuts: Sequence[int],
    remote: Sequence[int] = (0,),
    overlap: bool = False,
    lanes: int = 4,
    pages: int = 200,
    page_size: int = 8,
    max_context: int = 400,
    drafts: int = 64,
    checkpoints: int = 12,
    dtype: str = "f32",
    activation: str | None = None,
    check: bool = False,
    **how: Any,
) -> tuple[TorchBackend, StageGroup]:
    """A CPU backend split before the layers `cuts`; the stages with the numbers `remote` are in threads."""
    checkpoint = open_checkpoint(path)
    info = read_model_info(checkpoint)
    spec, cpu = info.spec, torch.device("cpu")
    edges = list(itertools.pairwise([0, *cuts, len(spec.layers)]))
    state = StateSizes(
        pages=(pages,) * len(spec.windows),
        page_size=page_size,
        windows=spec.windows,
        lanes=lanes,
        drafts=drafts if spec.recurrent else 0,
        checkpoints=checkpoints,
    )
    ranks = {number: rank for rank, number in enumerate(remote, start=1)}
    hosted = [
        HostedStage(
            StageThread(path, number),
            StageSizes(*edges[number], dtype, activation or dtype, dtype, max_context, 8192, state),
            source=ranks.get(number - 1, 0),
            target=ranks.get(number + 1, 0),
        )
        for number in remote
    ]
    shape = StreamShape(spec.hidden, len(spec.layers), spec.inputs, 8192, DTYPES[activation or dtype])
    group = StageGroup(hosted, shape, weights=checkpoint.fingerprint(), address=LOOPBACK, seconds=SECONDS)
    stages = dict(zip(remote, group.stages, strict=True))
    try:
        backend = TorchBackend(
            spec,
            info.weights,
            dtype=dtype,
            activation=activation,
            stage_devices=[stages.get(number) or StageDevice(cpu, TorchOps(cpu), stop) for number, (_, stop) in enumerate(edges)],
            rows=8192,
            lanes=lanes,
            pages=pages,
            page_size=page_size,
            max_context=max_context,
            drafts=drafts,
            checkpoints=checkpoints,
            check=check,
            stage_group=group,
            pipeline=Pipeline([lambda: None for _ in edges]) if overlap else None,
            max_in_flight=len(edges) if overlap else 1,
            **how,
        )
    except BaseException:
        group.close()
        raise
    return backend, group

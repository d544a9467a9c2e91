"""All remote stages of one model: their hosts, the link to them, and their restart after one of them died.

In: hosts (`StageHost`), each with the sizes of its stage and the ranks of its neighbours (`HostedStage`). Out: RemoteStages,
connected. Owner: the backend. A host is what runs the process of a stage: a Ray actor, or a thread in tests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from onedraw.backends.torch.remote.link import ENGINE, Link, Rendezvous, RendezvousServer
from onedraw.backends.torch.remote.stage import RemoteStage, StageFacts, StreamShape
from onedraw.backends.torch.remote.worker import StageSizes
from onedraw.errors import ModelError, StateLost

log = logging.getLogger("onedraw")


class StageHost(Protocol):
    @property
    def name(self) -> str:
        """The device as the user named it."""
        ...

    def load(self, sizes: StageSizes) -> StageFacts:
        """Start the process if it does not run, and have it load its layers if it has not. Raises StateLost if that fails within
        the host's deadline."""
        ...

    def serve(self, place: Rendezvous, *, source: int, target: int) -> None:
        """Have the process leave its link, if it has one, and connect anew to the other processes, which it finds by `place`.
        `source`, `target`: as in `HostedStage`. Returns at once."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


@dataclass(frozen=True, slots=True)
class HostedStage:
    """A remote stage: its host (the process that runs it) and its sizes. `source`, `target`: the ranks from and to which the
    residual stream goes."""

    host: StageHost
    sizes: StageSizes
    source: int = ENGINE
    target: int = ENGINE


class StageGroup:
    def __init__(self, hosted: Sequence[HostedStage], shape: StreamShape, *, weights: str, address: str, seconds: float) -> None:
        """`weights`: the fingerprint of the checkpoint that every stage must report, else ModelError is raised. `address`: the
        one on which this process listens for the stages. `seconds`: the deadline of each wait for a stage."""
        self._hosted, self._address, self._seconds = hosted, address, seconds
        self._server = RendezvousServer(address, seconds)
        self._incarnation = 0
        self._link: Link | None = None
        try:
            facts = [one.host.load(one.sizes) for one in hosted]
            for one, found in zip(hosted, facts, strict=True):
                if found.weights != weights:
                    raise ModelError(
                        f"{one.host.name} has other weights (fingerprint {found.weights[:12]}, here {weights[:12]}); "
                        "give every node the same files"
                    )
            self.stages = [
                RemoteStage(self, rank, one.sizes.start, one.sizes.stop, shape, one.sizes.state, found)
                for rank, (one, found) in enumerate(zip(hosted, facts, strict=True), start=1)
            ]
            self._connect()
        except BaseException:
            self.close()
            raise

    @property
    def link(self) -> Link:
        if self._link is None:
            raise StateLost("the stages are not connected")
        return self._link

    def _connect(self) -> None:
        self._incarnation += 1
        size = 1 + len(self._hosted)
        for rank, one in enumerate(self._hosted, start=1):
            place = Rendezvous(self._server.host, self._server.port, self._incarnation, rank, size)
            one.host.serve(place, source=one.source, target=one.target)
        place = Rendezvous(self._server.host, self._server.port, self._incarnation, ENGINE, size)
        self._link = Link(place, address=self._address, seconds=self._seconds)

    def restart(self) -> None:
        """Restart the stages that died and connect all of them again. Layers that are loaded stay loaded; states of sequences are
        undefined afterwards. Raises StateLost if a stage does not come back, or comes back with other weights or operations."""
        self._disconnect()
        for one, stage in zip(self._hosted, self.stages, strict=True):
            if one.host.load(one.sizes) != stage.facts:
                raise StateLost(f"{one.host.name} came back with other weights or other operations than before")
        self._connect()
        for stage in self.stages:
            stage.use_rule_again()

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self) -> None:
        self._disconnect()
        for one in self._hosted:
            one.host.close()

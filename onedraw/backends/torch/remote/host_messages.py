"""The messages between the engine's process and a host, which runs the process of a stage, as msgpack: find a device, load,
serve."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from onedraw.backends.torch.remote.worker import StageSizes
from onedraw.backends.torch.state.model_state import StateSizes

MessageT = TypeVar("MessageT", bound=msgspec.Struct)
encode = msgspec.msgpack.encode


def decode(kind: type[MessageT], data: bytes) -> MessageT:
    return msgspec.msgpack.decode(data, type=kind)


class FoundDevice(msgspec.Struct, frozen=True):
    """The answer to a search for a device: its facts, or the reason for which it cannot be used."""

    kind: str = "cpu"
    arch: str = ""
    memory: int | None = None
    cores: tuple[int, ...] = ()
    error: str = ""


class LoadStage(msgspec.Struct, frozen=True):
    """Everything that a node needs to load a stage."""

    version: str
    model: str
    cache_dir: str | None
    device: str
    cores: tuple[int, ...]
    threads: int | None
    start: int
    stop: int
    dtype: str
    activation: str
    kv_dtype: str
    max_context: int
    rows: int
    pages: tuple[int, ...]
    page_size: int
    windows: tuple[int | None, ...]
    lanes: int
    drafts: int
    checkpoints: int

    def sizes(self) -> StageSizes:
        state = StateSizes(self.pages, self.page_size, self.windows, self.lanes, self.drafts, self.checkpoints)
        dtypes = (self.dtype, self.activation, self.kv_dtype)
        return StageSizes(self.start, self.stop, *dtypes, self.max_context, self.rows, state)


class LoadedStage(msgspec.Struct, frozen=True):
    """The answer to LoadStage: the facts of the loaded stage, or the reason for which it could not be loaded."""

    error: str = ""
    pid: int = 0
    weights: str = ""
    name: str = ""
    hardware: str = ""
    choices: tuple[str, ...] = ()
    floor: int = 2
    block: int | None = None
    borders: tuple[int, ...] = ()


class ServeStage(msgspec.Struct, frozen=True):
    """The order to connect to the other processes, where to find them, and the address on which to listen."""

    host: str
    port: int
    incarnation: int
    rank: int
    size: int
    address: str
    source: int
    target: int

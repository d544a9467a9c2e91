"""A link joins the engine's process and the processes of remote stages: tensors from one to another, with a deadline for each.

In: tensors on the host, a rank (0 is the engine, stage i is i + 1) and a tag. Out: the same bytes in the other process; those of
one tag arrive in order. The transport is gloo's point to point through `torch.distributed`. Each time the processes connect they
make a new process group, whose number is its incarnation. Nothing is pickled. A peer that is gone, or silent past the deadline,
raises StateLost, and the link cannot be used afterwards.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from onedraw.errors import StateLost

ENGINE = 0  # the rank of the engine's process
# Tags. CONTROL: messages to a stage; REPLY: its replies; STREAM: residual streams; PROBED: data that a probe asks for.
CONTROL, REPLY, STREAM, PROBED = 1, 2, 3, 4
FOREVER = timedelta(days=30)  # A stage waits this long for work. A broken connection ends the wait.
PACKET_BYTES = 8192  # the first part of a message has a fixed size, so that the receiver need not know the length
LENGTH_BYTES = 8
MOST_MESSAGE_BYTES = 2**33
MOST_PENDING = 64  # most tensors that may be sent and not received yet; a further `send` waits for the oldest
MOST_PENDING_BYTES = 256 * 2**20  # most bytes of tensors that are sent and not received


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The facts with which a process finds the other processes of one incarnation of the link."""

    host: str
    port: int
    incarnation: int
    rank: int
    size: int


class RendezvousServer:
    """The key-value store through which the processes of all incarnations exchange their addresses. It listens on `host` alone.
    Owner: the engine's process."""

    def __init__(self, host: str, seconds: float) -> None:
        listener = socket.create_server((host, 0))
        self.host, self.port = host, int(listener.getsockname()[1])
        self._store = TCPStore(
            host,
            self.port,
            None,
            True,
            timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class Link:
    """One process's end of an incarnation. Several threads may use it."""

    def __init__(self, place: Rendezvous, *, address: str, seconds: float) -> None:
        """Connect to the other processes. `address`: that of this machine on which the link listens. `seconds`: the deadline
        for the connection, and for each wait that has no other."""
        self.place, self._limit = place, timedelta(seconds=seconds)
        self._lock = threading.Lock()
        self._pending: deque[tuple[Any, Tensor]] = deque()
        self._pending_bytes = 0
        self._broken = False  # after a failure, messages may be missing, so nothing more is sent or received
        try:
            store = TCPStore(place.host, place.port, None, False, self._limit)
            gloo: Any = ProcessGroupGloo  # Any, because torch's type stubs lack `_Options`, `send` and `recv`
            options = gloo._Options()
            options._timeout = self._limit
            options._devices = [gloo.create_device(hostname=address)]
            prefix = PrefixStore(f"onedraw {place.incarnation}", store)
            self._group: Any = gloo(prefix, place.rank, place.size, options)
        except RuntimeError as error:
            raise StateLost(f"the stages did not connect within {seconds:g} s: {_first_line(error)}") from None

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Start to send a contiguous tensor in host memory. It must not change until the other process has received it."""
        with self._lock:
            group = self._open
            try:
                self._pending.append((group.send([tensor], to, tag), tensor))
                self._pending_bytes += tensor.nbytes
                while len(self._pending) > MOST_PENDING or self._pending_bytes > MOST_PENDING_BYTES:
                    work, sent = self._pending.popleft()
                    self._pending_bytes -= sent.nbytes
                    work.wait(self._limit)
            except RuntimeError as error:
                self._broken = True
                raise StateLost(f"{_process(to)} cannot be reached: {_first_line(error)}") from None

    def flush(self) -> None:
        """Wait until the other processes have received everything that was sent."""
        with self._lock:
            try:
                while self._pending:
                    self._pending.popleft()[0].wait(self._limit)
                self._pending_bytes = 0
            except RuntimeError as error:
                self._broken = True
                raise StateLost(f"the other process has gone: {_first_line(error)}") from None

    def receive(self, into: Tensor, source: int, tag: int, limit: timedelta | None = None) -> Tensor:
        """Receive a tensor into `into`, and return `into`. `limit`: the deadline, if not that of the link."""
        try:
            self._open.recv([into], source, tag).wait(limit or self._limit)
        except RuntimeError as error:
            self._broken = True
            raise StateLost(f"{_process(source)} sends nothing: {_first_line(error)}") from None
        return into

    def send_message(self, message: bytes, to: int, tag: int) -> None:
        """Send bytes as a packet of fixed size, and the rest, if any, as a second packet."""
        head = torch.zeros(PACKET_BYTES, dtype=torch.uint8)
        view = head.numpy()
        view[:LENGTH_BYTES] = np.frombuffer(len(message).to_bytes(LENGTH_BYTES, "little"), np.uint8)
        room = PACKET_BYTES - LENGTH_BYTES
        view[LENGTH_BYTES : LENGTH_BYTES + len(message[:room])] = np.frombuffer(message[:room], np.uint8)
        self.send(head, to, tag)
        if len(message) > room:
            self.send(torch.from_numpy(np.frombuffer(message[room:], np.uint8).copy()), to, tag)

    def receive_message(self, source: int, tag: int, limit: timedelta | None = None) -> bytes:
        head = self.receive(torch.empty(PACKET_BYTES, dtype=torch.uint8), source, tag, limit).numpy()
        length, room = int.from_bytes(head[:LENGTH_BYTES].tobytes(), "little"), PACKET_BYTES - LENGTH_BYTES
        if length > MOST_MESSAGE_BYTES:
            raise StateLost(f"{_process(source)} announces a message of {length} bytes, over {MOST_MESSAGE_BYTES}")
        first = head[LENGTH_BYTES : LENGTH_BYTES + min(length, room)].tobytes()
        if length <= room:
            return first
        rest = self.receive(torch.empty(length - room, dtype=torch.uint8), source, tag)
        return first + rest.numpy().tobytes()

    @property
    def _open(self) -> Any:
        if self._group is None or self._broken:
            raise StateLost("the link to the stages is closed")
        return self._group

    def close(self) -> None:
        """Close the connections, which ends the waits of the other processes."""
        with self._lock:
            group, self._group = self._group, None
            self._pending.clear()
        if group is not None:
            with suppress(RuntimeError):
                group.abort()


def _process(rank: int) -> str:
    return "the engine's process" if rank == ENGINE else f"the process of stage {rank - 1}"


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0].rpartition("] ")[2][:200] or type(error).__name__

"""Weights from a trainer in another process of the same machine, tensor by tensor, without a file.

In, in the trainer's process: tensors by name, on any device. Out, in the server's: the same. A list of names, types and shapes
goes first, so that the receiver can refuse what it has no memory for. The transport is that of stages (`link.py`), over loopback.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from onedraw.backends.torch.remote.link import CONTROL, REPLY, STREAM, Link, Rendezvous, RendezvousServer
from onedraw.errors import BadParameter, BadRequest, StateLost

LOOPBACK = "127.0.0.1"
SECONDS = 60.0  # the longest wait for the other process: to connect, or for the next tensor
SENDER, RECEIVER = 0, 1
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightSender:
    """The trainer's side of one transfer. Owner: the caller, who closes it once the server has answered."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors = [(name, tensor.detach()) for name, tensor in tensors]
        for name, tensor in self._tensors:
            if _dtype_name(tensor) not in DTYPES:
                raise BadParameter(name, f"must be a tensor of float32, bfloat16 or float16, not {_dtype_name(tensor)}")
        self._rendezvous = RendezvousServer(LOOPBACK, SECONDS)
        self._link: Link | None = None

    @property
    def port(self) -> int:
        """The port of this machine that the server connects to."""
        return self._rendezvous.port

    def send(self) -> None:
        """Wait for the server, and send the list and then the tensors. Raises StateLost if the server ends the transfer."""
        self._link = link = _connect(self.port, SENDER)
        listed = [[name, _dtype_name(tensor), list(tensor.shape)] for name, tensor in self._tensors]
        link.send_message(json.dumps(listed).encode(), RECEIVER, CONTROL)
        link.receive_message(RECEIVER, REPLY)  # the receiver has accepted the list
        for _, tensor in self._tensors:
            link.send(_as_bytes(tensor), RECEIVER, STREAM)
        link.receive_message(RECEIVER, REPLY)  # the receiver has all tensors; until then their memory must be kept

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


def received_weights(port: int, *, most: int) -> Iterator[tuple[str, Tensor]]:
    """Connect to the sender at this port, and yield its tensors. `most`: the most bytes of all tensors together. Raises
    BadRequest if the list of tensors is refused, or if the sender is gone before the end."""
    try:
        link = _connect(port, RECEIVER)
        try:
            listed = _read_list(link.receive_message(SENDER, CONTROL), most)
            link.send_message(b"", SENDER, REPLY)
            for name, dtype, shape in listed:
                data = torch.empty(dtype.itemsize * shape.numel(), dtype=torch.uint8)
                yield name, link.receive(data, SENDER, STREAM).view(dtype).reshape(shape)
            link.send_message(b"", SENDER, REPLY)
            link.flush()
        finally:
            link.close()
    except StateLost:
        raise BadRequest(
            f"no more weights come from port {port} of this machine; who calls `onedraw.send_weights` must run until it returns",
            code="weights_not_sent",
        ) from None


def _connect(port: int, rank: int) -> Link:
    return Link(Rendezvous(LOOPBACK, port, incarnation=1, rank=rank, size=2), address=LOOPBACK, seconds=SECONDS)


def _read_list(message: bytes, most: int) -> list[tuple[str, torch.dtype, torch.Size]]:
    try:
        found = [(str(name), DTYPES[dtype], torch.Size(shape)) for name, dtype, shape in json.loads(message)]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadRequest(f"the list of the weights cannot be read: {error}", code="weights_not_sent") from None
    size = sum(dtype.itemsize * shape.numel() for _, dtype, shape in found)
    if size > most or any(number < 0 for _, _, shape in found for number in shape):
        raise BadRequest(f"the weights have {size:,} bytes, and those in use at most {most:,}", code="weights_refused")
    return found


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

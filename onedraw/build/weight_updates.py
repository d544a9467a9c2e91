"""Replaces the weights of a running model by those of a folder, or by tensors from memory or from another process.

The other process, such as a trainer, calls `send_weights`.

In: a folder or tensors. Out: the new fingerprint of the model. All new weights are read and compared with those in use before the
engine is asked to replace any: they must be of the same model, shapes and stored types, so that a server that is started with the
new weights would compute the same.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onedraw.backends.base import Backend, SupportsWeightUpdates
from onedraw.checkpoints.base import Checkpoint, StoredTensor, packed_bytes
from onedraw.checkpoints.in_memory import InMemoryCheckpoint, copy_to_memory, described, with_tensors
from onedraw.checkpoints.open import open_checkpoint
from onedraw.checkpoints.safetensors import read_file
from onedraw.engine.client import EngineClient
from onedraw.errors import BadParameter, BadRequest, Conflict, ModelError, StateLost, Unsupported
from onedraw.llm.llm import Accept
from onedraw.memory.disk_snapshots import SnapshotFolder
from onedraw.models.registry import ModelInfo, read_model_info
from onedraw.models.spec import ModelSpec
from onedraw.models.weight_names import WeightKey, weight_shapes

UPDATE_SECONDS = 1800.0  # the longest wait for the server's answer
HEADER_BYTES = 1 << 24  # the most bytes of the header of an uploaded file


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The properties of the weights in use, which new weights must have too."""

    spec: ModelSpec
    kinds: Mapping[WeightKey, str]  # the stored type of each weight
    checkpoint: InMemoryCheckpoint  # the configuration of the checkpoint in use, without tensors

    @property
    def nbytes(self) -> int:
        """The size of these weights in a file, without its header."""
        shapes = weight_shapes(self.spec)
        return sum(packed_bytes(shapes[key], kind) or 0 for key, kind in self.kinds.items())

    @staticmethod
    def of(checkpoint: Checkpoint, info: ModelInfo) -> ServedWeights:
        kinds = {key: info.weights.tensor(*key).kind for key in weight_shapes(info.spec)}
        return ServedWeights(info.spec, kinds, described(checkpoint))

    def check(self, checkpoint: Checkpoint) -> ModelInfo:
        """Return the description of a checkpoint that can replace the one in use, or raise."""
        try:
            info = read_model_info(checkpoint)
        except ModelError as error:
            raise BadRequest(f"the new weights cannot be used: {error}", code=error.code) from None
        if replace(info.spec, notes=self.spec.notes) != self.spec:
            raise BadRequest(
                f"{checkpoint.path}: config.json describes another model than the one that is served; weights can be replaced, "
                "the model cannot",
                code="other_model",
            )
        for key, kind in self.kinds.items():
            tensor = info.weights.tensor(*key)
            if tensor.kind != kind:
                raise BadRequest(
                    f"tensor {tensor.name} is stored as {tensor.kind}, and the weights in use as {kind}; save it as {kind}, or "
                    f"restart the server with weights in {tensor.kind}",
                    code="other_dtype",
                )
        return info


class EngineWeightUpdates:
    """Replaces the weights of one engine. It is the WeightUpdates of an LLM."""

    def __init__(
        self,
        served: ServedWeights,
        service: EngineClient,
        *,
        fingerprint: Callable[[str], str],
        snapshots: Callable[[Backend, str], SnapshotFolder],
    ) -> None:
        """`fingerprint` turns the identity of weights into the fingerprint of the model. `snapshots` opens the folder for
        snapshots of these weights."""
        self._served, self._service, self._fingerprint, self._snapshots = served, service, fingerprint, snapshots
        self._lock = threading.Lock()

    @property
    def most_bytes(self) -> int:
        return self._served.nbytes + HEADER_BYTES

    def from_folder(self, folder: Path, accept: Accept) -> None:
        with self._alone():
            try:
                with closing(open_checkpoint(folder)) as checkpoint:
                    self._served.check(checkpoint)  # fails before any tensor is read
                    copied = copy_to_memory(checkpoint)
            except ModelError as error:
                raise BadParameter("weight_dir", str(error)) from None
            self._replace(copied, accept)

    def from_file(self, file: Path, accept: Accept) -> None:
        """Read a safetensors file without a configuration of its own."""
        with self._alone():
            try:
                tensors = {name: replace(found, data=found.data.copy()) for name, found in read_file(file).items()}
            except ModelError as error:
                raise BadRequest(str(error), code=error.code) from None
            self._replace(with_tensors(self._served.checkpoint, tensors), accept)

    def from_tensors(self, named: Iterable[tuple[str, Any]], accept: Accept) -> None:
        """Read tensors of torch, or arrays of numpy, by the names of the checkpoint."""
        from onedraw.backends.torch.model.weight_update import stored_bytes

        with self._alone():
            tensors = {name: StoredTensor(name, *stored_bytes(name, tensor)) for name, tensor in named}
            self._replace(with_tensors(self._served.checkpoint, tensors), accept)

    def from_process(self, port: int, accept: Accept) -> None:
        """Receive the tensors from a trainer in another process, which listens at this port of this machine."""
        from onedraw.backends.torch.remote.weights import received_weights

        self.from_tensors(received_weights(port, most=self.most_bytes), accept)

    def _replace(self, checkpoint: InMemoryCheckpoint, accept: Accept) -> None:
        info = self._served.check(checkpoint)

        def replace_weights(backend: Backend) -> None:
            if not isinstance(backend, SupportsWeightUpdates):
                raise Unsupported("this backend cannot replace weights; use --backend torch", code="weight_updates_unsupported")
            backend.replace_weights(info.weights)
            accept(self._fingerprint(checkpoint.fingerprint()))

        weights = f"{checkpoint.fingerprint()} {checkpoint.stamp()}"
        try:
            self._service.replace_weights(replace_weights, lambda backend: self._snapshots(backend, weights))
        except ModelError as error:
            raise BadRequest(str(error), code="weights_refused") from None

    def _alone(self) -> _Alone:
        return _Alone(self._lock)


@dataclass(frozen=True, slots=True)
class _Alone:
    """Holds the lock of updates during a `with`. A second update does not wait for the lock but is refused."""

    lock: threading.Lock

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise Conflict("another update of the weights is running; send this one when it has ended")

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def send_weights(url: str, tensors: Iterable[tuple[str, Any]], *, token: str) -> str:
    """Send a trainer's weights to a server on this machine, without a file. Return the fingerprint of the model with them."""
    from onedraw.backends.torch.remote.weights import WeightSender

    sender = WeightSender(tensors)

    def send() -> None:
        with suppress(StateLost):  # the server's answer says why
            sender.send()

    thread = threading.Thread(target=send, name="send weights", daemon=True)
    thread.start()
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    body = json.dumps({"port": sender.port}).encode()
    asked = urllib.request.Request(url.rstrip("/") + "/update_weights", body, headers)
    try:
        with urllib.request.urlopen(asked, timeout=UPDATE_SECONDS) as answer:
            return str(json.load(answer)["fingerprint"])
    except urllib.error.HTTPError as error:
        with error:
            said = error.read().decode("utf-8", "replace")
        raise BadRequest(f"the server refuses the weights: {said}", code="weights_refused") from None
    finally:
        sender.close()

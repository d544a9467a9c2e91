"""Files and batches of all callers, in one folder.

    lock                       held by the one process that uses the folder
    files/file-ID.json         a StoredFile
    files/file-ID.jsonl        its content
    batches/batch_ID.json      a Batch
    batches/batch_ID.results   the results of a batch that has not ended, see `results.py`

A JSON file is replaced as a whole, so after a crash there is the old or the new one. The content of a file is complete before
its JSON file appears. A file or batch of another caller is reported as not found.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec

from onedraw.errors import BadRequest, OnedrawError
from onedraw.limits import BATCH_KEEP_SECONDS, MAX_BATCH_FILES, MAX_BATCHES
from onedraw.server.batch.lines import BatchIdentity, LineFault
from onedraw.server.batch.results import write_whole

log = logging.getLogger("onedraw.server.batch")

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
BLOCK = 1 << 20  # bytes that are copied at once


class NoSuchFile(BadRequest):
    code, status = "file_not_found", 404


class NoSuchBatch(BadRequest):
    code, status = "batch_not_found", 404


class StoreFull(BadRequest):
    code, status = "batch_storage_full", 413


class FolderInUse(OnedrawError):
    code, status = "batch_folder_in_use", 503


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    owner: str | None  # the name of the API key that created it; None on a server without keys
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it is stored. The counts of one that runs are in its ResultLog."""

    id: str
    owner: str | None
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    seed: int
    fingerprint: str
    model: str
    status: Status = "validating"
    metadata: Mapping[str, str] | None = None
    output_expires_seconds: int | None = None
    times: Mapping[str, int] = field(default_factory=dict)  # a status with `_at` → when the batch got it
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[LineFault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def identity(self) -> BatchIdentity:
        return BatchIdentity(self.id, self.created_at, self.seed, self.fingerprint)

    def at(self, status: Status, now: float, **changes: object) -> Batch:
        """Return the batch with another status."""
        return replace(self, status=status, times={**self.times, f"{status}_at": int(now)}, **changes)  # type: ignore[arg-type]


StoredT = TypeVar("StoredT", StoredFile, Batch)


class BatchStore:
    """Files and batches in one folder, to which no other object writes. Its methods are thread-safe; those that write take as
    long as the disk does. `most_bytes` bounds the files and the results of running batches together, `share` those of one
    caller."""

    def __init__(self, folder: Path, *, most_bytes: int, clock: Callable[[], float], share: int | None = None) -> None:
        self.folder = folder
        self._files_folder, self._batches_folder = folder / "files", folder / "batches"
        self._most_bytes, self._clock = most_bytes, clock
        self._share = most_bytes if share is None else share
        self._mutex = threading.RLock()
        for one in (folder, self._files_folder, self._batches_folder):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise FolderInUse(
                f"another server on this machine keeps its batches in {folder}; serve with a --batch-dir of its own"
            ) from None
        self._files = {found.id: found for found in self._load(self._files_folder, StoredFile)}
        self._batches = {found.id: found for found in self._load(self._batches_folder, Batch)}
        self._results: dict[str, int] = {}  # bytes of the results of each batch that has not ended
        self._remove_strays()

    def close(self) -> None:
        os.close(self._lock)

    # ------------------------------------------------------------------ files

    def content(self, file_id: str) -> Path:
        return self._files_folder / f"{file_id}.jsonl"

    def file(self, file_id: str, owner: str | None) -> StoredFile:
        with self._mutex:
            found = self._files.get(file_id)
        if found is None or found.owner != owner or self._expired(found):
            raise NoSuchFile(f"there is no file {file_id!r} (it was deleted, has expired, or never existed)", param="file_id")
        return found

    def files(self, owner: str | None) -> list[StoredFile]:
        """Return the files of a caller, the oldest first."""
        with self._mutex:
            return [one for one in self._files.values() if one.owner == owner and not self._expired(one)]

    def check_room(self, owner: str | None) -> None:
        """Raise StoreFull if the caller may not have another file."""
        if len(self.files(owner)) >= MAX_BATCH_FILES:
            raise StoreFull(f"there are {MAX_BATCH_FILES:,} files already; delete some first", param="file")

    def add_file(self, source: BinaryIO, *, owner: str | None, filename: str, purpose: str, lifetime: int | None) -> StoredFile:
        """Copy an uploaded file into the folder."""
        self.check_room(owner)
        identity, now = f"file-{secrets.token_hex(12)}", int(self._clock())
        source.seek(0, os.SEEK_END)
        size = source.tell()
        theirs = self.used_by(owner)
        if theirs + size > self._share or self.used + size > self._most_bytes:
            most = f"{self._share:,} of one key" if theirs + size > self._share < self._most_bytes else f"{self._most_bytes:,}"
            raise StoreFull(
                f"a file of {size:,} bytes does not fit into the {most} bytes (--batch-disk), of which this caller uses "
                f"{theirs:,}; delete files first",
                param="file",
            )
        source.seek(0)
        write_whole(self.content(identity), iter(lambda: source.read(BLOCK), b""))
        expires = None if lifetime is None else now + lifetime
        return self._save_file(StoredFile(identity, owner, filename, purpose, size, now, expires))

    def add_output(self, identity: str, parts: Iterator[bytes], *, batch: Batch, filename: str) -> StoredFile:
        """Write an output or error file of a batch. The caller gives its id, which depends only on the batch, so writing the file
        again after a crash replaces it."""
        size = write_whole(self.content(identity), parts)
        now = int(self._clock())
        lifetime = BATCH_KEEP_SECONDS if batch.output_expires_seconds is None else batch.output_expires_seconds
        return self._save_file(StoredFile(identity, batch.owner, filename, "batch_output", size, now, now + lifetime))

    def delete_file(self, file_id: str, owner: str | None) -> None:
        found = self.file(file_id, owner)
        if user := self._user_of(found):
            raise BadRequest(f"batch {user} still reads this file; cancel it first", param="file_id", code="file_in_use")
        self._drop_file(found)

    def _save_file(self, found: StoredFile) -> StoredFile:
        write_whole(self._files_folder / f"{found.id}.json", iter([msgspec.json.encode(found)]))
        with self._mutex:
            self._files[found.id] = found
        return found

    def _drop_file(self, found: StoredFile) -> None:
        with self._mutex:
            self._files.pop(found.id, None)
        (self._files_folder / f"{found.id}.json").unlink(missing_ok=True)
        self.content(found.id).unlink(missing_ok=True)

    def _user_of(self, found: StoredFile) -> str | None:
        """Return the id of a batch that has not ended and reads the file."""
        with self._mutex:
            return next((b.id for b in self._batches.values() if b.input_file_id == found.id and not b.ended), None)

    def _expired(self, found: StoredFile) -> bool:
        return found.expires_at is not None and found.expires_at <= self._clock() and not self._user_of(found)

    # ------------------------------------------------------------------ batches

    def results(self, batch: Batch) -> Path:
        return self._batches_folder / f"{batch.id}.results"

    def batch(self, batch_id: str, owner: str | None) -> Batch:
        with self._mutex:
            found = self._batches.get(batch_id)
        if found is None or found.owner != owner:
            raise NoSuchBatch(f"there is no batch {batch_id!r}", param="batch_id")
        return found

    def batches(self, owner: str | None) -> list[Batch]:
        """Return the batches of a caller, the oldest first."""
        with self._mutex:
            return [one for one in self._batches.values() if one.owner == owner]

    def running(self) -> list[Batch]:
        """Return the batches of all callers that have not ended, the oldest first."""
        with self._mutex:
            return [one for one in self._batches.values() if not one.ended]

    def add_batch(self, batch: Batch) -> None:
        self.check_room(batch.owner)  # The results of a batch will be files too.
        theirs = self.batches(batch.owner)
        if len(theirs) >= MAX_BATCHES:
            oldest = next((one for one in theirs if one.ended), None)
            if oldest is None:
                raise StoreFull(f"{MAX_BATCHES:,} batches have not ended yet; wait for one, or cancel it")
            self._drop_batch(oldest)
        self.save_batch(batch)

    def save_batch(self, batch: Batch) -> None:
        write_whole(self._batches_folder / f"{batch.id}.json", iter([msgspec.json.encode(batch)]))
        with self._mutex:
            self._batches[batch.id] = batch
        if batch.ended:
            self._results.pop(batch.id, None)
            self.results(batch).unlink(missing_ok=True)

    def _drop_batch(self, batch: Batch) -> None:
        with self._mutex:
            self._batches.pop(batch.id, None)
        (self._batches_folder / f"{batch.id}.json").unlink(missing_ok=True)

    # ------------------------------------------------------------------ space

    @property
    def used(self) -> int:
        with self._mutex:
            return sum(one.bytes for one in self._files.values()) + sum(self._results.values())

    def used_by(self, owner: str | None) -> int:
        with self._mutex:
            files = sum(one.bytes for one in self._files.values() if one.owner == owner)
            return files + sum(size for id, size in self._results.items() if self._batches[id].owner == owner)

    def full(self, owner: str | None) -> bool:
        """Whether files and results have used up the space of a caller or of the folder, so that no result may be added."""
        return self.used_by(owner) >= self._share or self.used >= self._most_bytes

    def count_results(self, batch: Batch, size: int) -> None:
        """Record how many bytes the results of a batch have, for the bounds on space."""
        with self._mutex:
            self._results[batch.id] = size

    def sweep(self) -> None:
        """Remove files that have expired, and batches that ended long ago."""
        with self._mutex:
            files = [one for one in self._files.values() if self._expired(one)]
            old = int(self._clock()) - BATCH_KEEP_SECONDS
            batches = [one for one in self._batches.values() if one.ended and max(one.times.values(), default=0) < old]
        for found in files:
            self._drop_file(found)
        for batch in batches:
            self._drop_batch(batch)

    # ------------------------------------------------------------------ reading the folder

    def _load(self, folder: Path, kind: type[StoredT]) -> Sequence[StoredT]:
        found: list[StoredT] = []
        for path in folder.glob("*.json"):
            try:
                one = msgspec.json.decode(path.read_bytes(), type=kind)
                if path.stem != one.id:
                    raise ValueError(f"it has the id {one.id}")
                found.append(one)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                log.warning("%s is damaged and is left out: %s", path, error)
        return sorted(found, key=lambda one: (one.created_at, one.id))

    def _remove_strays(self) -> None:
        """Remove what a crash left: contents without a StoredFile, results of batches that ended, files half written."""
        damaged = {path.stem for path in self._files_folder.glob("*.json")} | {
            p.stem for p in self._batches_folder.glob("*.json")
        }
        for path in (*self._files_folder.iterdir(), *self._batches_folder.iterdir()):
            ended = path.suffix == ".results" and path.stem in self._batches and self._batches[path.stem].ended
            if path.suffix == ".part" or ended or path.stem not in damaged:
                path.unlink()
        for batch in self.running():
            self._results[batch.id] = self.results(batch).stat().st_size if self.results(batch).exists() else 0

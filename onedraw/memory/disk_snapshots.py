"""Snapshots on disk: the pages, recurrent state and last logits of prompts, which can be reused after a restart.

A snapshot consists of arrays and the tokens they belong to. It is loaded for a prompt that begins with these tokens. A thread of
its own writes files; the caller's thread reads. A file is either complete or absent: it is written under a temporary name,
flushed and renamed. A file that is truncated, damaged, or written for another configuration or prompt is discarded with one
warning, and the prompt is computed. The checksum detects accidental damage. It is a blake2b over one CRC-32 per MiB, which is
four times as fast as a blake2b of all bytes: speed counts, since a request waits for the read before its first token. The parts
of a file are:

    magic, u64 length of the header, header (JSON), tokens (u32), arrays one after the other, checksum of all before it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import operator
import os
import queue
import struct
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger("onedraw.snapshots")

Arrays = Mapping[str, npt.NDArray[Any]]
MAGIC = b"onedraw snapshot 2\n"
SUFFIX = ".snapshot"
DIGEST = 16  # bytes of a checksum, and of the hash of a prefix's tokens
BLOCK = 2**20  # A CRC-32 is computed for each block of this many bytes.
MAX_QUEUED = 2  # Further snapshots are dropped while this many wait to be written, because their arrays use memory.
MAX_READ_BYTES = 2**30  # A larger snapshot is not read, since all requests wait during the read.
HALF_LIFE = 24 * 3600.0  # An unused snapshot loses half of its value in this many seconds.


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot file. `firsts` has, for each layer group, the index of the first page of the prefix that is stored."""

    tokens: tuple[int, ...]
    logits: bool  # whether the logits of the last token are included
    firsts: tuple[int, ...]
    path: Path
    size: int  # bytes of the file; of its arrays alone until it is written


class SnapshotFolder:
    """The snapshots of one configuration, in one folder. It belongs to the engine's thread; only `_run` runs on another.

    `fingerprint` names everything that affects the bits of the arrays: weights, backend, kind of device, dtypes, chunk and page
    size, drafter and version, but not the split over devices. Each fingerprint has a folder of its own below `root`, and all of
    them share `budget` bytes.
    """

    def __init__(self, root: Path, *, fingerprint: str, page_size: int, budget: int, max_queued: int = MAX_QUEUED) -> None:
        self._max_queued = max_queued
        self._root, self._fingerprint, self._page_size, self._budget = root, fingerprint, page_size, budget
        self._folder = root / hashlib.blake2b(fingerprint.encode(), digest_size=8).hexdigest()
        self._make_folders()
        self._index: dict[bytes, Snapshot] = {}  # from the hash of all of a snapshot's tokens to the snapshot
        self._pages: dict[bytes, tuple[Snapshot, int]] = {}  # from the hash of tokens up to a page's end to (snapshot, pages)
        self._lengths: dict[int, int] = {}  # from a length in tokens to the number of snapshots that have it
        self.written = 0
        self._lock = threading.Lock()  # guards `_pending` and the three maps above, which the writing thread updates too
        self._queue: queue.Queue[tuple[Snapshot, Arrays] | None] = queue.Queue()
        self._pending = 0
        for path in sorted(self._folder.iterdir()):
            self._register_file(path)
        self._thread = threading.Thread(target=self._run, name="onedraw-snapshots", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._index)

    # ------------------------------------------------------------------ lookup and reading

    def longest_whole(self, tokens: Sequence[int], *, lengths: Sequence[int] | None = None) -> Snapshot | None:
        """Return the longest snapshot whose tokens are exactly tokens[:n] for an n in `lengths`; None allows every n."""
        with self._lock:
            wanted = sorted(n for n in self._lengths if n <= len(tokens) and (lengths is None or n in lengths))
        found, state, done = None, hashlib.blake2b(digest_size=DIGEST), 0
        for length in wanted:
            state.update(_packed(tokens[done:length]))
            done = length
            with self._lock:
                found = self._index.get(state.digest(), found)
        return found

    def longest_pages(self, tokens: Sequence[int]) -> tuple[Snapshot, int] | None:
        """Return the snapshot that shares the most leading full pages with `tokens`, and their number."""
        found, state, size = None, hashlib.blake2b(digest_size=DIGEST), self._page_size
        for start in range(0, len(tokens) - size + 1, size):
            state.update(_packed(tokens[start : start + size]))
            with self._lock:
                entry = self._pages.get(state.digest())
            if entry is None:
                break
            found = entry
        return found

    def __contains__(self, tokens: Sequence[int]) -> bool:
        with self._lock:
            return _key(tokens) in self._index

    def read(self, snapshot: Snapshot) -> dict[str, npt.NDArray[Any]] | None:
        """Return the arrays of a snapshot. None if the file is over MAX_READ_BYTES. Also None if it cannot be read, is damaged
        or of another prompt; in these cases it is discarded."""
        try:
            if snapshot.size > MAX_READ_BYTES:
                return None
            content = _content(snapshot.path, snapshot.size)
            header, start = self._header(content)
            checksum = Checksum()
            checksum.update(content[:-DIGEST])
            if checksum.digest() != bytes(content[-DIGEST:]):
                raise ValueError("checksum mismatch")
            stop = start + 4 * header["tokens"]
            if np.frombuffer(content[start:stop], "<u4").tolist() != list(snapshot.tokens):
                raise ValueError("it belongs to another prompt")
            os.utime(snapshot.path)  # The file's time stands for its last use, by which `_evict` decides.
            return dict(_arrays(content, header["arrays"], stop))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.discard(snapshot, error)
            return None

    def discard(self, snapshot: Snapshot, error: Exception) -> None:
        """Delete a snapshot that cannot be used, and log a warning."""
        self._skip(snapshot.path, error)
        self._unregister(snapshot)

    # ------------------------------------------------------------------ writing

    def write(self, tokens: Sequence[int], arrays: Arrays, *, logits: bool, firsts: Sequence[int]) -> bool:
        """Queue a snapshot for writing. The caller must not change the arrays afterwards. False if the queue is full or
        a snapshot of these tokens exists."""
        with self._lock:
            if self._pending >= self._max_queued or _key(tokens) in self._index:
                return False
            self._pending += 1
        size = sum(array.nbytes for array in arrays.values())
        self._queue.put((Snapshot(tuple(tokens), logits, tuple(firsts), self._path(tokens), size), arrays))
        return True

    @property
    def busy(self) -> bool:
        """Whether the queue is full, so that `write` would drop a snapshot."""
        with self._lock:
            return self._pending >= self._max_queued

    def close(self) -> None:
        """Write the queued snapshots and end the writing thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            try:
                self._write(*queued)
            except (OSError, MemoryError) as error:
                log.warning("a snapshot could not be written: %s", error)
            finally:
                with self._lock:
                    self._pending -= 1

    def _write(self, snapshot: Snapshot, arrays: Arrays) -> None:
        temporary = snapshot.path.with_name(f"{snapshot.path.stem}.{os.getpid()}.part")
        checksum, size = Checksum(), DIGEST
        try:
            self._make_folders()  # Someone may have deleted them.
            with temporary.open("wb") as file:
                for part in self._parts(snapshot, arrays):
                    checksum.update(part)
                    size += file.write(part)
                file.write(checksum.digest())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(snapshot.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            self._evict()  # The disk may be full because the snapshots exceed the budget.
            raise
        self._register(Snapshot(snapshot.tokens, snapshot.logits, snapshot.firsts, snapshot.path, size))
        self.written += 1
        self._evict()

    def _parts(self, snapshot: Snapshot, arrays: Arrays) -> list[bytes | memoryview]:
        described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        header = {
            "fingerprint": self._fingerprint,
            "tokens": len(snapshot.tokens),
            "logits": snapshot.logits,
            "firsts": list(snapshot.firsts),
            "arrays": described,
            "bytes": snapshot.size,
        }
        text = json.dumps(header).encode()
        bodies = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()]
        return [MAGIC, struct.pack("<Q", len(text)), text, _packed(snapshot.tokens), *bodies]

    def _evict(self) -> None:
        """Delete the files with the lowest value, of all fingerprints, until the rest fits into the budget."""
        found = []
        for path in self._root.glob(f"*/*{SUFFIX}"):
            try:
                stat = path.stat()
                tokens = int(path.stem.partition("-")[0])
            except (OSError, ValueError):
                continue
            found.append((value(tokens, stat.st_size, time.time() - stat.st_mtime), stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._budget:
                return
            path.unlink(missing_ok=True)
            total -= size
            with self._lock:
                gone = next((s for s in self._index.values() if s.path == path), None)
            if gone is not None:
                self._unregister(gone)

    # ------------------------------------------------------------------ folders and index of files

    def _make_folders(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)  # Only the owner may read, since snapshots contain prompts.
        self._folder.mkdir(exist_ok=True)

    def _path(self, tokens: Sequence[int]) -> Path:
        return self._folder / f"{len(tokens)}-{_key(tokens).hex()}{SUFFIX}"

    def _register(self, snapshot: Snapshot) -> None:
        state, size = hashlib.blake2b(digest_size=DIGEST), self._page_size
        with self._lock:
            for page in range(1, len(snapshot.tokens) // size + 1):
                state.update(_packed(snapshot.tokens[(page - 1) * size : page * size]))
                self._pages[state.digest()] = (snapshot, page)
            key = _key(snapshot.tokens)
            if key not in self._index:
                length = len(snapshot.tokens)
                self._lengths[length] = self._lengths.get(length, 0) + 1
            self._index[key] = snapshot

    def _unregister(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._pages = {key: entry for key, entry in self._pages.items() if entry[0].path != snapshot.path}
            if self._index.pop(_key(snapshot.tokens), None) is not None:
                length = len(snapshot.tokens)
                self._lengths[length] -= 1
                if not self._lengths[length]:
                    del self._lengths[length]

    def _register_file(self, path: Path) -> None:
        """Add a file of an earlier run to the index by its header. `read` checks the content later."""
        if path.suffix == ".part":
            if not _alive(path):
                _remove(path)
            return
        if path.suffix != SUFFIX:
            return
        try:
            with path.open("rb") as file:
                head = file.read(len(MAGIC) + 8)
                head += file.read(_header_length(head))
                header, start = self._header(head)
                size = path.stat().st_size
                if not 0 <= header["tokens"] <= size:
                    raise ValueError("it is truncated")
                tokens = tuple(np.frombuffer(file.read(4 * header["tokens"]), "<u4").tolist())
                firsts = tuple(map(operator.index, header["firsts"]))
            if size != start + 4 * header["tokens"] + header["bytes"] + DIGEST or len(tokens) != header["tokens"]:
                raise ValueError("it is truncated")
            if path != self._path(tokens):
                raise ValueError("it belongs to another prompt")
            self._register(Snapshot(tokens, bool(header["logits"]), firsts, path, size))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._skip(path, error)

    def _header(self, content: bytes | memoryview) -> tuple[dict[str, Any], int]:
        """Parse the header, and return it with the offset of its end. ValueError: the file has another fingerprint."""
        length = _header_length(content)
        start = len(MAGIC) + 8
        header = json.loads(bytes(content[start : start + length]))
        if header["fingerprint"] != self._fingerprint:
            raise ValueError(f"it was written for {header['fingerprint']}, not {self._fingerprint}")
        return header, start + length

    def _skip(self, path: Path, error: Exception) -> None:
        log.warning("snapshot %s is discarded: %s", path.name, error)
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a file. A path that cannot be deleted, such as a folder, stays."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def value(tokens: int, size: int, age: float) -> float:
    """Return the tokens saved per byte, halved for every HALF_LIFE that has passed since the last use. `age` is in seconds."""
    return float(tokens / max(size, 1) * 0.5 ** (max(age, 0.0) / HALF_LIFE))


class Checksum:
    """Computes the checksum of bytes that are given in parts of any length."""

    def __init__(self) -> None:
        self._whole = hashlib.blake2b(digest_size=DIGEST)
        self._crc, self._room = 0, BLOCK

    def update(self, part: bytes | memoryview) -> None:
        rest = memoryview(part)
        while len(rest):
            piece, rest = rest[: self._room], rest[self._room :]
            self._crc = zlib.crc32(piece, self._crc)
            self._room -= len(piece)
            if not self._room:
                self._end_block()

    def digest(self) -> bytes:
        """Return the checksum. No `update` may follow."""
        self._end_block()
        return self._whole.digest()

    def _end_block(self) -> None:
        self._whole.update(struct.pack("<IQ", self._crc, self._room))
        self._crc, self._room = 0, BLOCK


def _header_length(content: bytes | memoryview) -> int:
    if len(content) < len(MAGIC) + 8 or content[: len(MAGIC)] != MAGIC:
        raise ValueError("it is not a snapshot")
    length = int(struct.unpack("<Q", content[len(MAGIC) : len(MAGIC) + 8])[0])
    if length > 2**24:
        raise ValueError("it is not a snapshot")
    return length


def _arrays(content: memoryview, described: Sequence[Any], start: int) -> list[tuple[str, npt.NDArray[Any]]]:
    found = []
    for name, dtype, shape in described:
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        found.append((name, np.frombuffer(content, kind, count=count, offset=start).reshape(shape)))
        start += count * kind.itemsize
    return found


def _content(path: Path, size: int) -> memoryview:
    """Read a file of this size into an uninitialized array, which saves the time to zero it. The array is writable, so that torch
    can use it without a copy."""
    content = np.empty(size, np.uint8).data
    with path.open("rb") as file:
        if file.readinto(content) != size or file.read(1):
            raise ValueError("its size has changed")
    return content


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def _key(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(_packed(tokens), digest_size=DIGEST).digest()


def _alive(path: Path) -> bool:
    """Whether the process that is writing this temporary file still runs. Its name contains the process id."""
    try:
        os.kill(int(path.stem.rpartition(".")[2]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True

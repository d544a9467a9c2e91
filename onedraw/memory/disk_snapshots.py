"""Snapshots on disk: what prompts left in pages, states and last logits, found again after a restart.

In: arrays with the tokens they belong to. Out: the same arrays for a prompt that begins with these tokens, or nothing. A
thread of its own writes; reading is the caller's. A file is complete or it is not there: it is written beside its place,
flushed, and renamed. Everything in it is under a checksum. What is torn, cut short, foreign or stale is skipped with one
warning, and computed again. The checksum is CRC-32 of every MiB under one blake2b: against accidents, and four times as
quick to read as blake2b of everything, which is what a first token waits for.

    magic, u64 length of the header, header (JSON), tokens (u32), arrays one after the other, checksum of all before it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
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
DIGEST = 16
BLOCK = 2**20  # bytes under one CRC
MOST_WAITING = 2  # snapshots on their way to the disk; more are dropped, since they hold memory
LARGEST_READ = 2**30  # bytes that an admission may read
HALF_LIFE = 24 * 3600.0  # seconds in which an unused snapshot loses half of its value


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a file holds. `firsts`: per page group, which page of the prefix its first stored page is."""

    tokens: tuple[int, ...]
    logits: bool  # the scores behind the last token are there too
    firsts: tuple[int, ...]
    path: Path
    size: int


class SnapshotFolder:
    """Owner: the engine thread; `_write` alone runs on the writing thread.

    `fingerprint` is everything that decides about bits: weights, backend, kind of device, dtypes, chunk and page length,
    drafter, version; not the split. Each has a folder of its own below `root`, and all share `budget` bytes.
    """

    def __init__(self, root: Path, *, fingerprint: str, page_size: int, budget: int, most_waiting: int = MOST_WAITING) -> None:
        self._most_waiting = most_waiting
        self._root, self._fingerprint, self._page_size, self._budget = root, fingerprint, page_size, budget
        self._folder = root / hashlib.blake2b(fingerprint.encode(), digest_size=8).hexdigest()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts can be read from what lies here
        self._folder.mkdir(exist_ok=True)
        self._index: dict[bytes, Snapshot] = {}  # by the key of all its tokens
        self._pages: dict[bytes, tuple[Snapshot, int]] = {}  # by the key of each of its full pages
        self._lengths: dict[int, int] = {}  # how many snapshots have so many tokens
        self.written = self.skipped = 0
        self._lock = threading.Lock()  # of the four above: the writer adds what it wrote
        self._waiting: queue.Queue[tuple[Snapshot, Arrays] | None] = queue.Queue()
        self._pending = 0
        for path in sorted(self._folder.iterdir()):
            self._meet(path)
        self._thread = threading.Thread(target=self._run, name="onedraw-snapshots", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._index)

    # ------------------------------------------------------------------ finding

    def whole(self, tokens: Sequence[int], *, lengths: Sequence[int] | None = None) -> Snapshot | None:
        """The longest snapshot of exactly tokens[:n], n one of `lengths` (None: any)."""
        with self._lock:
            wanted = sorted(n for n in self._lengths if n <= len(tokens) and (lengths is None or n in lengths))
        found, state, done = None, hashlib.blake2b(digest_size=DIGEST), 0
        for length in wanted:
            state.update(_packed(tokens[done:length]))
            done = length
            with self._lock:
                found = self._index.get(state.digest(), found)
        return found

    def beginning(self, tokens: Sequence[int]) -> tuple[Snapshot, int] | None:
        """A snapshot that begins with as many full pages of `tokens` as any, and how many pages that are."""
        found, state, size = None, hashlib.blake2b(digest_size=DIGEST), self._page_size
        for start in range(0, len(tokens) - size + 1, size):
            state.update(_packed(tokens[start : start + size]))
            with self._lock:
                there = self._pages.get(state.digest())
            if there is None:
                break
            found = there
        return found

    def __contains__(self, tokens: Sequence[int]) -> bool:
        with self._lock:
            return _key(tokens) in self._index

    def read(self, snapshot: Snapshot) -> dict[str, npt.NDArray[Any]] | None:
        """Its arrays; None, after one warning, where the file is not what it says."""
        try:
            if snapshot.size > LARGEST_READ:
                return None
            content = _content(snapshot.path)
            header, start = self._header(content)
            checksum = Checksum()
            checksum.update(content[:-DIGEST])
            if checksum.digest() != bytes(content[-DIGEST:]):
                raise ValueError("its checksum is another")
            stop = start + 4 * header["tokens"]
            if np.frombuffer(content[start:stop], "<u4").tolist() != list(snapshot.tokens):
                raise ValueError("it is of another prompt")
            os.utime(snapshot.path)  # used now: worth keeping
            return dict(_arrays(content, header["arrays"], stop))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.discard(snapshot, error)
            return None

    def discard(self, snapshot: Snapshot, error: Exception) -> None:
        """It is not what it says: one warning, and it may be written anew."""
        self._skip(snapshot.path, error)
        self._forget(snapshot)

    # ------------------------------------------------------------------ writing

    def write(self, tokens: Sequence[int], arrays: Arrays, *, logits: bool, firsts: Sequence[int]) -> bool:
        """Hand over to the writing thread. The arrays are not touched again. False: too much is waiting already."""
        with self._lock:
            if self._pending >= self._most_waiting or _key(tokens) in self._index:
                return False
            self._pending += 1
        size = sum(array.nbytes for array in arrays.values())
        self._waiting.put((Snapshot(tuple(tokens), logits, tuple(firsts), self._path(tokens), size), arrays))
        return True

    @property
    def busy(self) -> bool:
        """More would be dropped."""
        with self._lock:
            return self._pending >= self._most_waiting

    def close(self) -> None:
        """Write what is waiting."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            try:
                self._write(*job)
            except OSError as error:
                log.warning("a snapshot could not be written: %s", error)
            finally:
                with self._lock:
                    self._pending -= 1

    def _write(self, snapshot: Snapshot, arrays: Arrays) -> None:
        beside = snapshot.path.with_name(f"{snapshot.path.stem}.{os.getpid()}.part")
        checksum, size = Checksum(), DIGEST
        try:
            with beside.open("wb") as file:
                for part in self._parts(snapshot, arrays):
                    checksum.update(part)
                    size += file.write(part)
                file.write(checksum.digest())
                file.flush()
                os.fsync(file.fileno())
            beside.replace(snapshot.path)
        except OSError:
            beside.unlink(missing_ok=True)
            self._evict()  # others may have filled the disk with more than the budget
            raise
        self._remember(Snapshot(snapshot.tokens, snapshot.logits, snapshot.firsts, snapshot.path, size))
        self.written += 1
        self._evict()

    def _parts(self, snapshot: Snapshot, arrays: Arrays) -> list[bytes | memoryview]:
        told = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        header = {
            "fingerprint": self._fingerprint,
            "tokens": len(snapshot.tokens),
            "logits": snapshot.logits,
            "firsts": list(snapshot.firsts),
            "arrays": told,
            "bytes": snapshot.size,
        }
        text = json.dumps(header).encode()
        bodies = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()]
        return [MAGIC, struct.pack("<Q", len(text)), text, _packed(snapshot.tokens), *bodies]

    def _evict(self) -> None:
        """Within the budget, over all fingerprints: what saves the fewest tokens per byte, and longest ago, goes first."""
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
                self._forget(gone)

    # ------------------------------------------------------------------ the books

    def _path(self, tokens: Sequence[int]) -> Path:
        return self._folder / f"{len(tokens)}-{_key(tokens).hex()}{SUFFIX}"

    def _remember(self, snapshot: Snapshot) -> None:
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

    def _forget(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._pages = {key: entry for key, entry in self._pages.items() if entry[0].path != snapshot.path}
            if self._index.pop(_key(snapshot.tokens), None) is not None:
                length = len(snapshot.tokens)
                self._lengths[length] -= 1
                if not self._lengths[length]:
                    del self._lengths[length]

    def _meet(self, path: Path) -> None:
        """Take a file of an earlier run into the books by its header alone; its content is checked when it is read."""
        if path.suffix == ".part":
            if not _alive(path):
                _remove(path)
            return
        if path.suffix != SUFFIX:
            return
        try:
            with path.open("rb") as file:
                opening = file.read(len(MAGIC) + 8)
                opening += file.read(_length(opening))
                header, start = self._header(opening)
                size = path.stat().st_size
                if not 0 <= header["tokens"] <= size:
                    raise ValueError("it is cut short")
                tokens = tuple(np.frombuffer(file.read(4 * header["tokens"]), "<u4").tolist())
            if size != start + 4 * header["tokens"] + header["bytes"] + DIGEST or len(tokens) != header["tokens"]:
                raise ValueError("it is cut short")
            if path != self._path(tokens):
                raise ValueError("it is of another prompt")
            self._remember(Snapshot(tokens, bool(header["logits"]), tuple(header["firsts"]), path, size))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._skip(path, error)

    def _header(self, content: bytes | memoryview) -> tuple[dict[str, Any], int]:
        """The header and where it ends."""
        length = _length(content)
        start = len(MAGIC) + 8
        header = json.loads(bytes(content[start : start + length]))
        if header["fingerprint"] != self._fingerprint:
            raise ValueError(f"it was made by {header['fingerprint']}, not {self._fingerprint}")
        return header, start + length

    def _skip(self, path: Path, error: Exception) -> None:
        self.skipped += 1
        log.warning("snapshot %s is not used: %s", path.name, error)
        _remove(path)


def _remove(path: Path) -> None:
    """What cannot be removed, a folder for one, stays where it is."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def value(tokens: int, size: int, age: float) -> float:
    """Tokens saved per byte, halved for every HALF_LIFE that nobody used it."""
    return float(tokens / max(size, 1) * 0.5 ** (max(age, 0.0) / HALF_LIFE))


class Checksum:
    """Of bytes that come in parts of any length."""

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
                self._close()

    def digest(self) -> bytes:
        """Nothing comes after it."""
        self._close()
        return self._whole.digest()

    def _close(self) -> None:
        self._whole.update(struct.pack("<IQ", self._crc, self._room))
        self._crc, self._room = 0, BLOCK


def _length(content: bytes | memoryview) -> int:
    if len(content) < len(MAGIC) + 8 or content[: len(MAGIC)] != MAGIC:
        raise ValueError("it is no snapshot")
    length = int(struct.unpack("<Q", content[len(MAGIC) : len(MAGIC) + 8])[0])
    if length > 2**24:
        raise ValueError("it is no snapshot")
    return length


def _arrays(content: memoryview, told: Sequence[Any], start: int) -> list[tuple[str, npt.NDArray[Any]]]:
    found = []
    for name, dtype, shape in told:
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        found.append((name, np.frombuffer(content, kind, count=count, offset=start).reshape(shape)))
        start += count * kind.itemsize
    return found


def _content(path: Path) -> memoryview:
    """Writable, so that arrays over it need no copy of their own; not zeroed first."""
    content = np.empty(path.stat().st_size, np.uint8).data
    with path.open("rb") as file:
        if file.readinto(content) != len(content):
            raise ValueError("it is cut short")
    return content


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def _key(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(_packed(tokens), digest_size=DIGEST).digest()


def _alive(path: Path) -> bool:
    """Whether the process that writes this file still runs."""
    try:
        os.kill(int(path.stem.rpartition(".")[2]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True

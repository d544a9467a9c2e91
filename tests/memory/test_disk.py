"""Snapshots on disk: what was written comes back bit for bit, what is not whole is as if it were not there."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onedraw.memory import disk_snapshots as disk
from onedraw.memory.disk_snapshots import BLOCK, MAGIC, Checksum, SnapshotFolder, value

TOKENS = tuple(range(100, 140))
ARRAYS = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(5, dtype=np.int16), "none": np.zeros((0, 3))}
MUCH = 10**9


def opened(root: Path, *, fingerprint: str = "f", budget: int = MUCH, **more: Any) -> SnapshotFolder:
    return SnapshotFolder(root, fingerprint=fingerprint, page_size=8, budget=budget, **more)


def filled(root: Path, *prompts: tuple[int, ...]) -> None:
    folder = opened(root, most_waiting=99)
    for prompt in prompts or (TOKENS,):
        assert folder.write(prompt, ARRAYS, logits=True, firsts=(0,))
    folder.close()


def test_what_was_written_comes_back_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path)
    folder = opened(tmp_path)
    found = folder.whole((*TOKENS, 1, 2, 3))
    assert found is not None
    assert (found.tokens, found.logits, found.firsts) == (TOKENS, True, (0,))
    arrays = folder.read(found)
    assert arrays is not None
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)
    folder.close()


def test_the_longest_beginning_is_found(tmp_path: Path) -> None:
    filled(tmp_path, TOKENS[:16], TOKENS[:24], TOKENS, (1, *TOKENS))
    folder = opened(tmp_path)
    assert folder.whole(TOKENS[:30]) == folder.whole(TOKENS[:24])
    assert folder.whole(TOKENS[:30], lengths=[16]).tokens == TOKENS[:16]  # type: ignore[union-attr]
    assert folder.whole(TOKENS[:15]) is None
    snapshot, pages = folder.beginning((*TOKENS[:35], 7, 7, 7, 7, 7))  # type: ignore[misc]
    assert (snapshot.tokens, pages) == (TOKENS, 4)
    assert folder.beginning((7, *TOKENS)) is None
    assert TOKENS in folder
    assert TOKENS[:20] not in folder
    folder.close()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-60] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    path.write_bytes(np.random.default_rng(8).bytes(500))


def swap(path: Path) -> None:
    """Another prompt's file under this prompt's name."""
    other = path.parent.parent / "elsewhere"
    filled(other, tuple(range(40)))
    shutil.copy(next(other.glob("*/*.snapshot")), path)


def from_elsewhere(path: Path) -> None:
    """Made by another model, copied into this one's folder."""
    other = path.parent.parent / "elsewhere"
    folder = opened(other, fingerprint="another model")
    folder.write(TOKENS, ARRAYS, logits=True, firsts=(0,))
    folder.close()
    shutil.copy(next(other.glob("*/*.snapshot")), path)


def boast(path: Path) -> None:
    """A header that names more tokens than any file has."""
    content, start = path.read_bytes(), len(MAGIC) + 8
    length = int.from_bytes(content[start - 8 : start], "little")
    spoilt = json.dumps(json.loads(content[start : start + length]) | {"tokens": 10**12}).encode()
    path.write_bytes(MAGIC + len(spoilt).to_bytes(8, "little") + spoilt + content[start + length :])


def nest(path: Path) -> None:
    deep = b"[" * 100_000
    path.write_bytes(MAGIC + len(deep).to_bytes(8, "little") + deep)


@pytest.mark.parametrize("spoil", [cut, flip, empty, garble, swap, from_elsewhere, boast, nest], ids=lambda f: f.__name__)
def test_a_file_that_is_not_whole_is_skipped_with_one_warning(
    tmp_path: Path, spoil: Callable[[Path], None], snapshot_warnings: list[str]
) -> None:
    filled(tmp_path, TOKENS, TOKENS[:16])
    path = next(tmp_path.glob("*/40-*.snapshot"))
    spoil(path)
    folder = opened(tmp_path)
    found = folder.whole(TOKENS, lengths=[40])
    assert found is None or folder.read(found) is None
    assert folder.whole(TOKENS, lengths=[40]) is None  # not tried again
    assert folder.read(folder.whole(TOKENS)) is not None  # type: ignore[arg-type] # the good one beside it
    [said] = snapshot_warnings
    assert path.name in said
    assert folder.write(TOKENS, ARRAYS, logits=True, firsts=(0,))  # and it may be written again
    folder.close()
    assert opened(tmp_path).whole(TOKENS, lengths=[40]) is not None


def test_folders_that_are_named_like_snapshots_stay_where_they_are(tmp_path: Path, snapshot_warnings: list[str]) -> None:
    filled(tmp_path)
    place = next(tmp_path.glob("*/*.snapshot")).parent
    for name in ("40-cc.snapshot", "40-aa.999999999.part"):
        (place / name).mkdir()
    folder = opened(tmp_path)
    assert folder.whole(TOKENS) is not None
    assert len(list(place.iterdir())) == 3
    assert len(snapshot_warnings) == 1


def test_a_file_that_vanished_is_no_error(tmp_path: Path) -> None:
    filled(tmp_path)
    folder = opened(tmp_path)
    found = folder.whole(TOKENS)
    next(tmp_path.glob("*/*.snapshot")).unlink()
    assert found is not None
    assert folder.read(found) is None
    assert folder.whole(TOKENS) is None


def test_half_a_file_of_a_dead_process_is_swept_away(tmp_path: Path) -> None:
    filled(tmp_path)
    place = next(tmp_path.glob("*/*.snapshot")).parent
    (place / "40-aa.999999999.part").write_bytes(b"half")
    (place / f"40-bb.{os.getpid()}.part").write_bytes(b"half")
    assert len(opened(tmp_path)) == 1
    assert [path.name for path in place.glob("*.part")] == [f"40-bb.{os.getpid()}.part"]


def test_another_fingerprint_sees_nothing_and_shares_the_budget(tmp_path: Path) -> None:
    filled(tmp_path)
    other = opened(tmp_path, fingerprint="g", budget=1200)
    assert other.whole(TOKENS) is None
    size = next(tmp_path.glob("*/*.snapshot")).stat().st_size
    assert size < 1200 < 2 * size + 600
    for path in tmp_path.glob("*/*.snapshot"):
        os.utime(path, (0, 0))  # not used for long
    for prompt in ((*TOKENS, 1), (*TOKENS, 2), (*TOKENS, 3), (*TOKENS, 4)):
        other.write(prompt, ARRAYS, logits=True, firsts=(0,))
        while other.busy:
            time.sleep(0.001)
    other.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.snapshot")) <= 1200
    assert opened(tmp_path).whole(TOKENS) is None
    assert len(opened(tmp_path, fingerprint="g")) >= 1


def test_value_is_tokens_per_byte_and_fades() -> None:
    day = disk.HALF_LIFE
    assert value(200, 1000, 0) > value(100, 1000, 0) > value(100, 2000, 0)
    assert value(100, 1000, 0) == pytest.approx(2 * value(100, 1000, day))
    assert value(1000, 1000, 2 * day) > value(100, 1000, 0)


def test_a_disk_that_does_not_keep_up_drops_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, working = SnapshotFolder._write, threading.Event()
    monkeypatch.setattr(SnapshotFolder, "_write", lambda self, *given: (working.wait(), real(self, *given)))
    folder = opened(tmp_path)
    taken = [folder.write((*TOKENS, i), ARRAYS, logits=True, firsts=(0,)) for i in range(4)]
    assert taken == [True, True, False, False]
    assert folder.busy
    working.set()
    folder.close()
    assert folder.written == 2


def test_a_full_disk_is_a_warning(tmp_path: Path, snapshot_warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", full)
    folder = opened(tmp_path)
    folder.write(TOKENS, ARRAYS, logits=True, firsts=(0,))
    folder.close()
    [said] = snapshot_warnings
    assert "No space left" in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert TOKENS not in folder


def test_a_checksum_is_of_the_bytes_and_not_of_the_parts_they_came_in() -> None:
    content = np.random.default_rng(1).integers(0, 256, 2 * BLOCK + 777, np.uint8).tobytes()

    def of(*parts: bytes) -> bytes:
        checksum = Checksum()
        for part in parts:
            checksum.update(part)
        return checksum.digest()

    whole = of(content)
    assert of(content[:5], content[5 : BLOCK + 9], b"", content[BLOCK + 9 :]) == whole
    for place in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 776):  # one bit, anywhere
        assert of(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]) != whole
    swapped = content[BLOCK : 2 * BLOCK] + content[:BLOCK] + content[2 * BLOCK :]
    assert whole not in (of(swapped), of(content[:-1]), of(content + b"\0"), of(content[: 2 * BLOCK]))

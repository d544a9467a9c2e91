"""Disk snapshots are read back bit for bit; a damaged file counts as absent."""

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
    folder = opened(root, max_queued=99)
    for prompt in prompts or (TOKENS,):
        assert folder.write(prompt, ARRAYS, logits=True, firsts=(0,))
    folder.close()


def test_a_snapshot_is_read_back_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path)
    folder = opened(tmp_path)
    found = folder.longest_whole((*TOKENS, 1, 2, 3))
    assert found is not None
    assert (found.tokens, found.logits, found.firsts) == (TOKENS, True, (0,))
    arrays = folder.read(found)
    assert arrays is not None
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)
    folder.close()


def test_the_longest_matching_prefix_is_found(tmp_path: Path) -> None:
    filled(tmp_path, TOKENS[:16], TOKENS[:24], TOKENS, (1, *TOKENS))
    folder = opened(tmp_path)
    assert folder.longest_whole(TOKENS[:30]) == folder.longest_whole(TOKENS[:24])
    assert folder.longest_whole(TOKENS[:30], lengths=[16]).tokens == TOKENS[:16]  # type: ignore[union-attr]
    assert folder.longest_whole(TOKENS[:15]) is None
    snapshot, pages = folder.longest_pages((*TOKENS[:35], 7, 7, 7, 7, 7))  # type: ignore[misc]
    assert (snapshot.tokens, pages) == (TOKENS, 4)
    assert folder.longest_pages((7, *TOKENS)) is None
    assert TOKENS in folder
    assert TOKENS[:20] not in folder
    folder.close()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-60] ^= 1
    path.write_bytes(content)


def empty_the_file(path: Path) -> None:
    path.write_bytes(b"")


def write_random_bytes(path: Path) -> None:
    path.write_bytes(np.random.default_rng(8).bytes(500))


def replace_by_another_prompt(path: Path) -> None:
    """The file of another prompt under the name of this prompt."""
    other = path.parent.parent / "elsewhere"
    filled(other, tuple(range(40)))
    shutil.copy(next(other.glob("*/*.snapshot")), path)


def replace_by_another_model(path: Path) -> None:
    """A file written for another model, copied into the folder of this model."""
    other = path.parent.parent / "elsewhere"
    folder = opened(other, fingerprint="another model")
    folder.write(TOKENS, ARRAYS, logits=True, firsts=(0,))
    folder.close()
    shutil.copy(next(other.glob("*/*.snapshot")), path)


def claim_too_many_tokens(path: Path) -> None:
    """A header that names more tokens than any file has."""
    content, start = path.read_bytes(), len(MAGIC) + 8
    length = int.from_bytes(content[start - 8 : start], "little")
    spoilt = json.dumps(json.loads(content[start : start + length]) | {"tokens": 10**12}).encode()
    path.write_bytes(MAGIC + len(spoilt).to_bytes(8, "little") + spoilt + content[start + length :])


def nest_the_header_deeply(path: Path) -> None:
    deep = b"[" * 100_000
    path.write_bytes(MAGIC + len(deep).to_bytes(8, "little") + deep)


DAMAGES = [
    truncate,
    flip_a_bit,
    empty_the_file,
    write_random_bytes,
    replace_by_another_prompt,
    replace_by_another_model,
    claim_too_many_tokens,
    nest_the_header_deeply,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_file_is_discarded_with_one_warning(
    tmp_path: Path, damage: Callable[[Path], None], snapshot_warnings: list[str]
) -> None:
    filled(tmp_path, TOKENS, TOKENS[:16])
    path = next(tmp_path.glob("*/40-*.snapshot"))
    damage(path)
    folder = opened(tmp_path)
    found = folder.longest_whole(TOKENS, lengths=[40])
    assert found is None or folder.read(found) is None
    assert folder.longest_whole(TOKENS, lengths=[40]) is None  # not tried again
    assert folder.read(folder.longest_whole(TOKENS)) is not None  # type: ignore[arg-type] # the undamaged file
    [warning] = snapshot_warnings
    assert path.name in warning
    assert folder.write(TOKENS, ARRAYS, logits=True, firsts=(0,))  # it can be written again
    folder.close()
    assert opened(tmp_path).longest_whole(TOKENS, lengths=[40]) is not None


def test_a_file_that_has_grown_beyond_all_memory_is_discarded(tmp_path: Path, snapshot_warnings: list[str]) -> None:
    filled(tmp_path)
    folder = opened(tmp_path)
    found = folder.longest_whole(TOKENS)
    assert found is not None
    os.truncate(found.path, 2**42)
    assert folder.read(found) is None
    assert not found.path.exists()
    assert len(snapshot_warnings) == 1
    folder.close()


def test_folders_with_the_names_of_snapshots_are_left_alone(tmp_path: Path, snapshot_warnings: list[str]) -> None:
    filled(tmp_path)
    place = next(tmp_path.glob("*/*.snapshot")).parent
    for name in ("40-cc.snapshot", "40-aa.999999999.part"):
        (place / name).mkdir()
    folder = opened(tmp_path)
    assert folder.longest_whole(TOKENS) is not None
    assert len(list(place.iterdir())) == 3
    assert len(snapshot_warnings) == 1


def test_a_deleted_file_is_no_error(tmp_path: Path) -> None:
    filled(tmp_path)
    folder = opened(tmp_path)
    found = folder.longest_whole(TOKENS)
    next(tmp_path.glob("*/*.snapshot")).unlink()
    assert found is not None
    assert folder.read(found) is None
    assert folder.longest_whole(TOKENS) is None


def test_snapshots_are_written_after_someone_has_deleted_the_folder(tmp_path: Path) -> None:
    folder = opened(tmp_path / "snapshots")
    shutil.rmtree(tmp_path / "snapshots")
    assert folder.write(TOKENS, ARRAYS, logits=True, firsts=(0,))
    folder.close()
    assert folder.written == 1
    assert TOKENS in opened(tmp_path / "snapshots")


def test_a_temporary_file_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    filled(tmp_path)
    place = next(tmp_path.glob("*/*.snapshot")).parent
    (place / "40-aa.999999999.part").write_bytes(b"half")
    (place / f"40-bb.{os.getpid()}.part").write_bytes(b"half")
    assert len(opened(tmp_path)) == 1
    assert [path.name for path in place.glob("*.part")] == [f"40-bb.{os.getpid()}.part"]


def test_fingerprints_share_the_budget_and_not_the_snapshots(tmp_path: Path) -> None:
    filled(tmp_path)
    other = opened(tmp_path, fingerprint="g", budget=1200)
    assert other.longest_whole(TOKENS) is None
    size = next(tmp_path.glob("*/*.snapshot")).stat().st_size
    assert size < 1200 < 2 * size + 600
    for path in tmp_path.glob("*/*.snapshot"):
        os.utime(path, (0, 0))  # unused for a long time
    for prompt in ((*TOKENS, 1), (*TOKENS, 2), (*TOKENS, 3), (*TOKENS, 4)):
        other.write(prompt, ARRAYS, logits=True, firsts=(0,))
        while other.busy:
            time.sleep(0.001)
    other.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.snapshot")) <= 1200
    assert opened(tmp_path).longest_whole(TOKENS) is None
    assert len(opened(tmp_path, fingerprint="g")) >= 1


def test_the_value_of_a_snapshot_is_tokens_per_byte_and_decays() -> None:
    day = disk.HALF_LIFE
    assert value(200, 1000, 0) > value(100, 1000, 0) > value(100, 2000, 0)
    assert value(100, 1000, 0) == pytest.approx(2 * value(100, 1000, day))
    assert value(1000, 1000, 2 * day) > value(100, 1000, 0)


def test_a_disk_that_does_not_keep_up_drops_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    working = threading.Event()
    monkeypatch.setattr(disk.os, "fsync", lambda file: working.wait())
    folder = opened(tmp_path)
    taken = [folder.write((*TOKENS, i), ARRAYS, logits=True, firsts=(0,)) for i in range(4)]
    assert taken == [True, True, False, False]
    assert folder.busy
    working.set()
    folder.close()
    assert folder.written == 2


def test_a_full_disk_is_logged_as_a_warning(
    tmp_path: Path, snapshot_warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", full)
    folder = opened(tmp_path)
    folder.write(TOKENS, ARRAYS, logits=True, firsts=(0,))
    folder.close()
    [warning] = snapshot_warnings
    assert "No space left" in warning
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert TOKENS not in folder


def test_a_checksum_depends_on_the_bytes_and_not_on_how_they_are_split() -> None:
    content = np.random.default_rng(1).integers(0, 256, 2 * BLOCK + 777, np.uint8).tobytes()

    def checksum_of(*parts: bytes) -> bytes:
        checksum = Checksum()
        for part in parts:
            checksum.update(part)
        return checksum.digest()

    whole = checksum_of(content)
    assert checksum_of(content[:5], content[5 : BLOCK + 9], b"", content[BLOCK + 9 :]) == whole
    for place in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 776):  # one bit, anywhere
        assert checksum_of(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]) != whole
    swapped = content[BLOCK : 2 * BLOCK] + content[:BLOCK] + content[2 * BLOCK :]
    assert whole not in (
        checksum_of(swapped),
        checksum_of(content[:-1]),
        checksum_of(content + b"\0"),
        checksum_of(content[: 2 * BLOCK]),
    )

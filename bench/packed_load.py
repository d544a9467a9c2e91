"""How long a packed file takes from a warm page cache to the device, and how much of the host's memory on the way.

    python -m bench.packed_load [--model random:qwen3.6-27b-q4_k_m] [--device cuda:0] [--folder /dev/shm]

A file of the shape is written with random blocks (17 GB of Qwen3.6-27B as Q4_K_M), read once so that the page cache is warm,
and opened as any file is: `open_checkpoint`, `describe`, `TorchBackend`. Memory is the process's own (RssAnon, sampled every
five milliseconds), beside the pages of the mapped file, which the system may take back, and beside pinned buffers, which are
printed by themselves. What Python, torch and the CUDA context hold before is printed first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from pathlib import Path
from types import TracebackType

import torch

from bench.gguf_files import write_random
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.checkpoints import dequantize
from onedraw.checkpoints.base import packed_bytes
from onedraw.checkpoints.open import open_checkpoint
from onedraw.checkpoints.random_weights import open_random
from onedraw.models.registry import read_model_info
from onedraw.types import History, Plan, Row, SamplingParams

GIB = 2**30


def say(what: str, value: object) -> None:
    print(f"{what:64s} {f'{value:.2f}' if isinstance(value, float) else value}", flush=True)


class Memory:
    """The largest value of every Rss counter of /proc/self/status while it is open."""

    def __init__(self, every: float = 0.005) -> None:
        self._every, self._done = every, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.most: dict[str, int] = {}

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self._every):
            for name, size in resident().items():
                self.most[name] = max(self.most.get(name, 0), size)


def resident() -> dict[str, int]:
    """Bytes by kind: RssAnon, RssFile, RssShmem, VmLck, VmPin."""
    wanted = ("RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: 1024 * int(line[1]) for line in lines if line and line[0][:-1] in wanted}


def make_file(model: str, folder: Path) -> Path:
    path = folder / f"{model.removeprefix('random:')}.gguf"
    begin = time.perf_counter()
    size = write_random(path, model)
    seconds = time.perf_counter() - begin
    say(f"written: {path}, GB", size / 1e9)
    say("written, s", seconds)
    begin, sums = time.perf_counter(), 0
    with path.open("rb", buffering=0) as file:
        room = memoryview(bytearray(16 << 20))
        while count := file.readinto(room):
            sums += count
    say("read once by `read`, into one buffer, GB/s", sums / 1e9 / (time.perf_counter() - begin))
    return path


def load(path: Path, device: str) -> None:
    place = torch.device(device)
    cuda = place.type == "cuda"
    products = "packed-bf16" if cuda else "packed-f32"
    ops = pick_ops(device, products, cache=Path("build"))
    if cuda:
        (torch.zeros(1 << 20, device=place) + 1).sum().item()
    before = resident()["RssAnon"]
    say("own memory before (Python, torch, the CUDA context), GiB", before / GIB)
    begin = time.perf_counter()

    def progress(done: int, layers: int) -> None:
        if done % 8 == 0 or done == layers:
            print(f"  {done} of {layers} layers after {time.perf_counter() - begin:.2f} s", flush=True)

    with Memory() as memory:
        checkpoint = open_checkpoint(path)
        info = read_model_info(checkpoint)
        say("opened and described, s", time.perf_counter() - begin)
        backend = TorchBackend(
            info.spec,
            info.weights,
            dtype=products,
            activation="bf16" if cuda else "f32",
            device=device,
            lanes=1,
            pages=64,
            page_size=16,
            max_context=1024,
            drafts=16,
            ops=ops,
            check=False,
            progress=progress,
        )
        if cuda:
            torch.cuda.synchronize(place)
        seconds = time.perf_counter() - begin
    size = path.stat().st_size
    say("from the warm page cache to the device, pages allocated, s", seconds)
    say("GB/s", size / 1e9 / seconds)
    say("own memory at most, GiB", memory.most["RssAnon"] / GIB)
    say("own memory at most, above what there was before, GiB", (memory.most["RssAnon"] - before) / GIB)
    for name in ("RssFile", "RssShmem", "VmLck", "VmPin"):
        say(f"  {name} at most, GiB", memory.most[name] / GIB if name in memory.most else "not told")
    if cuda:
        say("on the device, at most, GiB", torch.cuda.max_memory_allocated(place) / GIB)
        say("on the device now, GiB", torch.cuda.memory_allocated(place) / GIB)
    _try(backend)


def _try(backend: TorchBackend) -> None:
    """One turn, so that what was loaded is seen to compute."""
    prompt = tuple(range(5, 69))
    windows = backend.capacity.groups
    params = SamplingParams(temperature=0.0, max_tokens=4, checksums=True)
    row = Row("r", 0, tuple(tuple(range(8)) for _ in windows), 0, prompt, (), len(prompt), True, params, History(prompt, []))
    outcome = backend.collect(backend.submit(Plan((row,))))
    choice = outcome.rows[0].sampled[0]
    say("a turn over 64 tokens: token and checksum", f"{choice.token} {choice.checksum}")


def need(model: str) -> int:
    """Bytes of the file, about."""
    tensors = open_random(model).tensors.values()
    return sum(packed_bytes(tensor.shape, tensor.kind) or 0 for tensor in tensors)


def roomy(wanted: Path | None, size: int) -> Path:
    """The asked folder, or the first with room for the file."""
    places = [wanted] if wanted is not None else [Path("/dev/shm"), Path("/tmp"), Path.cwd()]
    for place in places:
        if place.is_dir() and shutil.disk_usage(place).free > 1.1 * size:
            return place
    raise SystemExit(f"no room for {size / 1e9:.0f} GB in {', '.join(map(str, places))}; pass --folder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3.6-27b-q4_k_m")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--file", type=Path, help="a file that is there already")
    parser.add_argument("--keep", action="store_true", help="leave the written file")
    parser.add_argument("--only-write", action="store_true", help="write the file and leave it, for --file later")
    parser.add_argument("--threads", default="8", help="that read the file; several loads one after the other: 1,8")
    wishes = parser.parse_args()
    say("processors", len(os.sched_getaffinity(0)))
    path = wishes.file or make_file(wishes.model, roomy(wishes.folder, need(wishes.model)))
    if wishes.only_write:
        return
    try:
        for count in wishes.threads.split(","):
            dequantize.MAX_THREADS = int(count)
            say("threads that read", int(count))
            load(path, wishes.device)
    finally:
        if wishes.file is None and not wishes.keep:
            path.unlink()


if __name__ == "__main__":
    main()

"""Measure how long a packed model takes from a warm page cache to the device, and how much host memory loading needs.

    python -m bench.packed_load [--model random:qwen3.6-27b-q4_k_m] [--device cuda:0] [--folder /dev/shm]

Writes a file of the shape with random weights (17 GB for Qwen3.6-27B as Q4_K_M), reads it once so that the page cache is warm,
and opens it with `open_checkpoint`, `read_model_info` and `TorchBackend`. Host memory is the anonymous memory of the process
(RssAnon, sampled every five milliseconds). The mapped file, whose pages the system can reclaim, and pinned buffers are printed
separately, as is the memory that Python, torch and the CUDA context use before loading.
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
from bench.measuring import report
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.checkpoints import dequantize
from onedraw.checkpoints.base import packed_bytes
from onedraw.checkpoints.open import open_checkpoint
from onedraw.checkpoints.random_weights import open_random
from onedraw.models.registry import read_model_info
from onedraw.types import History, Plan, Row, SamplingParams

GIB = 2**30


class Memory:
    """Samples the memory counters of /proc/self/status in a thread and keeps the largest value of each."""

    def __init__(self, interval: float = 0.005) -> None:
        self._interval, self._done = interval, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak: dict[str, int] = {}

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self._interval):
            for name, size in resident().items():
                self.peak[name] = max(self.peak.get(name, 0), size)


def resident() -> dict[str, int]:
    """Return bytes by counter: RssAnon, RssFile, RssShmem, VmLck, VmPin."""
    wanted = ("RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: 1024 * int(line[1]) for line in lines if line and line[0][:-1] in wanted}


def make_file(model: str, folder: Path) -> Path:
    path = folder / f"{model.removeprefix('random:')}.gguf"
    begin = time.perf_counter()
    size = write_random(path, model)
    seconds = time.perf_counter() - begin
    report(f"written: {path}, GB", size / 1e9)
    report("written, s", seconds)
    begin, total = time.perf_counter(), 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(16 << 20))
        while count := file.readinto(buffer):
            total += count
    report("read once into one buffer, GB/s", total / 1e9 / (time.perf_counter() - begin))
    return path


def load(path: Path, device: str) -> None:
    target = torch.device(device)
    cuda = target.type == "cuda"
    products = "packed-bf16" if cuda else "packed-f32"
    ops = pick_ops(device, products, cache=Path("build"))
    if cuda:
        (torch.zeros(1 << 20, device=target) + 1).sum().item()
    before = resident()["RssAnon"]
    report("host memory before loading, GiB", before / GIB)
    begin = time.perf_counter()

    def progress(done: int, layers: int) -> None:
        if done % 8 == 0 or done == layers:
            print(f"  {done} of {layers} layers after {time.perf_counter() - begin:.2f} s", flush=True)

    with Memory() as memory:
        checkpoint = open_checkpoint(path)
        info = read_model_info(checkpoint)
        report("checkpoint opened and model described, s", time.perf_counter() - begin)
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
            torch.cuda.synchronize(target)
        seconds = time.perf_counter() - begin
    size = path.stat().st_size
    report("from the warm page cache to the device, pages allocated, s", seconds)
    report("GB/s", size / 1e9 / seconds)
    report("peak host memory, GiB", memory.peak["RssAnon"] / GIB)
    report("peak host memory above that before loading, GiB", (memory.peak["RssAnon"] - before) / GIB)
    for name in ("RssFile", "RssShmem", "VmLck", "VmPin"):
        report(f"  peak of {name}, GiB", memory.peak[name] / GIB if name in memory.peak else "unknown")
    if cuda:
        report("peak device memory, GiB", torch.cuda.max_memory_allocated(target) / GIB)
        report("device memory now, GiB", torch.cuda.memory_allocated(target) / GIB)
    _run_step(backend)


def _run_step(backend: TorchBackend) -> None:
    """Run one step, to show that the loaded model computes."""
    prompt = tuple(range(5, 69))
    windows = backend.capacity.groups
    params = SamplingParams(temperature=0.0, max_tokens=4, checksums=True)
    row = Row("r", 0, tuple(tuple(range(8)) for _ in windows), 0, prompt, (), len(prompt), True, params, History(prompt, []))
    outcome = backend.collect(backend.submit(Plan((row,))))
    choice = outcome.rows[0].sampled[0]
    report("step over 64 tokens: token and checksum", f"{choice.token} {choice.checksum}")


def file_bytes(model: str) -> int:
    """Estimate the size of the file."""
    tensors = open_random(model).tensors.values()
    return sum(packed_bytes(tensor.shape, tensor.kind) or 0 for tensor in tensors)


def folder_with_space(wanted: Path | None, size: int) -> Path:
    """Return the given folder, or the first of some usual ones that has space for the file."""
    folders = [wanted] if wanted is not None else [Path("/dev/shm"), Path("/tmp"), Path.cwd()]
    for folder in folders:
        if folder.is_dir() and shutil.disk_usage(folder).free > 1.1 * size:
            return folder
    raise SystemExit(f"not enough space for {size / 1e9:.0f} GB in {', '.join(map(str, folders))}; pass --folder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3.6-27b-q4_k_m")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--file", type=Path, help="use this file instead of writing one")
    parser.add_argument("--keep", action="store_true", help="do not delete the written file")
    parser.add_argument("--only-write", action="store_true", help="write the file, for --file later, and exit")
    parser.add_argument(
        "--threads", default="8", help="number of threads that read the file; several numbers, as in 1,8, load several times"
    )
    options = parser.parse_args()
    report("processors", len(os.sched_getaffinity(0)))
    path = options.file or make_file(options.model, folder_with_space(options.folder, file_bytes(options.model)))
    if options.only_write:
        return
    try:
        for count in options.threads.split(","):
            dequantize.MAX_THREADS = int(count)
            report("reading threads", int(count))
            load(path, options.device)
    finally:
        if options.file is None and not options.keep:
            path.unlink()


if __name__ == "__main__":
    main()

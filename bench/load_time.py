"""Measure how long a model takes to open, and the peak memory of loading its weights.

    python -m bench.load_time [MODEL] [--dtype auto] [--repeats 3] [--json]

Measures three things, each in its own process:
- the time to open an LLM, without imports;
- the memory of the weights: the transformer is built as the backend builds it, without KV pages. Anonymous memory (RssAnon) is
  counted, without the mapped checkpoint and shared libraries, whose pages the system can reclaim. The parent process samples it,
  since the peak of RssAnon cannot be read afterwards;
- the peak resident memory (VmHWM) of an open LLM, with KV pages and mapped files.

Target: the peak of the weights is at most their final size plus one layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from onedraw.checkpoints.download import resolve_model
from onedraw.settings import Settings, default_cache_dir

MEBIBYTE = 2**20
MEANINGS = {
    "parameters": "planned size of the weights",
    "tied_copy": "second copy of a tied embedding, as the head",
    "tables": "rotary tables",
    "final": "measured after loading",
    "peak": "measured while loading",
    "largest_layer": "largest layer of the checkpoint, in float32",
}


def status(pid: int | str, field: str) -> int:
    """A memory field of /proc/PID/status, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


# ---------------------------------------------------------------------- in the measured process


def build_an_llm(path: str, dtype: str) -> dict[str, float]:
    import onedraw.backends.torch.backend  # noqa: F401  imported before the clock starts
    from onedraw.build.llm import build_llm

    begin = time.perf_counter()
    llm = build_llm(Settings(model=path, dtype=dtype))
    seconds = time.perf_counter() - begin
    found = {"open_seconds": seconds, "resident_peak": float(status("self", "VmHWM"))}
    llm.close()
    return found


def load_weights(path: str, dtype: str) -> dict[str, float]:
    """Build the transformer. Before and after, print a line and wait for one, so that the parent can read the memory."""
    import torch

    from onedraw.backends.packing import PACKED_DTYPES, plan_weight_storage
    from onedraw.backends.torch.device import DTYPES, pick_ops
    from onedraw.backends.torch.model.transformer import Transformer
    from onedraw.backends.torch.runner.pipeline import StageDevice
    from onedraw.checkpoints.open import open_checkpoint
    from onedraw.models.registry import read_model_info
    from onedraw.models.spec import DTYPE_BYTES

    device, compute_dtype = "cpu", "packed" if dtype == "auto" else dtype
    info = read_model_info(open_checkpoint(path))
    spec = info.spec
    ops = pick_ops(device, compute_dtype, cache=default_cache_dir())

    def build() -> Transformer:
        ops.linear(torch.zeros(64, 64))  # starts the thread pool, whose stacks do not belong to the weights
        _wait_for_parent("ready")
        return Transformer(
            spec,
            info.weights,
            dtype=DTYPES[compute_dtype],
            stage_devices=[StageDevice(torch.device(device), ops)],
            max_context=spec.max_context,
        )

    with ThreadPoolExecutor(1) as thread:  # the engine service also loads and computes in a thread of its own
        stack = thread.submit(build).result()
        _wait_for_parent("loaded")
    packed = compute_dtype in PACKED_DTYPES
    plan = (
        plan_weight_storage(info.weights, compute_dtype).weights.total if packed else spec.parameters * DTYPE_BYTES[compute_dtype]
    )
    ropes = sum(table.numel() * table.element_size() for table in stack.local_stages[0].ropes.values())
    return {
        "parameters": float(plan),
        "tied_copy": 0.0
        if ops.reads_weight_rows
        else float(spec.vocab * spec.hidden * DTYPE_BYTES[compute_dtype])
        if spec.tied
        else 0.0,
        "tables": float(ropes),
        "largest_layer": float(max(spec.weight_bytes(i, "f32") for i in range(len(spec.layers)))),
    }


def _wait_for_parent(word: str) -> None:
    print(word, flush=True)
    sys.stdin.readline()


MEASUREMENTS = {"llm": build_an_llm, "weights": load_weights}

# ---------------------------------------------------------------------- in the measuring process


def _command(measurement: str, path: str, dtype: str) -> list[str]:
    return [sys.executable, "-m", "bench.load_time", path, "--dtype", dtype, "--measurement", measurement]


def time_an_llm(path: str, dtype: str) -> dict[str, float]:
    done = subprocess.run(_command("llm", path, dtype), capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def watch_weights(path: str, dtype: str) -> dict[str, float]:
    """Return the anonymous memory after loading and at its peak, relative to before; sampled as often as possible."""
    with subprocess.Popen(_command("weights", path, dtype), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = peak = status(child.pid, "RssAnon")
        child.stdin.write("\n")
        child.stdin.flush()
        finished = _LineReady(child.stdout)
        samples = 0
        while not finished():
            peak = max(peak, status(child.pid, "RssAnon"))
            samples += 1
        after = status(child.pid, "RssAnon")
        child.stdin.write("\n")
        child.stdin.flush()
        found: dict[str, float] = json.loads(child.stdout.read().splitlines()[-1])
    return {**found, "final": float(after - before), "peak": float(max(peak, after) - before), "samples": float(samples)}


class _LineReady:
    """Tells whether a line can be read without waiting."""

    def __init__(self, stream: Any) -> None:
        import selectors

        self._selector = selectors.DefaultSelector()
        self._selector.register(stream, selectors.EVENT_READ)

    def __call__(self) -> bool:
        return bool(self._selector.select(timeout=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measurement", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = str(resolve_model(options.model, default_cache_dir()))
    if options.measurement:
        print(json.dumps(MEASUREMENTS[options.measurement](path, options.dtype)))
        return
    llms = [time_an_llm(path, options.dtype) for _ in range(options.repeats)]
    weights = watch_weights(path, options.dtype)
    result: dict[str, Any] = {
        "open_seconds": statistics.median(llm["open_seconds"] for llm in llms),
        "resident_peak": max(llm["resident_peak"] for llm in llms),
        "weights": weights,
        "over_final": weights["peak"] - weights["final"],
        "within": weights["peak"] <= weights["final"] + weights["largest_layer"],
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name, meaning in MEANINGS.items():
        print(f"{name:14s} {weights[name] / MEBIBYTE:7.1f} MiB   {meaning}")
    verdict = f"{'within' if result['within'] else 'OVER'} one layer ({int(weights['samples'])} samples)"
    print(f"peak is {result['over_final'] / MEBIBYTE:.1f} MiB over the final size, {verdict}")
    print(f"opened in {result['open_seconds']:.2f} s, resident at most {result['resident_peak'] / MEBIBYTE:.0f} MiB with pages")


if __name__ == "__main__":
    main()

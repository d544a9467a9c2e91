"""Compare the speed of the xla backend with the torch backend: one model, one machine, one run.

    python -m bench.xla_against_torch [MODEL] [--random-1b] [--device cpu|cuda] [--repeats 2] [--new-tokens 48] [--json]

MODEL is a folder, a file or a name; --random-1b uses a Llama with 1.2 billion random weights instead. The backends run
alternately, each in its own process, through the same engine. Measures prefill of 512 tokens, decode with 1 and 8 requests
(greedy, and sampled with 8), and the time to open the model, with an empty and with a filled cache of compiled programs. The best
of the repeats counts, because other load on the machine can only add time. `alone = batched` tells whether 6 concurrent requests
have the tokens and checksums of each run alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

PROMPT = tuple((7 * i) % 4000 + 100 for i in range(512))
SIZES: dict[str, Any] = {"lanes": 8, "page_size": 16, "max_context": 1024, "pages": 8 * 64}


def open_weights(model: str, *, random: bool) -> tuple[Any, Any]:
    """Return the spec of the model and its weights."""
    if random:
        from onedraw.checkpoints.random_weights import random_weights
        from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec

        mixer = AttentionSpec(32, 8, 64, RopeSpec(500000.0, 64), scale=64**-0.5)
        layers = (LayerSpec(mixer, MlpSpec(8192)),) * 16
        spec = ModelSpec("llama", layers, hidden=2048, vocab=128256, eps=1e-5, tied=True, max_context=131072)
        return spec, random_weights(spec)
    from onedraw.checkpoints.download import resolve_model
    from onedraw.checkpoints.open import open_checkpoint
    from onedraw.models.registry import read_model_info
    from onedraw.settings import default_cache_dir

    info = read_model_info(open_checkpoint(resolve_model(model, default_cache_dir())))
    return info.spec, info.weights


def make_backend(side: str, spec: Any, weights: Any, *, device: str, compiled: Path) -> Any:
    dtype = "bf16" if device == "cuda" else "f32"
    if side == "xla":
        from onedraw.backends.xla.backend import XlaBackend, XlaStageDevice
        from onedraw.backends.xla.platform import find_devices, keep_compiled

        keep_compiled(compiled)
        _, [found] = find_devices(device, ["auto"])
        backend = XlaBackend(spec, weights, dtype=dtype, stage_devices=[XlaStageDevice(found)], step_tokens=512, **SIZES)
        assert backend.report is not None
        print(f"self-check: {[(f.check, f.passed) for f in backend.report.results]}", file=sys.stderr)
        return backend
    from onedraw.backends.torch.backend import TorchBackend
    from onedraw.backends.torch.device import pick_ops, set_threads
    from onedraw.settings import default_cache_dir

    name = "cuda:0" if device == "cuda" else "cpu"
    ops = pick_ops(name, dtype, cache=default_cache_dir())
    set_threads(None, [ops])
    return TorchBackend(spec, weights, dtype=dtype, device=name, ops=ops, check=False, **SIZES)


class Driver:
    """Runs requests through an engine with the given backend."""

    def __init__(self, backend: Any) -> None:
        from onedraw.engine.engine import Engine
        from onedraw.engine.scheduler import Scheduler
        from onedraw.memory.allocator import Allocator
        from onedraw.speculation.speculator import Speculator

        allocator = Allocator(backend.capacity, reuse=False)
        scheduler = Scheduler(allocator=allocator, capacity=backend.capacity, speculator=Speculator([]), step_tokens=512)
        self.engine = Engine(backend=backend, scheduler=scheduler)
        self.count = 0

    def run(self, prompts: list[tuple[int, ...]], params: list[Any]) -> tuple[list[list[Any]], float, float]:
        """Return the sampled tokens per request, the seconds until all have one, and the seconds after that."""
        from onedraw.types import Request

        def extend(sampled: list[Any], event: Any) -> None:
            sampled.extend(event.sampled)

        found: list[list[Any]] = [[] for _ in prompts]
        for prompt, own_params, sampled in zip(prompts, params, found, strict=True):
            self.count += 1
            request = Request(f"b{self.count}", prompt, own_params)
            self.engine.add(request, partial(extend, sampled))
        begin = time.perf_counter()
        while not all(found):
            self.engine.step()
        middle = time.perf_counter()
        while self.engine.busy:
            self.engine.step()
        return found, middle - begin, time.perf_counter() - middle


def measure(side: str, model: str, *, random: bool, device: str, new_tokens: int, compiled: Path) -> dict[str, Any]:
    from onedraw.types import SamplingParams

    spec, weights = open_weights(model, random=random)
    begin = time.perf_counter()
    driver = Driver(make_backend(side, spec, weights, device=device, compiled=compiled))
    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens)
    driver.run([PROMPT[:32]], [replace(greedy, max_tokens=2)])
    found: dict[str, Any] = {"open": time.perf_counter() - begin}

    def prompts(count: int) -> list[tuple[int, ...]]:
        return [PROMPT[i : i + 32] for i in range(count)]

    def decode(count: int, params: Any) -> float:
        _, _, seconds = driver.run(prompts(count), [replace(params, seed=i) for i in range(count)])
        return count * (new_tokens - 1) / seconds

    driver.run([PROMPT], [replace(greedy, max_tokens=1)])
    found["prefill"] = len(PROMPT) / min(driver.run([PROMPT], [replace(greedy, max_tokens=1)])[1] for _ in range(2))
    found["decode 1"] = max(decode(1, greedy) for _ in range(2))
    found["decode 8"] = max(decode(8, greedy) for _ in range(2))
    sampled = replace(greedy, temperature=1.0, min_p=0.05)
    found["decode 8 sampled"] = max(decode(8, sampled) for _ in range(2))
    found["decode 8 sampled, top-p"] = decode(8, replace(sampled, top_p=0.95))
    checked = [replace(sampled, seed=i, checksums=True, max_tokens=6) for i in range(6)]
    together, _, _ = driver.run(prompts(6), checked)
    alone = [driver.run([prompt], [params])[0][0] for prompt, params in zip(prompts(6), checked, strict=True)]
    found["alone = batched"] = together == alone
    return found


def measure_in_subprocess(side: str, options: argparse.Namespace, compiled: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.xla_against_torch", options.model, "--side", side, "--device", options.device]
    command += ["--new-tokens", str(options.new_tokens), "--compiled", str(compiled), *["--random-1b"] * options.random_1b]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    print(done.stderr.strip()[-400:], file=sys.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both backends alternately and return the best of every figure."""
    found: dict[str, dict[str, Any]] = {"xla": {}, "torch": {}}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for side in ("xla", "torch"):
                one = measure_in_subprocess(side, options, Path(folder))
                one["open, compiling" if side == "xla" and not repeat else "open"] = one.pop("open")
                for name, value in one.items():
                    pick = min if name.startswith(("open", "alone")) else max
                    found[side][name] = pick(found[side].get(name, value), value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--random-1b", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=["xla", "torch"], help=argparse.SUPPRESS)
    parser.add_argument("--compiled", type=Path, default=Path("."), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        arguments: dict[str, Any] = {"random": options.random_1b, "device": options.device, "compiled": options.compiled}
        print(json.dumps(measure(options.side, options.model, new_tokens=options.new_tokens, **arguments)))
        return
    found = compare(options)
    if options.json:
        print(json.dumps(found))
        return
    names = list(dict.fromkeys([*found["xla"], *found["torch"]]))
    print(f"{'':26}{'xla':>12}{'torch':>12}   tokens/s; open in seconds")
    for name in names:
        cells = (found[side].get(name, "") for side in ("xla", "torch"))
        print(f"{name:26}" + "".join(f"{cell:12.1f}" if isinstance(cell, float) else f"{cell!s:>12}" for cell in cells))


if __name__ == "__main__":
    main()

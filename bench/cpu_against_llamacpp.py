"""The CPU against llama.cpp, and against `transformers` in float32: one file, one machine, as many threads on every side.

    python -m bench.cpu_against_llamacpp [MODEL] [--threads 2] [--repeats 3] [--llama-python PYTHON]
                                           [--path avx2] [--json]

llama.cpp comes as `llama-cpp-python` (extra `peers`), in this environment or in the one whose interpreter `--llama-python`
names. The sides take turns, each in a process of its own; the best of the repeats counts, on both sides, since whatever else
a machine does only ever adds time. Asked for: decode at 1 >= 1.0 x llama.cpp; a prompt of 512 >= 2 x llama.cpp and >= 0.8 x
transformers; 8 requests at once >= 2.5 x one; a row of 8 drafts <= 2.5 x a row of one token; opened within 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = tuple((7 * i) % 4000 + 100 for i in range(512))
BEFORE = 64  # tokens of the prompt before decoding
HIGHER_IS_BETTER = {"decode", "decode 8", "prefill"}


def best(work: Any, times: int) -> float:
    """Seconds of the fastest of several."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def measure_ours(path: str, *, threads: int, new_tokens: int) -> dict[str, Any]:
    from bench.cpu_decode import ours
    from onedraw.backends.torch import backend as imported  # noqa: F401  imports are not part of opening a model
    from onedraw.build.llm import build_llm
    from onedraw.llm.request_options import RequestOptions, make_generation
    from onedraw.settings import Settings

    begin = time.perf_counter()
    settings = Settings(model=path, device="cpu", threads=threads, max_context=1024, draft=("none",), prefix_cache=False)
    llm = build_llm(settings)
    opened = time.perf_counter() - begin
    ours(llm, count=1, new_tokens=4)
    request_options = RequestOptions(temperature=0.0, max_tokens=1, ignore_eos=True, seed=1)
    prefill = best(lambda: llm.run(make_generation(request_options, llm=llm, prompt=PROMPT)), 3)
    found: dict[str, Any] = {
        "open": opened,
        "prefill": len(PROMPT) / prefill,
        "decode": max(ours(llm, count=1, new_tokens=new_tokens) for _ in range(2)),
        "decode 8": max(ours(llm, count=8, new_tokens=new_tokens) for _ in range(2)),
        "fingerprint": llm.card.fingerprint,
    }
    llm.close()
    return {**found, **measure_rows(path, threads=threads)}


def measure_rows(path: str, *, threads: int) -> dict[str, float]:
    """Seconds of one turn with a row of one token, and with one of a token and seven drafts."""
    from onedraw.backends.torch.backend import TorchBackend
    from onedraw.backends.torch.device import pick_ops, set_threads
    from onedraw.checkpoints.open import open_checkpoint
    from onedraw.models.registry import read_model_info
    from onedraw.settings import default_cache_dir
    from onedraw.types import Draft, History, Plan, Row, SamplingParams

    info = read_model_info(open_checkpoint(path))
    ops = pick_ops("cpu", "packed", cache=default_cache_dir(), threads=threads)
    set_threads(threads, [ops])
    sizes = {"lanes": 1, "pages": 16, "page_size": 16, "max_context": 256, "check": False}
    backend = TorchBackend(info.spec, info.weights, dtype="packed", device="cpu", ops=ops, **sizes)
    history, params = History(PROMPT[: BEFORE + 1]), SamplingParams(temperature=0.0)

    def turn(drafts: int) -> None:
        guessed = tuple(Draft(PROMPT[BEFORE + 1 + i], i - 1) for i in range(drafts))
        row = Row("one", 0, (tuple(range(16)),), BEFORE, PROMPT[BEFORE : BEFORE + 1], guessed, BEFORE + 1, True, params, history)
        backend.collect(backend.submit(Plan((row,))))

    return {"row of 1": best(lambda: turn(0), 40), "row of 8": best(lambda: turn(7), 40)}


def measure_llama(path: str, *, threads: int, new_tokens: int) -> dict[str, Any]:
    import llama_cpp

    begin = time.perf_counter()
    model = llama_cpp.Llama(path, n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    opened = time.perf_counter() - begin

    def prompt(tokens: int) -> None:
        model.reset()
        model.eval(list(PROMPT[:tokens]))

    def decode() -> float:
        prompt(BEFORE)
        token = int(model.sample(temp=0.0))
        begin = time.perf_counter()
        for _ in range(new_tokens):
            model.eval([token])
            token = int(model.sample(temp=0.0))
        return new_tokens / (time.perf_counter() - begin)

    prefill = best(lambda: prompt(len(PROMPT)), 3)
    return {
        "open": opened,
        "prefill": len(PROMPT) / prefill,
        "decode": max(decode() for _ in range(2)),
        "fingerprint": f"llama-cpp-python {llama_cpp.__version__}",
    }


def measure_transformers(path: str, *, threads: int, new_tokens: int) -> dict[str, Any]:
    import torch
    import transformers

    from bench.cpu_decode import theirs
    from bench.peer import llama_in_transformers

    torch.set_num_threads(threads)
    begin = time.perf_counter()
    model = llama_in_transformers(Path(path))
    opened = time.perf_counter() - begin
    theirs(model, new_tokens=4)
    with torch.inference_mode():
        prefill = best(lambda: model(torch.tensor([PROMPT]), use_cache=True, logits_to_keep=1), 3)
    return {
        "open": opened,
        "prefill": len(PROMPT) / prefill,
        "decode": theirs(model, new_tokens=new_tokens),
        "fingerprint": f"transformers {transformers.__version__} f32",
    }


SIDES = {"ours": measure_ours, "llama": measure_llama, "transformers": measure_transformers}


def in_a_process(side: str, path: str, options: argparse.Namespace) -> dict[str, Any]:
    python = options.llama_python if side == "llama" else sys.executable
    own = ["--side", side, "--threads", str(options.threads), "--new-tokens", str(options.new_tokens)]
    own += ["--path", options.path] if options.path and side == "ours" else []
    done = subprocess.run([python, __file__, path, *own], capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise SystemExit(f"{side}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def combined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of several runs, figure by figure."""
    return {name: _better(name, [run[name] for run in runs]) for name in runs[0]}


def _better(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], str):
        return values[0]
    return max(values) if name in HIGHER_IS_BETTER else min(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--path", choices=("avx512", "avx2", "portable"), help="our kernels for a lesser processor than this one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.path:
        from onedraw.backends.torch.ops.cpu import library

        setattr(library, "instruction_sets", lambda: {options.path: ()})  # noqa: B010
    if options.side:
        print(json.dumps(SIDES[options.side](options.model, threads=options.threads, new_tokens=options.new_tokens)))
        return
    from onedraw.checkpoints.download import resolve_model
    from onedraw.settings import default_cache_dir

    path = str(resolve_model(options.model, default_cache_dir()))
    load = os.getloadavg()[0]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(options.repeats):
        for side in SIDES:
            runs[side].append(in_a_process(side, path, options))
    ours, llama, peer = (combined(runs[side]) for side in SIDES)
    ratios = {
        "prefill to transformers": ours["prefill"] / peer["prefill"],
        "decode": ours["decode"] / llama["decode"],
        "prefill": ours["prefill"] / llama["prefill"],
        "8 at once to one": ours["decode 8"] / ours["decode"],
        "row of 8 to row of 1": ours["row of 8"] / ours["row of 1"],
    }
    if options.json:
        print(
            json.dumps(
                {"load": load, "ours": ours, "llama": llama, "transformers": peer, "ratios": ratios, "runs": runs}, indent=2
            )
        )
        return
    print(f"load {load:.1f}, {options.threads} threads, best of {options.repeats}")
    print(*(side["fingerprint"] for side in (ours, llama, peer)), sep="\n")
    for name in ("decode", "prefill"):
        others = f"llama.cpp {llama[name]:7.1f}: {ratios[name]:.2f} x, transformers {peer[name]:7.1f}"
        print(f"{name:8s} {ours[name]:7.1f} tok/s, {others}")
    print(f"8 at once {ours['decode 8']:.1f} tok/s: {ratios['8 at once to one']:.2f} x one")
    rows = ratios["row of 8 to row of 1"]
    print(f"a row of 8 {ours['row of 8'] * 1e3:.2f} ms, of 1 {ours['row of 1'] * 1e3:.2f} ms: {rows:.2f} x")
    print(f"opened in {ours['open']:.2f} s, llama.cpp {llama['open']:.2f} s")


if __name__ == "__main__":
    main()

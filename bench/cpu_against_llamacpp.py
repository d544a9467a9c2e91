"""Compare decode and prefill speed on a CPU with llama.cpp and with `transformers` in float32: one file, the same thread count.

    python -m bench.cpu_against_llamacpp [MODEL] [--threads 2] [--repeats 3] [--llama-python PYTHON]
                                           [--path avx2] [--systems onedraw,llama.cpp] [--no-prompts]
                                           [--context 512,2048,7600] [--json]

llama.cpp is used through `llama-cpp-python` (extra `peers`), in this environment or in that of the interpreter --llama-python.
The systems are measured alternately, each in its own process. The best of the repeats counts for all of them, because other load
on the machine can only add time. Targets: decode of one request at least 1.0 x llama.cpp; a prompt of 512 tokens at least
2 x llama.cpp and 0.8 x transformers; 8 concurrent requests at least 2.5 x one; a step with a row of 8 tokens at most 2.5 x a step
with a row of one token; the model opened within 0.5 s.

With --context only prompts of these lengths, and decode after each, are measured against llama.cpp. Targets: decode at least
1.3 x llama.cpp at every length, the longest prompt at least 2.5 x.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPT = tuple((7 * i) % 4000 + 100 for i in range(512))
CONTEXT_TOKENS = 64  # prompt tokens before decoding starts
HIGHER_IS_BETTER = {"decode", "decode 8", "prefill"}


def best(work: Any, times: int) -> float:
    """Return the shortest of several runs in seconds."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def measure_onedraw(path: str, *, threads: int, new_tokens: int, prompts: bool) -> dict[str, Any]:
    from bench.cpu_decode import onedraw_decode
    from onedraw.backends.torch import backend as imported  # noqa: F401  so that importing it is not timed
    from onedraw.build.llm import build_llm
    from onedraw.llm.request_options import RequestOptions, make_generation
    from onedraw.settings import Settings

    begin = time.perf_counter()
    settings = Settings(model=path, device="cpu", threads=threads, max_context=1024, draft=("none",), prefix_cache=False)
    llm = build_llm(settings)
    opened = time.perf_counter() - begin
    onedraw_decode(llm, count=1, new_tokens=4)
    request_options = RequestOptions(temperature=0.0, max_tokens=1, ignore_eos=True, seed=1)
    prefill = best(lambda: llm.run(make_generation(request_options, llm=llm, prompt=PROMPT)), 3) if prompts else math.inf
    found: dict[str, Any] = {
        "open": opened,
        "prefill": len(PROMPT) / prefill,
        "decode": max(onedraw_decode(llm, count=1, new_tokens=new_tokens) for _ in range(2)),
        "decode 8": max(onedraw_decode(llm, count=8, new_tokens=new_tokens) for _ in range(2)),
        "fingerprint": llm.card.fingerprint,
    }
    llm.close()
    return {**found, **measure_rows(path, threads=threads)}


def measure_rows(path: str, *, threads: int) -> dict[str, float]:
    """Time a step with a row of one token, and a step with a row of one token and seven drafts, in seconds."""
    from onedraw.backends.torch.backend import TorchBackend
    from onedraw.backends.torch.device import pick_ops, set_threads
    from onedraw.checkpoints.open import open_checkpoint
    from onedraw.models.registry import read_model_info
    from onedraw.settings import default_cache_dir
    from onedraw.types import Draft, History, Plan, Row, SamplingParams

    info = read_model_info(open_checkpoint(path))
    ops = pick_ops("cpu", "packed", cache=default_cache_dir(), threads=threads)
    set_threads(threads, [ops])
    sizes: dict[str, Any] = {"lanes": 1, "pages": 16, "page_size": 16, "max_context": 256, "check": False}
    backend = TorchBackend(info.spec, info.weights, dtype="packed", device="cpu", ops=ops, **sizes)
    history, params = History(PROMPT[: CONTEXT_TOKENS + 1]), SamplingParams(temperature=0.0)

    def step(drafts: int) -> None:
        draft_tokens = tuple(Draft(PROMPT[CONTEXT_TOKENS + 1 + i], i - 1) for i in range(drafts))
        row = Row(
            "one",
            0,
            (tuple(range(16)),),
            CONTEXT_TOKENS,
            PROMPT[CONTEXT_TOKENS : CONTEXT_TOKENS + 1],
            draft_tokens,
            CONTEXT_TOKENS + 1,
            True,
            params,
            history,
        )
        backend.collect(backend.submit(Plan((row,))))

    return {"row of 1": best(lambda: step(0), 40), "row of 8": best(lambda: step(7), 40)}


def measure_llamacpp(path: str, *, threads: int, new_tokens: int, prompts: bool) -> dict[str, Any]:
    import llama_cpp

    begin = time.perf_counter()
    model = llama_cpp.Llama(path, n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    opened = time.perf_counter() - begin

    def prompt(tokens: int) -> None:
        model.reset()
        model.eval(list(PROMPT[:tokens]))

    def decode() -> float:
        prompt(CONTEXT_TOKENS)
        token = int(model.sample(temp=0.0))
        begin = time.perf_counter()
        for _ in range(new_tokens):
            model.eval([token])
            token = int(model.sample(temp=0.0))
        return new_tokens / (time.perf_counter() - begin)

    prefill = best(lambda: prompt(len(PROMPT)), 3) if prompts else math.inf
    return {
        "open": opened,
        "prefill": len(PROMPT) / prefill,
        "decode": max(decode() for _ in range(2)),
        "fingerprint": f"llama-cpp-python {llama_cpp.__version__}",
    }


def long_prompt(tokens: int) -> tuple[int, ...]:
    return tuple((7 * i) % 4000 + 100 for i in range(tokens))


def onedraw_contexts(path: str, *, threads: int, new_tokens: int, contexts: Sequence[int], kv_dtype: str) -> dict[str, Any]:
    """Return tokens per second of each prompt, and of decode after it."""
    from onedraw.build.llm import build_llm
    from onedraw.llm.request_options import RequestOptions, make_generation
    from onedraw.settings import Settings

    length = max(contexts) + new_tokens + 1
    kept: dict[str, Any] = {"max_context": length, "draft": ("none",), "prefix_cache": False, "kv_dtype": kv_dtype}
    llm = build_llm(Settings(model=path, device="cpu", threads=threads, max_batch=1, **kept))
    request_options = RequestOptions(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, seed=1)
    found: dict[str, Any] = {"fingerprint": llm.card.fingerprint}
    for context in (64, *contexts):
        stamps = [time.perf_counter()]
        for piece in llm.pieces(llm.prepare(make_generation(request_options, llm=llm, prompt=long_prompt(context)))):
            stamps += [time.perf_counter()] * len(piece.tokens)
        if context in contexts:
            found[f"prompt of {context}"] = context / (stamps[1] - stamps[0])
            found[f"decode at {context}"] = (len(stamps) - 2) / (stamps[-1] - stamps[1])
    llm.close()
    return found


def llamacpp_contexts(path: str, *, threads: int, new_tokens: int, contexts: Sequence[int]) -> dict[str, Any]:
    import llama_cpp

    length = max(contexts) + new_tokens + 1
    model = llama_cpp.Llama(path, n_ctx=length, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    found: dict[str, Any] = {"fingerprint": f"llama-cpp-python {llama_cpp.__version__}"}
    for context in (64, *contexts):
        model.reset()
        stamps = [time.perf_counter()]
        model.eval(list(long_prompt(context)))
        for _ in range(new_tokens):
            token = int(model.sample(temp=0.0))
            stamps.append(time.perf_counter())
            model.eval([token])
        if context in contexts:
            found[f"prompt of {context}"] = context / (stamps[1] - stamps[0])
            found[f"decode at {context}"] = (new_tokens - 1) / (stamps[-1] - stamps[1])
    return found


def measure_contexts(system: str, path: str, options: argparse.Namespace) -> dict[str, Any]:
    common = {"threads": options.threads, "new_tokens": options.new_tokens, "contexts": options.context}
    if system == "llama.cpp":
        return llamacpp_contexts(path, **common)
    return onedraw_contexts(path, kv_dtype=options.kv_dtype, **common)


def measure_transformers(path: str, *, threads: int, new_tokens: int, prompts: bool) -> dict[str, Any]:
    import torch
    import transformers

    from bench.cpu_decode import transformers_decode
    from bench.peer import llama_in_transformers

    torch.set_num_threads(threads)
    begin = time.perf_counter()
    model = llama_in_transformers(Path(path))
    opened = time.perf_counter() - begin
    transformers_decode(model, new_tokens=4)
    with torch.inference_mode():
        one = lambda: model(torch.tensor([PROMPT]), use_cache=True, logits_to_keep=1)  # noqa: E731
        prefill = best(one, 3) if prompts else math.inf
    return {
        "open": opened,
        "prefill": len(PROMPT) / prefill,
        "decode": transformers_decode(model, new_tokens=new_tokens),
        "fingerprint": f"transformers {transformers.__version__} f32",
    }


SYSTEMS = {"onedraw": measure_onedraw, "llama.cpp": measure_llamacpp, "transformers": measure_transformers}


def measure_in_subprocess(system: str, path: str, options: argparse.Namespace) -> dict[str, Any]:
    python = options.llama_python if system == "llama.cpp" else sys.executable
    arguments = ["--system", system, "--threads", str(options.threads), "--new-tokens", str(options.new_tokens)]
    arguments += ["--path", options.path] if options.path and system == "onedraw" else []
    arguments += ["--no-prompts"] if options.no_prompts else []
    arguments += ["--context", ",".join(map(str, options.context)), "--kv-dtype", options.kv_dtype] if options.context else []
    done = subprocess.run([python, __file__, path, *arguments], capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise SystemExit(f"{system}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def best_figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best value of every figure over several runs."""
    return {name: _better(name, [run[name] for run in runs]) for name in runs[0]}


def _better(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], str):
        return values[0]
    return max(values) if name in HIGHER_IS_BETTER or name.startswith(("prompt of", "decode at")) else min(values)


def lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def compare_contexts(path: str, options: argparse.Namespace) -> None:
    runs: dict[str, list[dict[str, Any]]] = {"onedraw": [], "llama.cpp": []}
    for _ in range(options.repeats):
        for system, found in runs.items():
            found.append(measure_in_subprocess(system, path, options))
    if options.json:
        print(json.dumps(runs, indent=2))
        return
    ours, llama = (best_figures(found) for found in runs.values())
    print(f"load {os.getloadavg()[0]:.1f}, {options.threads} threads, best of {options.repeats}")
    print(ours.pop("fingerprint"), llama.pop("fingerprint"), sep="\n")
    for name, value in ours.items():
        print(f"{name:16s} {value:7.1f} tok/s, llama.cpp {llama[name]:7.1f}: {value / llama[name]:.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama-python", default=sys.executable, help="a Python interpreter that can import llama-cpp-python")
    parser.add_argument(
        "--path", choices=("avx512", "avx2", "portable"), help="use the onedraw kernels of an older instruction set"
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which systems to measure; onedraw is one of them")
    parser.add_argument("--no-prompts", action="store_true", help="do not measure the prompt of 512 tokens")
    parser.add_argument("--context", type=lengths, default=(), metavar="N,N…", help="measure at these lengths, and nothing else")
    parser.add_argument("--kv-dtype", default="auto", help="with --context: dtype of onedraw's keys and values")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.path:
        from onedraw.backends.torch.ops.cpu import library

        setattr(library, "instruction_sets", lambda: {options.path: library.INSTRUCTION_SETS[options.path]})  # noqa: B010
    if options.system and options.context:
        print(json.dumps(measure_contexts(options.system, options.model, options)))
        return
    if options.system:
        measure = SYSTEMS[options.system]
        sizes = {"threads": options.threads, "new_tokens": options.new_tokens, "prompts": not options.no_prompts}
        print(json.dumps(measure(options.model, **sizes)))
        return
    from onedraw.checkpoints.download import resolve_model
    from onedraw.settings import default_cache_dir

    path = str(resolve_model(options.model, default_cache_dir()))
    if options.context:
        compare_contexts(path, options)
        return
    load = os.getloadavg()[0]  # a busy machine explains a bad figure
    systems = [system for system in SYSTEMS if system in options.systems.split(",")]
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for _ in range(options.repeats):
        for system in systems:
            runs[system].append(measure_in_subprocess(system, path, options))
    found = {system: best_figures(runs[system]) for system in systems}
    ours = found["onedraw"]
    names = ["decode"] if options.no_prompts else ["decode", "prefill"]
    ratios = {f"{name} / {peer}": ours[name] / found[peer][name] for name in names for peer in systems[1:]}
    ratios |= {
        "8 requests / 1 request": ours["decode 8"] / ours["decode"],
        "row of 8 / row of 1": ours["row of 8"] / ours["row of 1"],
    }
    if options.json:
        print(json.dumps({"load": load, **found, "ratios": ratios, "runs": runs}, indent=2))
        return
    print(f"load {load:.1f}, {options.threads} threads, best of {options.repeats}")
    print(*(figures["fingerprint"] for figures in found.values()), sep="\n")
    for name in names:
        others = ", ".join(f"{peer} {found[peer][name]:7.1f}: {ratios[f'{name} / {peer}']:.2f} x" for peer in systems[1:])
        print(f"{name:8s} {ours[name]:7.1f} tok/s, {others}")
    print(f"8 requests {ours['decode 8']:.1f} tok/s: {ratios['8 requests / 1 request']:.2f} x one")
    rows = ratios["row of 8 / row of 1"]
    print(f"step with a row of 8 {ours['row of 8'] * 1e3:.2f} ms, with a row of 1 {ours['row of 1'] * 1e3:.2f} ms: {rows:.2f} x")
    print("opened in " + ", ".join(f"{figures['open']:.2f} s ({system})" for system, figures in found.items()))


if __name__ == "__main__":
    main()

"""Measure the time to the first token of a long prompt after a restart, with and without a snapshot on disk.

    python -m bench.restart [MODEL] [--prompt-tokens 2048] [--device cpu] [--repeats 3] [--json]

Each round starts two processes. The first finds an empty snapshot folder, computes the whole prompt, and writes a snapshot. The
second restores this snapshot and runs the same prompt with the same seed and with another seed. The time is measured from the
request to the first token in an open LLM, after a short request that warms up. The tokens of both processes must be equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEW_TOKENS = 16
TARGET = 10.0  # smallest speedup


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Open the LLM, run both requests, and close it."""
    from onedraw.build.llm import build_llm
    from onedraw.llm.request_options import RequestOptions, make_generation
    from onedraw.settings import Settings

    settings = Settings.of(
        model=options.model,
        device=options.device,
        max_context=options.prompt_tokens + 256,
        draft=("none",),
        cache_budget=8 * 2**30,
        snapshot_dir=Path(options.folder),
    )
    with build_llm(settings) as llm:
        list(llm.run(make_generation(RequestOptions(max_tokens=4, seed=1), llm=llm, prompt=tuple(range(10, 40)))))
        text = "The keeper wrote the weather into a book with a blue cover: wind, swell, visibility, and the ships. "
        words = llm.encode(" ".join(f"Day {day}. {text}" for day in range(options.prompt_tokens // 10)))
        prompt = tuple(words[: options.prompt_tokens])
        assert len(prompt) == options.prompt_tokens
        found: dict[str, Any] = {"prompt_tokens": len(prompt)}
        for name, seed in (("first", 7), ("another_seed", 8)):
            request = RequestOptions(temperature=0.7, max_tokens=NEW_TOKENS, seed=seed, ignore_eos=True, checksums=True)
            generation = make_generation(request, llm=llm, prompt=prompt)
            choices: list[Any] = []
            begin, seconds = time.perf_counter(), None
            for piece in llm.pieces(llm.prepare(generation)):
                if piece.tokens and seconds is None:
                    seconds = time.perf_counter() - begin
                choices += [(choice.token, choice.checksum) for choice in piece.tokens]
            found[name] = {"first_token_ms": 1000 * (seconds or 0.0), "choices": choices}
        found["restored"] = llm.service.stats().snapshots_restored
        found["device"], found["dtype"] = llm.card.device, llm.card.dtype
    return found  # the snapshots are written, since the LLM is closed


def measure_in_subprocess(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.restart", options.model, "--folder", folder, "--device", options.device]
    done = subprocess.run([*command, "--prompt-tokens", str(options.prompt_tokens)], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_rounds(options: argparse.Namespace) -> dict[str, Any]:
    cold, restored, same = [], [], True
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="onedraw-restart-") as folder:
            before, after = measure_in_subprocess(options, folder), measure_in_subprocess(options, folder)
        if before["restored"] or not after["restored"]:
            raise RuntimeError("the first process must not restore a snapshot, and the second must restore one")
        cold.append(before["first"]["first_token_ms"])
        restored.append(after["first"]["first_token_ms"])
        same = same and all(before[name]["choices"] == after[name]["choices"] for name in ("first", "another_seed"))
    return {
        "model": options.model,
        "device": after["device"],
        "dtype": after["dtype"],
        "prompt_tokens": after["prompt_tokens"],
        "cold_ms": cold,
        "restored_ms": restored,
        "speedup": min(cold) / min(restored),
        "same": same,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.folder is not None:
        print(json.dumps(measure(options)))
        return 0
    found = run_rounds(options)
    if options.json:
        print(json.dumps(found))
    else:
        times = ", ".join(f"{ms:.0f}" for ms in found["cold_ms"]), ", ".join(f"{ms:.1f}" for ms in found["restored_ms"])
        print(f"{found['model']} on {found['device']}, {found['dtype']}, {found['prompt_tokens']} prompt tokens")
        print(f"first token: cold {times[0]} ms, after a restart {times[1]} ms: {found['speedup']:.1f} x faster")
        print("tokens and checksums: the same" if found["same"] else "tokens or checksums DIFFER")
    return 0 if found["same"] and found["speedup"] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())

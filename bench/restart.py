"""How soon a long prompt's first token comes after a restart, from a snapshot on disk, and how soon without one.

    python -m bench.restart [MODEL] [--prompt-tokens 2048] [--device cpu] [--repeats 3] [--json]

Each life is a process of its own. The first of every round finds an empty folder: its first token is cold, and it leaves a
snapshot. The second finds that: same prompt, same seed, and another seed beside it. Measured is the time from asking to the
first token, with a loaded LLM; a shorter request warms each life up first. The tokens of both lives must be equal.
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
RULE = 10.0  # times sooner


def live(given: argparse.Namespace) -> dict[str, Any]:
    """One life: open, ask, close."""
    from onedraw.build.llm import build_llm
    from onedraw.llm.request_options import RequestOptions, make_generation
    from onedraw.settings import Settings

    settings = Settings.of(
        model=given.model,
        device=given.device,
        max_context=given.prompt_tokens + 256,
        draft=("none",),
        cache_budget=8 * 2**30,
        snapshot_dir=Path(given.folder),
    )
    with build_llm(settings) as llm:
        list(llm.run(make_generation(RequestOptions(max_tokens=4, seed=1), llm=llm, prompt=tuple(range(10, 40)))))
        text = "The keeper wrote the weather into a book with a blue cover: wind, swell, visibility, and the ships. "
        words = llm.encode(" ".join(f"Day {day}. {text}" for day in range(given.prompt_tokens // 10)))
        prompt = tuple(words[: given.prompt_tokens])
        assert len(prompt) == given.prompt_tokens
        found: dict[str, Any] = {"prompt_tokens": len(prompt)}
        for name, seed in (("first", 7), ("another_seed", 8)):
            options = RequestOptions(temperature=0.7, max_tokens=NEW_TOKENS, seed=seed, ignore_eos=True, checksums=True)
            generation = make_generation(options, llm=llm, prompt=prompt)
            choices: list[Any] = []
            begin, seconds = time.perf_counter(), None
            for piece in llm.pieces(llm.prepare(generation)):
                if piece.tokens and seconds is None:
                    seconds = time.perf_counter() - begin
                choices += [(choice.token, choice.checksum) for choice in piece.tokens]
            found[name] = {"first_token_ms": 1000 * (seconds or 0.0), "choices": choices}
        found["restored"] = llm.service.stats().snapshots_restored
        found["device"], found["dtype"] = llm.card.device, llm.card.dtype
    return found  # the LLM is closed: its snapshots are written


def life(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.restart", given.model, "--folder", folder, "--device", given.device]
    done = subprocess.run([*command, "--prompt-tokens", str(given.prompt_tokens)], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rounds(given: argparse.Namespace) -> dict[str, Any]:
    cold, restored, same = [], [], True
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory(prefix="onedraw-restart-") as folder:
            before, after = life(given, folder), life(given, folder)
        if before["restored"] or not after["restored"]:
            raise RuntimeError("the first life is to be cold, and the second to find its snapshot")
        cold.append(before["first"]["first_token_ms"])
        restored.append(after["first"]["first_token_ms"])
        same = same and all(before[name]["choices"] == after[name]["choices"] for name in ("first", "another_seed"))
    return {
        "model": given.model,
        "device": after["device"],
        "dtype": after["dtype"],
        "prompt_tokens": after["prompt_tokens"],
        "cold_ms": cold,
        "restored_ms": restored,
        "times_sooner": min(cold) / min(restored),
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
    given = parser.parse_args(arguments)
    if given.folder is not None:
        print(json.dumps(live(given)))
        return 0
    found = rounds(given)
    if given.json:
        print(json.dumps(found))
    else:
        times = ", ".join(f"{ms:.0f}" for ms in found["cold_ms"]), ", ".join(f"{ms:.1f}" for ms in found["restored_ms"])
        print(f"{found['model']} on {found['device']}, {found['dtype']}, {found['prompt_tokens']} prompt tokens")
        print(f"first token: cold {times[0]} ms, after a restart {times[1]} ms: {found['times_sooner']:.1f} times sooner")
        print("tokens and checksums: the same" if found["same"] else "tokens or checksums DIFFER")
    return 0 if found["same"] and found["times_sooner"] >= RULE else 1


if __name__ == "__main__":
    sys.exit(main())

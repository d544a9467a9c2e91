"""`onedraw completion`: the script, run by bash."""

from __future__ import annotations

import subprocess

import pytest

from onedraw.cli.completion import script


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (("onedraw", "ser"), ["serve"]),
        (("onedraw", "serve", "--max-c"), ["--max-context"]),
        (("onedraw", "run", "qwen3-0"), ["qwen3-0.6b"]),
        (("onedraw", "help", "ins"), ["inspect"]),
        (("onedraw", "nothing", ""), []),
    ],
)
def test_bash_completes_commands_options_and_models(typed: tuple[str, ...], found: list[str]) -> None:
    words = " ".join(f"'{word}'" for word in typed)
    ask = f'{script()}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _onedraw; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == found

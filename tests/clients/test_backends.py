"""The openai client against `--backend xla`, and against an export that IREE runs: both give the tokens of one seed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import openai
import pytest

from .conftest import HELLO, KEY, PATIENCE, PYTHON, ROOT, Server, running

MODEL = str(ROOT / "tests" / "fixtures" / "trained" / "trained_qwen3")


def streamed(server: Server) -> str:
    client = openai.OpenAI(base_url=server.base, api_key=KEY, timeout=PATIENCE)
    chunks = client.chat.completions.create(
        model=server.model, messages=HELLO, max_tokens=12, temperature=1, seed=11, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_xla_and_its_export_answer_the_client_alike(tmp_path: Path) -> None:
    size = ("--max-context", "256", "--max-batch", "4")
    out = str(tmp_path / "graphs")
    done = subprocess.run(
        [PYTHON, "-m", "onedraw", "export", MODEL, "--out", out, *size], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if "is not installed" in done.stderr:
        pytest.skip("jax or IREE is not installed")
    assert done.returncode == 0, done.stderr
    with running(*size, "--backend", "xla", "--draft", "none", model=(MODEL,)) as server:
        expected = streamed(server)
    with running(model=(out,)) as server:
        assert streamed(server) == expected
        client = openai.OpenAI(base_url=server.base, api_key=KEY, timeout=PATIENCE)
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs: this backend returns") as refused:
            client.completions.create(model=server.model, prompt="Once", max_tokens=1, echo=True, logprobs=1)
        assert refused.value.code == "sampling_unsupported"

"""Coding agents from npm and PyPI, as they are: each reads a file through a tool call and gives one answer, or edits a file.

The model is a checkpoint whose weights are a script (`tests/support/scripted.py`), since a random one calls no tools; the server,
the template, the tokenizer and the parser of calls are the real ones. The agents get an empty home, no telemetry, and a proxy
that leads nowhere for everything but this machine.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clients.conftest import KEY, PATIENCE, PYTHON, ROOT, Server, running

AIDER = ROOT / ".venv-aider" / "bin" / "aider"
MODULES = Path(__file__).parent / "node" / "node_modules"
PLATFORM = f"{sys.platform}-{ {'x86_64': 'x64', 'aarch64': 'arm64'}.get(platform.machine(), platform.machine()) }"
SECRET, ANSWER = "the secret word is heron", "The note was read."


@pytest.fixture
def note(tmp_path: Path) -> Path:
    found = tmp_path / "work" / "note.txt"
    found.parent.mkdir()
    found.write_text(SECRET + "\n")
    return found


@contextmanager
def scripted(folder: Path, tool: str, arguments: Mapping[str, str], *, answer: str = ANSWER) -> Iterator[Server]:
    """A server whose model calls this tool, and answers once it has the result; at once where no tools are offered."""
    command = [PYTHON, "-m", "tests.support.scripted", str(folder), tool, json.dumps(arguments), answer]
    subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE)
    with running("--max-context", "65536", model=(str(folder),)) as server:
        yield server


def run(program: Path, arguments: Sequence[str], *, work: Path, **environment: str) -> str:
    """What the program prints. It is started in `work`, with a home of its own."""
    if not program.exists():
        pytest.skip(f"{program.name} is not installed: make test-clients installs the npm packages, make test-long aider")
    starter = [shutil.which("node") or "node"] if program.suffix == ".js" else []
    home = work.parent / "home"
    home.mkdir(exist_ok=True)
    nowhere = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"}
    known = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(work.parent), "TERM": "dumb", **nowhere, **environment}
    done = subprocess.run(
        [*starter, str(program), *arguments],
        cwd=work,
        env=known,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_claude_code_reads_a_file_and_answers(tmp_path: Path, note: Path) -> None:
    program = MODULES / "@anthropic-ai" / f"claude-code-{PLATFORM}" / "claude"
    with scripted(tmp_path / "model", "Read", {"file_path": str(note)}) as server:
        said = run(
            program,
            ["-p", "Read the note.", "--output-format", "stream-json", "--verbose"],
            work=note.parent,
            ANTHROPIC_BASE_URL=server.url,
            ANTHROPIC_AUTH_TOKEN=KEY,
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_AUTOUPDATER="1",
            DISABLE_TELEMETRY="1",
            DISABLE_ERROR_REPORTING="1",
        )
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    (result,) = (event for event in events if event["type"] == "result")
    assert (result["is_error"], result["result"], result["num_turns"]) == (False, ANSWER, 2)
    results = [event["message"]["content"] for event in events if event["type"] == "user"]
    assert SECRET in json.dumps(results)


@pytest.mark.parametrize("model", ["gpt-5.5", "my-model"], ids=["known", "unknown"])
def test_codex_runs_a_command_and_answers(tmp_path: Path, note: Path, model: str) -> None:
    home = tmp_path / "home" / ".codex"
    home.mkdir(parents=True)
    with scripted(tmp_path / "model", "exec_command", {"cmd": "cat note.txt"}) as server:
        (home / "config.toml").write_text(
            f'model = "{model}"\nmodel_provider = "onedraw"\ncheck_for_update_on_startup = false\n'
            "[analytics]\nenabled = false\n"
            '[model_providers.onedraw]\nname = "onedraw"\nenv_key = "SERVER_KEY"\nwire_api = "responses"\n'
            f'base_url = "{server.base}"\n'
        )
        said = run(
            MODULES / "@openai" / "codex" / "bin" / "codex.js",
            ["exec", "--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "Read the note."],
            work=note.parent,
            SERVER_KEY=KEY,
        )
    items = [event["item"] for event in map(json.loads, said.splitlines()) if event["type"] == "item.completed"]
    by_type = {item["type"]: item for item in items}
    assert SECRET in by_type["command_execution"]["aggregated_output"]
    assert by_type["agent_message"]["text"] == ANSWER


def test_continue_reads_a_file_and_answers(tmp_path: Path, note: Path) -> None:
    config = {
        "name": "local",
        "version": "1.0.0",
        "schema": "v1",
        "models": [
            {
                "name": "onedraw",
                "provider": "openai",
                "model": "any-model",
                "apiKey": KEY,
                "roles": ["chat"],
                "capabilities": ["tool_use"],
            }
        ],
    }
    with scripted(tmp_path / "model", "Read", {"filepath": str(note)}) as server:
        config["models"][0]["apiBase"] = server.base  # type: ignore[index]
        (note.parent / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        said = run(
            MODULES / "@continuedev" / "cli" / "dist" / "cn.js",
            ["-p", "Read the note.", "--config", "config.yaml", "--auto"],
            work=note.parent,
            CONTINUE_CLI_ENABLE_TELEMETRY="0",
            CONTINUE_CLI_AUTO_UPDATED="1",
        )
    assert said.strip() == ANSWER
    sessions = [path.read_text() for path in (tmp_path / "home" / ".continue").rglob("*.json")]
    assert any(SECRET in session for session in sessions)


def test_opencode_reads_a_file_and_answers(tmp_path: Path, note: Path) -> None:
    with scripted(tmp_path / "model", "read", {"filePath": str(note)}) as server:
        model = {"name": "any", "tool_call": True, "limit": {"context": 65536, "output": 4096}}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "onedraw", "models": {"any-model": model}}
        provider["options"] = {"baseURL": server.base, "apiKey": KEY}
        config = {"model": "onedraw/any-model", "provider": {"onedraw": provider}, "autoupdate": False, "share": "disabled"}
        (note.parent / "opencode.json").write_text(json.dumps(config))
        said = run(
            MODULES / f"opencode-{PLATFORM}" / "bin" / "opencode",
            ["run", "Read the note.", "--format", "json"],
            work=note.parent,
            OPENCODE_DISABLE_AUTOUPDATE="1",
            OPENCODE_DISABLE_MODELS_FETCH="1",
            OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
            OPENCODE_DISABLE_LSP_DOWNLOAD="1",
        )
    parts = [event["part"] for event in map(json.loads, said.splitlines()) if event["type"] in ("tool_use", "text")]
    read, answer = parts
    assert (read["tool"], read["state"]["status"]) == ("read", "completed")
    assert SECRET in read["state"]["output"]
    assert answer["text"] == ANSWER


@pytest.mark.long  # installing it takes longer than all other clients
def test_aider_edits_a_file(tmp_path: Path, note: Path) -> None:
    """It offers no tools: it parses the new content of a file out of the answer."""
    changed = SECRET.replace("heron", "crane")
    quiet = ["--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
    with scripted(tmp_path / "model", "none", {}, answer=f"{ANSWER}\n\nnote.txt\n```\n{changed}\n```\n") as server:
        reach = ["--model", "openai/any-model", "--openai-api-base", server.base, "--openai-api-key", KEY]
        said = run(AIDER, [*reach, *quiet, "--message", "Change it.", "note.txt"], work=note.parent)
    assert ANSWER in said
    assert note.read_text() == changed + "\n"

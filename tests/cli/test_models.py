"""`onedraw list`, `rm`, `ps` and `run`: names, models on disk, running servers."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from onedraw.checkpoints.catalogue import BUILT_IN_MODELS, CATALOGUE
from onedraw.cli.ps import registered, running_servers
from tests.cli.running import Terminal


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with the built-in model, and a hub cache with one repository."""
    hub = tmp_path / "hub"
    repository = hub / "models--Qwen--Qwen3-0.6B"
    for folder in ("blobs", "refs", "snapshots/abc"):
        (repository / folder).mkdir(parents=True)
    (repository / "blobs" / "1").write_bytes(bytes(2000))
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc" / "model.safetensors").symlink_to("../../blobs/1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(hub), raising=False)
    file = tmp_path / "cache" / "smollm2" / BUILT_IN_MODELS["smollm2"].file_name
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(1000))
    return tmp_path / "cache"


def test_list_shows_the_catalogue_and_sizes_on_disk(terminal: Terminal, cache: Path) -> None:
    report = terminal.json("list", "--cache-dir", str(cache))
    assert {entry["name"] for entry in report["catalogue"]} == set(CATALOGUE)
    sizes = {entry["name"]: entry["size"] for entry in report["catalogue"] if entry["size"]}
    assert sizes == {"smollm2": 1000, "qwen3-0.6b": 2000}
    assert [model["name"] for model in report["installed"]] == ["qwen3-0.6b", "smollm2"]
    assert terminal.run("list", "--cache-dir", str(cache)) == 0
    assert "1000 B" in next(line for line in terminal.out.splitlines() if line.startswith("smollm2 "))


def test_rm_removes_a_model_by_either_name_and_only_what_was_downloaded(terminal: Terminal, cache: Path, tmp_path: Path) -> None:
    for name in ("smollm2", "Qwen/Qwen3-0.6B"):
        assert terminal.run("rm", name, "--cache-dir", str(cache)) == 0
        assert terminal.run("rm", name, "--cache-dir", str(cache)) == 1
        assert "was downloaded; `onedraw list` shows those that were" in terminal.err
    assert terminal.json("list", "--cache-dir", str(cache))["installed"] == []
    assert terminal.run("rm", str(tmp_path), "--cache-dir", str(cache)) == 1
    assert tmp_path.exists()


def test_ps_lists_a_server_while_it_runs_and_forgets_a_killed_one(terminal: Terminal, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onedraw.cli.main", "serve", "fake", "--backend", "fake", "--port", "0"]
    with subprocess.Popen([*command, "--cache-dir", str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split("/v1")[0].removeprefix("curl ")
            (server,) = terminal.json("ps", "--cache-dir", str(tmp_path))["servers"]
            assert (server["pid"], server["model"], server["url"]) == (process.pid, "fake", address)
        finally:
            process.send_signal(signal.SIGKILL)
    assert terminal.json("ps", "--cache-dir", str(tmp_path))["servers"] == []
    assert list((tmp_path / "servers").iterdir()) == []


def test_a_cache_that_cannot_be_written_does_not_keep_a_server_from_running(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with registered(tmp_path / "file", model="fake"):
        assert running_servers(tmp_path / "file") == []


def test_servers_with_the_same_process_id_are_all_listed(tmp_path: Path) -> None:
    """In two containers that share the cache folder both servers are process 1: the second one waited forever for the lock on
    the file of the first."""
    where = {"device": "cpu", "url": "http://127.0.0.1:1"}
    with registered(tmp_path, model="a", **where), registered(tmp_path, model="b", **where):
        (tmp_path / "servers" / "0.json").write_text("[]")
        with (tmp_path / "servers" / "0.json").open() as damaged:  # or of another version
            fcntl.flock(damaged, fcntl.LOCK_EX)
            assert {server["model"] for server in running_servers(tmp_path)} == {"a", "b"}
        assert {server["model"] for server in running_servers(tmp_path)} == {"a", "b"}
    assert list((tmp_path / "servers").iterdir()) == []


def test_a_full_disk_does_not_keep_a_server_from_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fcntl.flock", full)
    with registered(tmp_path, model="fake"):
        assert list((tmp_path / "servers").iterdir()) == []


def test_run_is_a_chat(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/quit\n"))
    assert terminal.run("run", "fake", "--backend", "fake", "--max-tokens", "3", "--seed", "7") == 0
    assert "seed 7" in terminal.out


def test_pull_prints_json_for_scripts(terminal: Terminal, tmp_path: Path) -> None:
    assert terminal.run("pull", str(tmp_path), "--json") == 0
    assert json.loads(terminal.out) == {"name": str(tmp_path), "path": str(tmp_path)}

"""API keys with names, from a file: the name is logged, the key is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onedraw.errors import BadSetting
from onedraw.server.auth import ApiKey, ApiKeys, read_keys
from onedraw.server.config import ServerOptions
from tests.server.running import Served, fake_llm, serving, wait_until

FILE = """# who may ask
alice  sesame-of-alice

bob sesame of bob, with spaces
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


@pytest.fixture
def locked(file: Path) -> Iterator[Served]:
    with fake_llm() as llm, serving(llm, ServerOptions(api_key="plain", api_keys=read_keys(file))) as served:
        yield served


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.facts for record in caplog.records if hasattr(record, "facts")]


def test_every_key_is_accepted_and_its_name_is_logged(locked: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="onedraw.access")
    keys = {"alice": "sesame-of-alice", "bob": "sesame of bob, with spaces", "api-key": "plain"}
    for name, key in keys.items():
        assert locked.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        wait_until(lambda name=name: [facts.get("caller") for facts in logged(caplog)][-1:] == [name])
    assert locked.get("/v1/models", headers={"authorization": "Bearer sesame"}).status_code == 401
    wait_until(lambda: any(facts["status"] == 401 for facts in logged(caplog)))
    assert "caller" not in next(facts for facts in logged(caplog) if facts["status"] == 401)
    assert not any(key in caplog.text for key in list(keys.values())[:2])


def test_every_key_is_compared_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the comparison stopped at the first match, its duration would show the position of a key in the list."""
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr("onedraw.server.auth.hmac.compare_digest", compare)
    ring = ApiKeys(ApiKey(f"n{i}", "k" * (i + 1)) for i in range(5))
    assert (ring.owner(b"k"), ring.owner(b"kkkkk"), ring.owner(b"")) == ("n0", "n4", None)
    assert compared == [(32, 32)] * 15


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("alice", "keys:1 must be NAME KEY"),
        ("alice a\nali!ce b", "keys:2 must be NAME KEY"),
        ("alice a\nalice b", "the same name twice"),
        ("alice a\nbob a", "the same key twice"),
        ("# no keys\n", "contains no key"),
    ],
)
def test_an_invalid_file_is_refused_without_showing_a_key(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text.replace(" a", " topsecret"))
    path.chmod(0o600)
    with pytest.raises(BadSetting, match=f"--api-key-file: .*{complaint}") as told:
        read_keys(path)
    assert "topsecret" not in str(told.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="--api-key-file: cannot read"):
        read_keys(tmp_path / "nowhere")


def test_a_key_file_that_others_can_read_is_warned_about(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="onedraw.server")  # servers of other tests silenced the logger
    file.chmod(0o644)
    read_keys(file)
    assert "chmod 600" in caplog.text
    assert "sesame" not in caplog.text


def test_a_key_is_not_shown(file: Path) -> None:
    assert "sesame" not in repr(read_keys(file)) + repr(ServerOptions(api_keys=read_keys(file)))

"""The files of the web page are served without a key, are complete, and have security headers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from onedraw.server import page as assets
from onedraw.server.config import ServerOptions
from tests.server.running import Served, fake_llm, serving

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "onedraw" / "server" / "page"


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with fake_llm() as llm, serving(llm, ServerOptions(api_key="sesame")) as served:
        yield served


def test_every_file_is_served_without_a_key_and_with_a_content_security_policy(locked: Served) -> None:
    paths = assets.load()
    assert len(paths) == sum(1 for file in FOLDER.iterdir() if file.is_file() and file.suffix != ".py")
    for path, asset in paths.items():
        answer = locked.get(path)
        assert (answer.status_code, answer.content) == (200, asset.content)
        assert answer.headers["content-security-policy"] == assets.POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-type"].startswith(asset.media_type)
        assert locked.get(path, headers={"if-none-match": answer.headers["etag"]}).status_code == 304
    assert locked.get("/v1/models").status_code == 401


def test_only_the_files_of_the_page_are_served(fake: Served) -> None:
    for path in ("/page/", "/page/nothing.js", "/page/../assets.py", "/page/..%2fassets.py", "/page/%2e%2e/app.py", "/page"):
        assert fake.get(path).status_code == 404, path
    assert fake.post("/").status_code == 405


def test_referenced_files_exist_and_nothing_is_inline() -> None:
    known = set(assets.load())
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    named = {"/" + path for path in re.findall(r'(?:src|href)="([^"#]*)"', html)}  # relative, for a server below a path
    for file in FOLDER.glob("*.js"):
        named |= {"/page" + path for path in re.findall(r'from "\.(/[\w.]+)"', file.read_text(encoding="utf-8"))}
    assert named <= known
    assert known - named == {"/"}
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|https?://", html)


def test_the_package_data_includes_the_page() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        packed = tomllib.load(file)["tool"]["setuptools"]["package-data"]["onedraw"]
    assert "server/page/*" in packed

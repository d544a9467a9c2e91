"""The hand-written pages are true: every model family and block kind is named, and no link is broken."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from onedraw import limits
from onedraw.checkpoints.dequantize import QUANT_TYPES
from onedraw.models.registry import FAMILIES
from onedraw.server.config import ServerOptions
from onedraw.settings import Settings
from tools import memory_table

ROOT = Path(__file__).parents[1]
MODELS = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")]
SECURITY = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_architecture_page_has_a_line_for_every_package() -> None:
    packages = [file.parent.relative_to(ROOT / "onedraw").as_posix() for file in (ROOT / "onedraw").rglob("__init__.py")]
    assert [package for package in packages if package != "." and f"`{package}/`" not in ARCHITECTURE] == []


@pytest.mark.parametrize("page", ["architecture.md", "design/*.md", "glossary.md"])
def test_every_source_file_a_design_page_names_exists(page: str) -> None:
    files = [file.relative_to(ROOT).as_posix() for part in ("onedraw", "docs", "tests") for file in (ROOT / part).rglob("*.*")]
    named = [
        path
        for document in (ROOT / "docs").glob(page)
        for path in re.findall(r"`([\w/.-]+\.(?:py|c|h|cu|cuh|md))`", document.read_text(encoding="utf-8"))
    ]
    assert named or page == "glossary.md"
    assert [path for path in named if not any(f"/{file}".endswith(f"/{path}") for file in files)] == []


def test_the_long_pages_stay_short() -> None:
    """A page that nobody reads to the end is not documentation: details belong in docs/design, old figures in bench/history."""
    assert len(ARCHITECTURE.splitlines()) <= 200
    assert len((ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_page_of_models_names_every_family_and_every_kind_that_can_be_read() -> None:
    names = {name for family in FAMILIES for name in (family.architectures[0], *family.gguf)}
    assert sorted(name for name in names if f"`{name}`" not in MODELS) == []
    kinds = [kind.name for kind in QUANT_TYPES.values() if kind.unpack is not None or kind.in_gguf_package]
    assert [kind for kind in kinds if not re.search(rf"\b{kind}\b", MODELS)] == []


def test_the_memory_table_is_what_inspect_plans_and_every_set_of_devices_fits() -> None:
    assert memory_table.page(MODELS) == MODELS, "run `make docs`"
    lines = [line for line in memory_table.table() if line.startswith("| `") and line not in memory_table.HEAD]
    assert len(lines) == sum(len(devices.split(",")) for devices in memory_table.DEVICES)
    assert all("in packed" in line for line in lines)  # weights are dequantized nowhere


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}, and there is no such heading"


def anchors(page: Path) -> set[str]:
    """The headings of a page as a browser's address spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


UNITS = {"": 1, "s": 1, "MiB": 2**20}
LIMITS = [row for row in re.findall(r"^\|.*\| ([^|]+) \| `([^|]+)` \|$", SECURITY, flags=re.MULTILINE) if row[0] != "the model's"]


@pytest.mark.parametrize(("number", "names"), LIMITS, ids=[names for _, names in LIMITS])
def test_the_page_of_security_has_the_numbers_of_the_source(number: str, names: str) -> None:
    digits, _, unit = number.replace(",", "").partition(" ")
    for name in names.split("`, `"):
        found = default(name) if name.startswith("--") else constant(name)
        assert found == (None if number == "any" else float(digits) * UNITS[unit])


def test_the_page_of_security_has_every_limit() -> None:
    assert [name for name in vars(limits) if name.isupper() and f"`limits.{name}`" not in SECURITY] == []


def default(flag: str) -> object:
    """The default value of a flag of `onedraw serve`."""
    name = flag.removeprefix("--").replace("-", "_")
    return getattr(ServerOptions() if hasattr(ServerOptions, name) else Settings(), name)


def constant(path: str) -> object:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(f"onedraw.{module}"), name)

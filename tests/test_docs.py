"""The hand-written pages say what is there: the map names every module and every wall, and no link leads nowhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from onedraw.checkpoints.quants import KINDS
from onedraw.models.registry import FAMILIES

ROOT = Path(__file__).parents[1]
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MODELS = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "bench" / "RESULTS.md"]


def modules() -> list[str]:
    """Every source file below onedraw/ but the packages' own, as the map writes it."""
    house = ROOT / "onedraw"
    files = [*house.rglob("*.py"), *house.rglob("*.c")]
    return sorted(file.relative_to(house).as_posix() for file in files if file.name != "__init__.py")


def test_the_map_names_every_module() -> None:
    missing = [module for module in modules() if f"`{module}`" not in MAP]
    assert not missing, "give each of these a line under Rooms in docs/architecture.md"


def test_the_map_names_no_module_that_is_not_there() -> None:
    """A path may be shortened where its room is clear: `kernels/cpu.c`."""
    known = [file.relative_to(ROOT).as_posix() for part in ("onedraw", "docs", "tests") for file in (ROOT / part).rglob("*.*")]
    named = re.findall(r"`([\w/.-]+\.(?:py|c|md))`", MAP)
    assert named
    strays = [path for path in named if not any(f"/{file}".endswith(f"/{path}") for file in known)]
    assert not strays


def test_the_map_names_every_wall_as_it_is_held() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    assert contracts
    assert [contract["name"] for contract in contracts if f"| {contract['name']} |" not in MAP] == []


def test_the_page_of_models_names_every_family_and_every_kind_that_can_be_read() -> None:
    names = {name for family in FAMILIES for name in (family.architectures[0], *family.gguf)}
    assert sorted(name for name in names if f"`{name}`" not in MODELS) == []
    kinds = [kind.name for kind in KINDS.values() if kind.unpack is not None or kind.elsewhere]
    assert [kind for kind in kinds if not re.search(rf"\b{kind}\b", MODELS)] == []


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

"""The hand-written pages are true: every model family and block kind is named, and no link is broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onedraw.checkpoints.quants import KINDS
from onedraw.models.registry import FAMILIES

ROOT = Path(__file__).parents[1]
MODELS = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "bench" / "RESULTS.md"]


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

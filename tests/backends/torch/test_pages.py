"""Stored pages are read back to any free pages, consecutive or not."""

from __future__ import annotations

import pytest
import torch

from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.models.spec import AttentionSpec, RopeSpec

SPEC = AttentionSpec(heads=4, kv_heads=2, head_dim=8, rope=RopeSpec(1e4, 8), scale=1.0)


def store() -> PageStore:
    return PageStore(SPEC, pages=12, page_size=4, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "new_pages",
    [{0: 3, 1: 4, 2: 5}, {0: 5, 1: 4, 2: 3}, {1: 0, 2: 1, 4: 2, 5: 9, 6: 10}, {6: 11}, {}],
    ids=["neighbours", "turned round", "with gaps", "one", "none"],
)
def test_every_page_is_read_back_to_its_new_page_and_no_other_page_changes(new_pages: dict[int, int]) -> None:
    torch.manual_seed(0)
    keys, values, pages = torch.randn(7, 2, 32), torch.randn(7, 2, 32), store()
    pages.fill(new_pages, {"keys": keys, "values": values})
    for stored_pages, content in ((pages.keys, keys), (pages.values, values)):
        paged, expected = stored_pages.view(-1, 2, 32), torch.zeros(13, 2, 32)
        for stored, page in new_pages.items():
            expected[page] = content[stored]
        assert torch.equal(paged, expected)


def test_pages_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of"):
        store().fill({0: 0}, dict.fromkeys(("keys", "values"), torch.zeros(1, 2, 16)))

from __future__ import annotations

import pytest

from tests.cli.running import Terminal


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)

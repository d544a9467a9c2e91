"""Onedraw: an LLM server in which speed never changes the answer.

import onedraw

with onedraw.load("smollm2") as model:
    print(model.generate("The capital of France is", max_tokens=8, temperature=0).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onedraw.api import Model, load

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """`load` and `Model` come from `onedraw.api` on first use, so that `import onedraw` stays light."""
    if name in ("load", "Model"):
        from onedraw import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

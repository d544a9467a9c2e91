"""Onedraw: an LLM server in which speed never changes the answer.

import onedraw

with onedraw.load("smollm2") as model:
    print(model.generate("The capital of France is", max_tokens=8, temperature=0).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onedraw.api import load, send_weights, torch_forward
    from onedraw.llm.llm import LLM

    Model = LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Model", "__version__", "load", "send_weights", "torch_forward"]


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that `import onedraw` stays fast. `Model` is the former name of `LLM`."""
    if name in ("load", "send_weights", "torch_forward"):
        from onedraw import api

        return getattr(api, name)
    if name in ("LLM", "Model"):
        from onedraw.llm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

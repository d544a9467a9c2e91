"""The requests a model is proved with: prompts of differing length, some that begin alike, under differing laws.

In: an open door. Out: asks, each with its own seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onedraw.door import Ask, Door
from onedraw.text.grammar import available
from onedraw.wishes import GUIDED, Wishes, settle

NOTICE = (
    "The lighthouse stood at the end of a long stone pier. Every evening the keeper climbed its two hundred steps, trimmed the "
    "wick, wound the clockwork that turned the lens, and wrote the weather into a book with a blue cover: wind, swell, "
    "visibility, the ships that had passed and the ships that had not. "
)
LIGHTHOUSE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "steps": {"type": "integer"},
        "lens": {"enum": ["first order", "second order", "third order"]},
        "ships": {"type": "array", "items": {"type": "object", "properties": {"passed": {"type": "boolean"}}}},
    },
    "required": ["name", "steps", "lens", "ships"],
    "additionalProperties": False,
}
PROMPTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("The capital of France is", {"temperature": 0.0}),
    (NOTICE + "On the last night of the year", {"temperature": 0.7, "top_p": 0.9}),
    ("Write a list of things to pack for a week in the mountains:\n-", {"frequency_penalty": 0.6, "presence_penalty": 0.4}),
    (NOTICE + "In spring a letter came, and", {"min_p": 0.05, "logit_bias": {5: 1.5, 7: -4.0}}),
    ("def fibonacci(n: int) -> int:\n", {"temperature": 0.9, "repetition_penalty": 1.2, "top_k": 40}),
    (NOTICE * 4 + "Years later", {"temperature": 1.0}),
    ("One, two, three, one, two, three, one, two,", {"temperature": 1.3, "dry_multiplier": 0.8, "logprobs": 3}),
    ("Q: Why is the sky blue?\nA:", {"temperature": 0.0, "repetition_penalty": 1.1}),
    ("The chorus sings: la la la la la la la la la", {"temperature": 0.8, "frequency_penalty": -2.0}),  # repeats itself
    ("The drum goes", {"temperature": 1.0, "logit_bias": {5: 60.0, 6: 60.0, 7: 60.0}}),  # three tokens in every order
    ("A lighthouse as JSON:\n", {"temperature": 1.0, "guided_json": LIGHTHOUSE}),
    ("Its log, one line per day:\n", {"temperature": 1.2, "guided_regex": r"([a-z]{3,9}, [0-9]{1,2} knots\n){4,9}"}),
)


def held(wishes: Mapping[str, Any]) -> bool:
    """Whether a reply is held to a form."""
    return any(name in wishes for name in GUIDED)


def requests(door: Door, *, new_tokens: int) -> list[Ask]:
    """Prompts of differing length, some with a common beginning, under differing laws; each with its own seed. Those that are
    held to a form come last, and only where what holds them is installed."""
    room = max(door.card.max_context - new_tokens, 1)
    asks = []
    for number, (text, wishes) in enumerate(PROMPTS):
        if held(wishes) and not available():
            continue
        # A form ends where it ends; all other replies have the whole length.
        whole = {"temperature": 1.0, "max_tokens": new_tokens, "ignore_eos": not held(wishes)}
        settled = Wishes.of(**{**whole, **wishes}, checksums=True, seed=1000 + number)
        asks.append(settle(settled, door=door, prompt=door.encode(text)[:room], label="prove"))
    return asks

"""Ask eight questions one after the other, then all at once, at temperature 1 and with a seed each: the answers are the same."""

import os
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "pink", "grey")


def ask(seed: int) -> str | None:
    message = {"role": "user", "content": f"Write one sentence about something {COLOURS[seed]}."}
    reply = client.chat.completions.create(model=model, messages=[message], seed=seed, temperature=1.0, max_tokens=48)
    return reply.choices[0].message.content


with client, ThreadPoolExecutor(len(COLOURS)) as pool:
    model = client.models.list().data[0].id
    alone = [ask(seed) for seed in range(len(COLOURS))]
    together = list(pool.map(ask, range(len(COLOURS))))

same = sum(a == b for a, b in zip(alone, together, strict=True))
print(*together, f"{same} of {len(COLOURS)} answers are the same alone and in a batch", sep="\n")
raise SystemExit(same != len(COLOURS))

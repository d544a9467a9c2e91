"""Run a model inside a Python program, without a server: a whole reply, a stream, and four replies at once with asyncio.

`python examples/in_python.py [MODEL]`
"""

import asyncio
import sys

import onedraw
from onedraw.llm.llm import LLM


async def four_at_once(model: LLM) -> None:
    prompts = [f"{number} is a number that" for number in ("One", "Two", "Three", "Four")]
    replies = await asyncio.gather(*(model.agenerate(prompt, seed=7, max_tokens=12) for prompt in prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        print(prompt + reply.text)


with onedraw.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2", max_context=1024) as model:
    reply = model.generate("The capital of France is", temperature=0, max_tokens=8)
    print(reply.text, reply.token_ids, "seed", reply.seed)

    for piece in model.stream([{"role": "user", "content": "Tell me a story."}], seed=7, max_tokens=40):
        print(piece.text, end="", flush=True)
    print()

    asyncio.run(four_at_once(model))

"""Measure on real engines how much of the prefix cache's hits replicas keep, on recorded conversations; and record them.

    python -m bench.cluster_cache [MODEL] [--replicas 2] [--kv-memory 256MiB] [--at-once 4] [--new-tokens 4] [--json]
    python -m bench.cluster_cache [MODEL] --record FILE [--conversations 40] [--new-tokens 48] [--seed 0]

Plays bench/prompts/conversations.jsonl against replicas, each an engine in a process of its own, behind the replica set that
serves; then against one engine with the memory of all of them together. A conversation sends its next request when it has the
reply to the last one, and --at-once conversations run at a time. The prompts are those of the file, whatever is replied.

A line of the file is a conversation: its system prompt and its turns, each with the time at which it was asked in seconds, the
user's words, and the reply. Several conversations share a system prompt, and some share a document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from onedraw.build.engine_process import EngineProcess
from onedraw.build.llm import build_llm
from onedraw.cluster.replica_set import ReplicaSet
from onedraw.llm.llm import LLM
from onedraw.settings import Settings, size_in_bytes
from onedraw.training.builtin_prompts import builtin_prompts

PROMPTS = Path(__file__).parent / "prompts"
CONVERSATIONS = PROMPTS / "conversations.jsonl"
HOUSE_RULES = (
    "Answer in plain words. Keep to what was asked, and say so when you do not know. Do not repeat the question. If a "
    "request has several parts, answer them in order. Prefer short sentences, and give an example where it helps."
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    (
        f"You are the assistant of a public library. {HOUSE_RULES} Readers ask about opening hours, books, maps, rooms and "
        "courses."
    ),
    (
        f"You help people who learn to write programs. {HOUSE_RULES} Show code in one block, with the name of its language, "
        "and say in one sentence what it does. Never leave out parts of a program that the reader would need to run it."
    ),
    (
        f"You are a patient teacher of mathematics for pupils of twelve years. {HOUSE_RULES} Show each step on a line of its "
        "own, name the rule that it uses, and end with the answer in words. If a pupil makes a mistake, say first what was "
        "right about it."
    ),
    (
        f"You write and correct short texts for a newspaper of a small town. {HOUSE_RULES} Use no exclamation marks, no slang"
        " and no foreign words. Names of persons come with their role. Numbers up to twelve are written as words. Every text"
        " has a headline of at most eight words. Quote only what you were given, and never invent a source."
    ),
)
FOLLOW_UPS = (
    *("Make that shorter.", "Why?", "Give me an example.", "Say it in other words.", "What follows from that?"),
    *("Is that always so?", "Now list the most important points.", "How would you explain it to a child?", "And the opposite?"),
    *("What did you leave out?", "Put it into a table.", "Which part of it is the hardest?"),
)
DOCUMENT_ASKS = ("What is this text about?", "Which number does this text name first?", "Write a headline for this text.")
SHARE_WITH_DOCUMENT = 0.2
WORDS_OF_DOCUMENT = 220


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation: when it was sent, in seconds, the user's words, and the reply that was recorded."""

    at: float
    user: str
    reply: str


@dataclass(frozen=True, slots=True)
class Conversation:
    system: str
    turns: tuple[Turn, ...]

    def messages(self, turn: int) -> list[dict[str, str]]:
        """The chat that a turn sends: everything before it, and the user's words."""
        found = [{"role": "system", "content": self.system}]
        for earlier in self.turns[:turn]:
            found += [{"role": "user", "content": earlier.user}, {"role": "assistant", "content": earlier.reply}]
        return [*found, {"role": "user", "content": self.turns[turn].user}]


def read_conversations(path: Path = CONVERSATIONS) -> list[Conversation]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Conversation(line["system"], tuple(Turn(**turn) for turn in line["turns"])) for line in lines]


# ---------------------------------------------------------------------- recording


def planned(count: int, seed: int) -> list[tuple[str, list[tuple[float, str]]]]:
    """Conversations without replies: their system prompts, and when the user says what."""
    draw = random.Random(seed)
    asks = [text for kind, text in builtin_prompts() if kind != "quote"]
    parts = re.split(r"\n+", (PROMPTS / "prose.txt").read_text(encoding="utf-8"))
    documents = [" ".join(" ".join(parts[start:]).split()[:WORDS_OF_DOCUMENT]) for start in (0, 20, 40)]
    found, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(1 / 4)
        system = SYSTEM_PROMPTS[min(int(draw.paretovariate(0.9)) - 1, len(SYSTEM_PROMPTS) - 1)]
        first = draw.choice(asks)
        if draw.random() < SHARE_WITH_DOCUMENT:
            first = f"{draw.choice(documents)}\n\n{draw.choice(DOCUMENT_ASKS)}"
        said, at = [(now, first)], now
        while draw.random() < 0.78 and len(said) < 12:
            at += 3 + draw.lognormvariate(2.3, 0.8)
            said.append((at, draw.choice(FOLLOW_UPS)))
        found.append((system, [(round(at, 2), text) for at, text in said]))
    return found


async def record(llm: LLM, path: Path, *, count: int, new_tokens: int, seed: int) -> None:
    """Let the model reply, and write the conversations."""

    async def one(number: int, system: str, said: Sequence[tuple[float, str]]) -> Conversation:
        turns: list[Turn] = []
        for at, user in said:
            so_far = Conversation(system, (*turns, Turn(at, user, "")))
            reply = await llm.agenerate(so_far.messages(len(turns)), max_tokens=new_tokens, temperature=0.7, seed=seed + number)
            assert not isinstance(reply, list)
            turns.append(Turn(at, user, reply.text))
        print(f"conversation {number}: {len(turns)} turns", flush=True)
        return Conversation(system, tuple(turns))

    plans = planned(count, seed)
    found = await asyncio.gather(*(one(number, system, said) for number, (system, said) in enumerate(plans)))
    path.write_text("".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in found), encoding="utf-8")


# ---------------------------------------------------------------------- measuring


@dataclass(frozen=True, slots=True)
class Hits:
    """Tokens of all prompts, and those of them that a prefix cache had."""

    engines: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    sent: tuple[int, ...]  # requests that each engine had

    @property
    def rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


async def play(llm: LLM, conversations: Sequence[Conversation], *, at_once: int, new_tokens: int) -> tuple[int, int, int]:
    """Send all conversations in the order in which they begin. Return requests, prompt tokens and cached tokens."""
    slots = asyncio.Semaphore(at_once)
    requests = prompt = cached = 0

    async def one(conversation: Conversation) -> None:
        nonlocal requests, prompt, cached
        async with slots:
            for turn in range(len(conversation.turns)):
                reply = await llm.agenerate(
                    conversation.messages(turn), max_tokens=new_tokens, temperature=0, speculation=False, ignore_eos=True
                )
                assert not isinstance(reply, list)
                requests, prompt, cached = requests + 1, prompt + reply.usage.prompt, cached + reply.usage.cached

    await asyncio.gather(*(one(each) for each in sorted(conversations, key=lambda each: each.turns[0].at)))
    return requests, prompt, cached


def measure(settings: Settings, conversations: Sequence[Conversation], *, engines: int, at_once: int, new_tokens: int) -> Hits:
    """Play conversations against engines in processes of their own, behind a replica set if there are several."""
    with ExitStack() as stack:
        built = [stack.enter_context(build_llm(settings, start_engine=EngineProcess)) for _ in range(engines)]
        llm, sent = built[0], []
        if engines > 1:
            replicas = ReplicaSet(llm.card.fingerprint)
            for number, one in enumerate(built):
                replicas.add(f"r{number}", one.service, fingerprint=one.card.fingerprint)
            llm = LLM(
                service=replicas, tokenizer=llm.tokenizer, template=llm.template, card=llm.card, constraints=llm.constraints
            )
        counted = asyncio.run(play(llm, conversations, at_once=at_once, new_tokens=new_tokens))
        if engines > 1:
            sent = [status.sent for status in replicas.statuses()]
            replicas.close()
        return Hits(engines, *counted, tuple(sent or [counted[0]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kv-memory", type=size_in_bytes, default=size_in_bytes("256MiB"), help="of one replica")
    parser.add_argument("--at-once", type=int, default=4, help="conversations at a time")
    parser.add_argument("--new-tokens", type=int, default=None, help="longest reply (default: 4, or 48 with --record)")
    parser.add_argument("--record", type=Path, default=None, metavar="FILE", help="record conversations instead")
    parser.add_argument("--conversations", type=int, default=40, help="number of conversations to record")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = Settings(model=options.model, device="cpu", max_batch=8, max_context=2048, threads=1, draft=("none",))
    if options.record is not None:
        with build_llm(settings) as llm:
            asyncio.run(
                record(llm, options.record, count=options.conversations, new_tokens=options.new_tokens or 48, seed=options.seed)
            )
        return
    rows: list[Hits] = []
    for engines in (options.replicas, 1):
        memory = options.kv_memory * (options.replicas // engines)
        sized = replace(settings, kv_memory=memory)
        rows.append(
            measure(sized, read_conversations(), engines=engines, at_once=options.at_once, new_tokens=options.new_tokens or 4)
        )
    kept = rows[0].rate / rows[1].rate
    if options.json:
        print(json.dumps({"kept": kept, "rows": [asdict(row) | {"rate": row.rate} for row in rows]}, indent=1))
        return
    for row in rows:
        print(
            f"{row.engines} engine{'s' * (row.engines > 1)}: {row.requests} requests {list(row.sent)}, {row.prompt_tokens:,} "
            f"prompt tokens, {row.cached_tokens:,} cached: {row.rate:.1%}"
        )
    print(f"kept of the hit rate of one engine: {kept:.1%}")


if __name__ == "__main__":
    main()

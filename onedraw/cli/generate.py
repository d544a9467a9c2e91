"""`onedraw generate`: continue or answer one prompt. The reply is streamed to stdout, or printed as one JSON object.

Reasoning and a summary line (seed, tokens, speed) go to stderr, so that a pipe receives nothing but the answer.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from onedraw.cli import terminal
from onedraw.cli.flags import (
    add_record,
    add_request_options,
    add_settings,
    argument_type,
    read_request_options,
    read_settings,
    recorded,
    token_ids,
)
from onedraw.errors import BadSetting
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply, new_replies
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import Prompt, generation_for
from onedraw.types import Logprobs

HELP = "complete a prompt, or answer it as a chat message"
EXAMPLES = """examples:
  onedraw generate smollm2 "The capital of France is" --temperature 0 --max-tokens 8
  onedraw generate smollm2 "Why is the sky blue?" --chat --seed 7
  cat question.txt | onedraw generate smollm2 - --chat --json
  onedraw generate smollm2 --prompt-ids 504,3575,282 --json
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name, a folder, a .gguf file or a hub id")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue; - reads it from stdin")
    parser.add_argument("--prompt-ids", type=argument_type(token_ids), metavar="IDS", help="token ids instead of a text: 5,17,9")
    parser.add_argument("--chat", action="store_true", help="send PROMPT as a user message through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it; needs --chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object when the reply is complete")
    add_record(parser)
    add_request_options(parser)
    add_settings(parser, leave_out=("served_name", "queue_limit"))


def run(arguments: argparse.Namespace) -> int:
    from onedraw.build.llm import build_llm

    prompt, settings, options = read_prompt(arguments), read_settings(arguments), read_request_options(arguments)
    with terminal.progress() as notify:
        llm = build_llm(settings, notify)
    with llm, recorded(llm, arguments) as llm:
        generation = generation_for(llm, prompt, options)
        if arguments.json:
            terminal.print_json(reply_json(llm, llm.run(generation)))
        else:
            _write(llm, generation)
    return 0


def read_prompt(arguments: argparse.Namespace) -> Prompt:
    """Return the prompt: the argument PROMPT, stdin if PROMPT is `-`, or --prompt-ids. Exactly one of PROMPT and --prompt-ids
    must be given; --system needs --chat, which needs PROMPT."""
    if (arguments.prompt is None) == (arguments.prompt_ids is None):
        raise BadSetting("give either PROMPT (or - for stdin) or --prompt-ids")
    if arguments.system is not None and not arguments.chat:
        raise BadSetting("--system needs --chat")
    if arguments.prompt_ids is not None:
        if arguments.chat:
            raise BadSetting("--chat needs a text prompt; --prompt-ids are used as given")
        ids: tuple[int, ...] = arguments.prompt_ids
        return ids
    text: str = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not arguments.chat:
        return text
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [*system, {"role": "user", "content": text}]


def _write(llm: LLM, generation: Generation) -> None:
    """Stream a single reply. Several are printed one after the other at the end, because their pieces arrive interleaved."""
    start = time.perf_counter()
    replies = new_replies([generation])
    for piece in llm.pieces(llm.prepare(generation)):
        replies[piece.index].add(piece)
        if generation.n == 1:
            terminal.print_piece(piece)
    if any(reply.reasoning for reply in replies):
        sys.stderr.write("\n")
    for index, reply in enumerate(replies if generation.n > 1 else ()):
        sys.stdout.write(f"--- {index} (seed {reply.seed})\n{reply.text}\n")
    if generation.n == 1:
        sys.stdout.write("\n")
    sys.stdout.flush()
    terminal.dim(summary(replies, seconds=time.perf_counter() - start))


def summary(replies: list[Reply], *, seconds: float) -> str:
    """Return the summary line: seed and finish reason of the first reply, number of tokens and speed of all replies together."""
    count = sum(len(r.tokens) for r in replies)
    return f"seed {replies[0].seed} · {count} tokens · {count / max(seconds, 1e-9):.1f} tokens/s · {replies[0].finish}"


def reply_json(llm: LLM, replies: list[Reply]) -> dict[str, Any]:
    """Return the JSON object: the first reply at the top level, and with n > 1 all of them under `choices`."""
    first = _choice_json(replies[0])
    more = {"choices": [_choice_json(r) for r in replies]} if len(replies) > 1 else {}
    return {
        "model": llm.card.name,
        "fingerprint": llm.card.fingerprint,
        "prompt_ids": list(replies[0].prompt_ids),
        **first,
        **more,
    }


def _choice_json(reply: Reply) -> dict[str, Any]:
    usage = reply.usage
    scored = [c.logprobs for c in reply.tokens if c.logprobs is not None]
    sums = [f"{c.checksum:016x}" for c in reply.tokens if c.checksum is not None]
    return {
        "token_ids": reply.token_ids,
        "text": reply.text,
        "reasoning": reply.reasoning or None,
        "seed": reply.seed,
        "finish_reason": reply.finish,
        "stop_reason": reply.stop_reason,
        "logprobs": [_logprobs_json(s) for s in scored] if scored else None,
        "prompt_logprobs": None if reply.prompt_logprobs is None else [_logprobs_json(s) for s in reply.prompt_logprobs],
        "checksums": sums or None,  # as text, because many JSON readers round 64-bit integers
        "usage": {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "cached_tokens": usage.cached,
        },
    }


def _logprobs_json(scored: Logprobs) -> dict[str, Any]:
    return {
        "logprob": _finite(scored.logprob),
        "top": [{"id": token, "logprob": _finite(value)} for token, value in scored.alternatives],
    }


def _finite(value: float) -> float | None:
    """Return a logprob, or None for minus infinity, which JSON cannot write."""
    return value if value > float("-inf") else None

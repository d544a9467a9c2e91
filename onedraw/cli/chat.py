"""`onedraw chat`: a conversation in the terminal.

In: lines a person types, commands among them. Out: answers, streamed, each with the seed that replays it.
The conversation is a value with commands as functions of it; reading lines and writing text come from outside.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onedraw.api import generation_for
from onedraw.cli import terminal as screen
from onedraw.cli.flags import add_request_options, add_settings, read_request_options, read_settings
from onedraw.errors import BadParameter, BadRequest, OnedrawError
from onedraw.llm.llm import LLM, Generation, Reply
from onedraw.llm.options import RequestOptions

HELP = "talk with a model in the terminal"
EXAMPLES = """examples:
  onedraw chat smollm2
  onedraw chat smollm2 --temperature 0.7 --system "Answer in one sentence."

Type /help inside for what can be changed while talking.
"""
ANSWER_TOKENS = 1024  # longest answer where none was asked for; /max N changes it
PROMPT = "> "

HELP_LINES = (
    ("/help", "this list"),
    ("/seed N", "repeat with this seed; /seed alone draws a new one for every answer"),
    ("/temperature X", "0 takes the likeliest token, 1 the model's own distribution"),
    ("/max N", "longest answer, in tokens"),
    ("/system TEXT", "what the model is told before the conversation; /system alone takes it away"),
    ("/reset", "begin a new conversation"),
    ("/undo", "take back the last question and its answer"),
    ("/save FILE", "write the conversation as JSON"),
    ("/quit", "leave; so do ctrl-D and /exit"),
)


@dataclass(slots=True)
class Conversation:
    """What was said and how to answer. Owner: the chat loop."""

    options: RequestOptions
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)  # one per answer

    def messages(self) -> list[dict[str, Any]]:
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*opening, *self.turns]

    def undo(self) -> bool:
        """Take back the last exchange."""
        if not self.turns:
            return False
        while self.turns and self.turns.pop()["role"] != "user":
            self.seeds.pop()
        return True


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2", help="the model to talk with (default: smollm2)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_request_options(parser, leave_out=("n", "logprobs", "logprobs_mode", "prompt_logprobs", "checksums", "prediction"))
    add_settings(parser, leave_out=("served_name", "queue_limit"))


def run(arguments: argparse.Namespace) -> int:
    from onedraw.build.llm import build_llm

    settings, options = read_settings(arguments), read_request_options(arguments)
    with screen.progress() as tell:
        llm = build_llm(settings, tell)
    with llm:
        if llm.template is None:
            raise BadRequest("this model has no chat template; use `onedraw generate`", param="messages", code="no_chat_template")
        screen.dim(f"{llm.card.name} · {llm.card.device} · {llm.card.dtype} · /help lists the commands", out=sys.stdout)
        talk(llm, Conversation(options, system=arguments.system), read=line_reader())
    return 0


def talk(llm: LLM, conversation: Conversation, *, read: Callable[[], str]) -> None:
    """Until the person leaves. Ctrl-C stops an answer, or forgets a half-typed line; it never ends the program."""
    while True:
        try:
            line = read().strip()
        except KeyboardInterrupt:
            screen.dim("(ctrl-D or /quit leaves)", out=sys.stdout)
            continue
        except EOFError:
            return
        if line in ("/quit", "/exit"):
            return
        try:
            if line.startswith("/"):
                screen.dim(obey(conversation, line), out=sys.stdout)
            elif line:
                answer(llm, conversation, line)
        except OnedrawError as error:
            screen.dim(f"onedraw: {error}", out=sys.stdout)
        except KeyboardInterrupt:  # before the answer began
            screen.dim("stopped", out=sys.stdout)


def answer(llm: LLM, conversation: Conversation, question: str) -> None:
    """One exchange. A question that cannot be answered leaves the conversation as it was."""
    conversation.turns.append({"role": "user", "content": question})
    try:
        generation = generation_for(llm, conversation.messages(), conversation.options, default_max_tokens=ANSWER_TOKENS)
        reply, stopped = _listen(llm, generation)
    except (OnedrawError, KeyboardInterrupt):
        conversation.turns.pop()
        raise
    if stopped and not reply.text:
        conversation.turns.pop()
        screen.dim("stopped before the first word; the question is taken back", out=sys.stdout)
        return
    conversation.turns.append({"role": "assistant", "content": reply.text})
    conversation.seeds.append(reply.seed)
    ending = "stopped" if stopped else {"length": "cut at the longest length, /max N raises it"}.get(reply.finish or "", "")
    screen.dim(f"seed {reply.seed}" + (f" · {ending}" if ending else ""), out=sys.stdout)


def _listen(llm: LLM, generation: Generation) -> tuple[Reply, bool]:
    """Write the answer as it comes. Ctrl-C cancels the rest and keeps what was said."""
    (reply,) = llm.replies(generation)
    pieces = llm.stream(generation)
    stopped = False
    try:
        for piece in pieces:
            reply.add(piece)
            screen.say(piece, thinking=sys.stdout)
    except KeyboardInterrupt:
        stopped = True
    finally:
        pieces.close()  # cancels the request
    sys.stdout.write("\n")
    return reply, stopped


def obey(conversation: Conversation, line: str) -> str:
    """Carry out one command; the sentence to show."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    match command:
        case "/help":
            return screen.plain_table("", ("command", "what it does"), HELP_LINES).rstrip()
        case "/seed":
            conversation.options = replace(conversation.options, seed=_number(int, "seed", rest) if rest else None)
            return f"seed {rest}" if rest else "a new seed for every answer"
        case "/temperature":
            conversation.options = replace(conversation.options, temperature=_number(float, "temperature", rest))
            return f"temperature {rest}"
        case "/max":
            conversation.options = replace(conversation.options, max_tokens=_number(int, "max", rest))
            return f"answers of at most {rest} tokens"
        case "/system":
            conversation.system = rest or None
            return "system message set" if rest else "no system message"
        case "/reset":
            conversation.turns, conversation.seeds = [], []
            return "a new conversation"
        case "/undo":
            return "taken back" if conversation.undo() else "nothing to take back"
        case "/save":
            return _save(conversation, rest)
        case _:
            return f"no command {command}; /help lists them"


def _number(kind: type[int] | type[float], name: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise BadParameter(name, f"not a number: {text!r}") from None


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        return "save where? /save FILE"
    content = {"messages": conversation.messages(), "seeds": conversation.seeds}
    try:
        Path(os.path.expanduser(name)).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        return f"cannot write {name}: {error.strerror}"
    return f"saved to {name}"


def line_reader() -> Callable[[], str]:
    """Lines with editing and history: prompt_toolkit where it is installed and a person types, else plain input."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            from prompt_toolkit import PromptSession
            from prompt_toolkit.completion import WordCompleter
        except ImportError:
            _readline_history()
        else:
            words = WordCompleter([line.split()[0] for line, _ in HELP_LINES], sentence=True)
            session: PromptSession[str] = PromptSession(completer=words, complete_while_typing=False)
            return lambda: session.prompt(PROMPT)
        return lambda: input(PROMPT)
    return input


def _readline_history() -> None:
    """input() has arrows and history once readline is imported."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return

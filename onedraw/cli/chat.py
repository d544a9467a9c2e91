"""`onedraw chat`: a conversation in the terminal with streamed answers and slash commands. Each answer shows its seed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onedraw.cli import terminal
from onedraw.cli.flags import add_request_options, add_settings, read_request_options, read_settings
from onedraw.errors import BadParameter, BadRequest, OnedrawError
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply, new_replies
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import RequestOptions, generation_for

HELP = "chat with a model in the terminal"
EXAMPLES = """examples:
  onedraw chat smollm2
  onedraw chat smollm2 --temperature 0.7 --system "Answer in one sentence."

Type /help inside for the commands.
"""
ANSWER_TOKENS = 1024  # the most tokens of an answer, unless the user types /max N
PROMPT = "> "

HELP_LINES = (
    ("/help", "this list"),
    ("/seed N", "use this seed; /seed alone draws a new one for every answer"),
    ("/temperature X", "0 takes the likeliest token, 1 the model's own distribution"),
    ("/max N", "longest answer, in tokens"),
    ("/system TEXT", "set the system message; /system alone removes it"),
    ("/reset", "start a new conversation"),
    ("/undo", "remove the last question and its answer"),
    ("/save FILE", "write the conversation as JSON"),
    ("/quit", "quit; ctrl-D and /exit do the same"),
)


@dataclass(slots=True)
class Conversation:
    """The messages so far and the request options of the next answer. The chat loop owns it."""

    options: RequestOptions
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)  # the seed of each answer

    def messages(self) -> list[dict[str, Any]]:
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*opening, *self.turns]

    def undo(self) -> bool:
        """Remove the last question with its answer. Return False if there is none."""
        if not self.turns:
            return False
        while self.turns and self.turns.pop()["role"] != "user":
            self.seeds.pop()
        return True


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2", help="the model to chat with (default: smollm2)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_request_options(
        parser,
        leave_out=(
            *("n", "continue_ids", "reply_ids", "prediction"),
            *("logprobs", "logprobs_mode", "logprob_token_ids", "prompt_logprobs", "checksums"),
        ),
    )
    add_settings(parser, leave_out=("served_name", "queue_limit"))


def run(arguments: argparse.Namespace) -> int:
    from onedraw.build.llm import build_llm

    settings, options = read_settings(arguments), read_request_options(arguments)
    with terminal.progress() as notify:
        llm = build_llm(settings, notify)
    with llm:
        if llm.template is None:
            raise BadRequest("this model has no chat template; use `onedraw generate`", param="messages", code="no_chat_template")
        terminal.dim(f"{llm.card.name} · {llm.card.device} · {llm.card.dtype} · /help lists the commands", out=sys.stdout)
        chat_loop(llm, Conversation(options, system=arguments.system), read=line_reader())
    return 0


def chat_loop(llm: LLM, conversation: Conversation, *, read: Callable[[], str]) -> None:
    """Read and answer until the user quits. Ctrl-C stops an answer or discards the typed line; it never ends the program."""
    while True:
        try:
            line = read().strip()
        except KeyboardInterrupt:
            terminal.dim("(ctrl-D or /quit quits)", out=sys.stdout)
            continue
        except EOFError:
            return
        if line in ("/quit", "/exit"):
            return
        try:
            if line.startswith("/"):
                terminal.dim(run_command(conversation, line), out=sys.stdout)
            elif line:
                answer(llm, conversation, line)
        except OnedrawError as error:
            terminal.dim(f"onedraw: {error}", out=sys.stdout)
        except KeyboardInterrupt:  # Ctrl-C came before the answer began.
            terminal.dim("stopped", out=sys.stdout)


def answer(llm: LLM, conversation: Conversation, question: str) -> None:
    """Answer a question. If that fails, the conversation stays as it was before."""
    conversation.turns.append({"role": "user", "content": question})
    try:
        generation = generation_for(llm, conversation.messages(), conversation.options, default_max_tokens=ANSWER_TOKENS)
        reply, stopped = _stream_answer(llm, generation)
    except (OnedrawError, KeyboardInterrupt):
        conversation.turns.pop()
        raise
    if stopped and not reply.text:
        conversation.turns.pop()
        terminal.dim("stopped before the first word; the question was removed", out=sys.stdout)
        return
    conversation.turns.append({"role": "assistant", "content": reply.text})
    conversation.seeds.append(reply.seed)
    ending = "stopped" if stopped else {"length": "cut at max_tokens, /max N raises it"}.get(reply.finish or "", "")
    terminal.dim(f"seed {reply.seed}" + (f" · {ending}" if ending else ""), out=sys.stdout)


def _stream_answer(llm: LLM, generation: Generation) -> tuple[Reply, bool]:
    """Print the answer while it is generated. Return it, and whether Ctrl-C stopped it; the text so far is kept."""
    (reply,) = new_replies([generation])
    pieces = llm.pieces(llm.prepare(generation))
    stopped = False
    try:
        for piece in pieces:
            reply.add(piece)
            terminal.print_piece(piece, thinking=sys.stdout)
    except KeyboardInterrupt:
        stopped = True
    finally:
        pieces.close()  # This cancels the request if it still runs.
    sys.stdout.write("\n")
    return reply, stopped


def run_command(conversation: Conversation, line: str) -> str:
    """Run a slash command and return the line to show."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    match command:
        case "/help":
            return terminal.plain_table("", ("command", "what it does"), HELP_LINES).rstrip()
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
            return "removed" if conversation.undo() else "nothing to remove"
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
    """Return a function that reads a line. On a terminal it has editing and history, from prompt_toolkit if installed."""
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
    """Give input() line editing and history, which importing readline does."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return

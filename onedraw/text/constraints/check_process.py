"""The helper process that compiles a format before the server does: `python -m onedraw.text.constraints.check_process`.

In, one JSON object per line: first the vocabulary and the limits, then checks. Out: one line per answer. A check that exceeds the
limits on processor time, memory or stack ends this process and nothing else. It ends by itself when its input is closed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onedraw.text.constraints.schema_parts import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS

SEARCH_SECONDS = 1.0  # of processor time, for the keyword that is to blame
GROWTH = 64 << 20  # bytes of address space that checks may leave behind before this process asks to be replaced


@dataclass(frozen=True, slots=True)
class SchemaError:
    path: str  # ".properties.a.pattern"
    reason: str


class GrammarCheck:
    """Compiles grammars for one vocabulary. Owner: the helper process."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos_ids: Sequence[int]) -> None:
        import llguidance

        class Vocabulary:
            eos_token_id = eos_ids[0]
            bos_token_id = None

            def __call__(self, text: bytes | str) -> list[int]:
                """Any tokens with this text: which of them are the model's decides no error."""
                found: list[int] = tokenizer.greedy_tokenize(text if isinstance(text, str) else text.decode("utf-8", "replace"))
                return found

        vocabulary: Any = Vocabulary()
        vocabulary.tokens, vocabulary.special_token_ids = tokens, special
        tokenizer: Any = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary), n_vocab=len(tokens), eos_token=list(eos_ids)
        )
        self._library: Any = llguidance
        self._eos_ids = tuple(eos_ids)
        self._tokenizer = tokenizer

    def answer(self, request: Mapping[str, Any]) -> SchemaError | None:
        """Why a grammar cannot be used, with the path of the keyword for a schema; None if it can."""
        schema = request.get("schema")
        if "grammar" in request:
            matcher = self._matcher(request["grammar"])
            if not matcher.is_error():
                reason = self._reason_for_no_text(matcher)
                return None if reason is None else SchemaError("", reason)
            error = first_line(matcher.get_error())
        else:
            error = self._schema_error(schema)
            if not error:
                return None
        found = None if schema is None else find_schema_error(schema, self._schema_error)
        return found or SchemaError("", f"cannot be compiled: {error}")

    def _reason_for_no_text(self, matcher: Any) -> str | None:
        """Why no text matches: only an end token is allowed first, and the empty text does not match either."""
        first = matcher.deep_copy()
        bits = first.compute_bitmask()
        if first.is_error():
            error = first_line(first.get_error())
            return "no text matches it" if "NoExtension" in error else f"cannot be followed: {error}"
        others = bytearray(bits)
        for token in self._eos_ids:
            others[token // 8] &= ~(1 << token % 8)
        return None if first.is_accepting() or any(others) else "no text matches it"

    def _matcher(self, grammar: str) -> Any:
        return self._library.LLMatcher(self._tokenizer, grammar, log_level=0)

    def _schema_error(self, schema: Any) -> str:
        """Why a schema cannot be compiled; empty if it can."""
        matcher = self._matcher(json.dumps({"grammars": [{"json_schema": schema}]}))
        return first_line(matcher.get_error()) if matcher.is_error() else ""


def first_line(error: str) -> str:
    """The first line of llguidance's message that begins with "error:", else its first line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["no reason given"])[0].removeprefix("error: ")[:1000]


# ---------------------------------------------------------------------- which keyword of a schema cannot be compiled

_SchemaCheck = Callable[[Any], str | None]  # why a schema cannot be compiled; empty if it can; None: no time left to find out

_DEFINITIONS = ("$defs", "definitions")  # a subschema may refer to them, so they are added when it is checked alone


def find_schema_error(schema: Any, check: _SchemaCheck, seconds: float = SEARCH_SECONDS) -> SchemaError | None:
    """The innermost part of a schema that cannot be compiled, as far as it is found in time; None if all of it can."""
    definitions = {name: schema[name] for name in _DEFINITIONS if isinstance(schema, dict) and name in schema}
    stop = time.process_time() + seconds

    def check_part(part: Any) -> str | None:
        if time.process_time() > stop:
            return None
        return check({**definitions, **part} if isinstance(part, dict) else part)

    return _search(schema, "", check_part)


def _search(schema: Any, path: str, check: _SchemaCheck) -> SchemaError | None:
    reason = check(schema)
    if not reason:
        return None
    if not isinstance(schema, dict):
        return SchemaError(path, reason)
    if unsupported := _unsupported_keyword(reason, schema):
        return SchemaError(f"{path}.{unsupported}", f"is not supported ({reason})")
    for step, part in _subschemas(schema):
        found = _search(part, path + step, check)
        if found is not None:
            return found
    for keyword in schema:
        if keyword not in _DEFINITIONS:
            rest = {name: value for name, value in schema.items() if name != keyword}
            if check(rest) == "":
                return SchemaError(f"{path}.{keyword}", reason)
    return SchemaError(path, reason)


def _unsupported_keyword(reason: str, schema: Mapping[str, Any]) -> str | None:
    """The keyword that llguidance's message quotes, if this schema itself has it."""
    if not reason.startswith("Unimplemented keys"):
        return None
    return next((name for name in re.findall(r'"([^"]+)"', reason) if name in schema), None)


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in SCHEMA_MAPS:
        if isinstance(schema.get(keyword), dict):
            yield from ((f".{keyword}.{name}", part) for name, part in schema[keyword].items())
    for keyword in SCHEMA_LISTS:
        if isinstance(schema.get(keyword), list):
            yield from ((f".{keyword}[{number}]", part) for number, part in enumerate(schema[keyword]))
    for keyword in SCHEMAS:
        if isinstance(schema.get(keyword), dict):
            yield f".{keyword}", schema[keyword]


# ---------------------------------------------------------------------- the process


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the server, which then closes the input
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # native code that prints does not reach the answers
    setup = json.loads(requests.readline())
    check = GrammarCheck([token.encode("latin-1") for token in setup["tokens"]], setup["special"], setup["eos_ids"])
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # from here on only native code writes there, about the texts of strangers
    size = _address_space()
    if size:
        _limit_memory(size + setup["memory"])
    answers.write(b'{"ready": true}\n')
    threading.stack_size(setup["stack"])
    for line in requests:
        thread = threading.Thread(target=_answer, args=(check, line, answers, setup["seconds"], size))
        thread.start()
        thread.join()


def _answer(check: GrammarCheck, line: bytes, answers: Any, seconds: float, size: int) -> None:
    _limit_time(seconds)
    try:
        found = check.answer(json.loads(line))
    except BaseException:  # out of memory, or a panic in native code: this process may be damaged
        os._exit(1)
    _limit_time(0)
    # After an answer with `last` nothing more is asked: memory that earlier checks left behind would count against later ones.
    last = _address_space() > size + GROWTH
    error = None if found is None else {"path": found.path, "reason": found.reason}
    answers.write(json.dumps({"error": error, "last": last}).encode() + b"\n")


def _limit_time(seconds: float) -> None:
    """The signal of this timer, which nothing handles, ends the process after that much processor time. 0: no limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(size: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # where the system has no such limit, the one on time remains
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _address_space() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


if __name__ == "__main__":
    main()

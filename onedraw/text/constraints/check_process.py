"""The helper process that compiles each response format (JSON schema or grammar) before the server compiles it.

`checker.py` starts it with `python -m onedraw.text.constraints.check_process`. It reads one JSON object per line: first the
vocabulary and the limits, then formats to check. It writes one line per answer. A format whose compilation exceeds the limits on
processor time, memory or stack ends this process and not the server. The process ends by itself when its input is closed.
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

SEARCH_SECONDS = 1.0  # the most processor time for finding which keyword of a schema cannot be compiled
GROWTH = 64 << 20  # When checks have left behind this many bytes of address space, this process asks to be replaced.


@dataclass(frozen=True, slots=True)
class SchemaError:
    path: str  # where in the schema, for example ".properties.a.pattern"
    reason: str


class GrammarCheck:
    """Compiles grammars for one vocabulary, with llguidance."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos_ids: Sequence[int]) -> None:
        import llguidance

        class Vocabulary:
            eos_token_id = eos_ids[0]
            bos_token_id = None

            def __call__(self, text: bytes | str) -> list[int]:
                """Return any tokens that spell this text. The model's own tokenizer might choose others, but whether a grammar
                compiles does not depend on that."""
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
        """Return why a format cannot be used, or None if it can. If the format is a schema, the error has the path of the keyword
        that cannot be compiled."""
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
        """Return an error if no text matches the grammar, else None. No text matches if only an end token is allowed first, and
        the empty text does not match either."""
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
        """Return why a schema cannot be compiled; an empty text if it can."""
        matcher = self._matcher(json.dumps({"grammars": [{"json_schema": schema}]}))
        return first_line(matcher.get_error()) if matcher.is_error() else ""


def first_line(error: str) -> str:
    """Return the first line of llguidance's message that begins with "error:", or else its first line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["no reason given"])[0].removeprefix("error: ")[:1000]


# ---------------------------------------------------------------------- which keyword of a schema cannot be compiled

_SchemaCheck = Callable[[Any], str | None]  # returns why a schema cannot be compiled; "" if it can; None if no time is left

_DEFINITIONS = ("$defs", "definitions")  # A subschema may refer to these, so they are added to it when it is checked alone.


def find_schema_error(schema: Any, check: _SchemaCheck, seconds: float = SEARCH_SECONDS) -> SchemaError | None:
    """Return the error of the innermost part of a schema that cannot be compiled, or of an outer part if the time ends before
    that. None if the whole schema can be compiled."""
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
    """Return the keyword that llguidance's message quotes, if this schema itself has it, else None."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the server, which then closes the input
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # Native code that prints to stdout must not write between the answers.
    setup = json.loads(requests.readline())
    check = GrammarCheck([token.encode("latin-1") for token in setup["tokens"]], setup["special"], setup["eos_ids"])
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # From here on only native code writes to stderr, and its messages repeat what clients sent.
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
    begun = time.process_time()
    try:
        found = check.answer(json.loads(line))
    except BaseException:  # After a lack of memory or a panic in native code, the state of this process may be damaged.
        os._exit(1)
    _limit_time(0)
    # After an answer with `last` the server starts a new process, because memory that earlier checks have left behind would count
    # against the limit of later ones.
    last = _address_space() > size + GROWTH
    error = None if found is None else {"path": found.path, "reason": found.reason}
    answer = {"error": error, "seconds": time.process_time() - begun, "last": last}
    answers.write(json.dumps(answer).encode() + b"\n")


def _limit_time(seconds: float) -> None:
    """End this process after `seconds` of processor time, by the signal of a timer, which is not handled. 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(size: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # On systems without this limit, the limit on time remains.
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

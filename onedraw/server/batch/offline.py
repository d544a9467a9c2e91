"""Run a file of requests without a server: what `onedraw batch` does.

The input is a file of lines as for /v1/batches; the output is a file of replies in the same order, and one of errors if there are
any. Their bytes depend on the input file, the seed and the model only. Results are kept beside the output file until the end, so
an interrupted run is continued by the next one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from onedraw.errors import BadSetting
from onedraw.llm.llm import LLM
from onedraw.server.app import Endpoints
from onedraw.server.batch.lines import BatchIdentity, BatchLine, LineResult, check_lines, read_lines
from onedraw.server.batch.results import ForeignResults, ResultLog, write_whole
from onedraw.server.batch.run import lines_at_once, run_lines
from onedraw.server.config import ServerOptions
from onedraw.types import SEED_LIMIT

SHOWN = 10  # faults of the input file that the error message shows


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """`resumed`: the number of lines with a result of an earlier, interrupted run. Tokens and seconds count only the lines that
    were answered in this run."""

    lines: int
    completed: int
    failed: int
    resumed: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    seed: int
    fingerprint: str
    output: Path
    errors: Path | None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Body(msgspec.Struct):
    usage: _Usage


class _Response(msgspec.Struct):
    body: _Body


class _Answered(msgspec.Struct):
    response: _Response


_DECODER = msgspec.json.Decoder(_Answered)


def errors_path(output: Path) -> Path:
    return output.with_suffix(f".errors{output.suffix}")


async def run_file(
    llm: LLM,
    source: Path,
    output: Path,
    *,
    seed: int | None = None,
    notify: Callable[[int, int], None] = lambda done, total: None,
) -> BatchSummary:
    """Answer all lines of a file. `notify` gets the number of lines that are done, and of all."""
    output = output.resolve()  # If it is a link, such as /dev/stdout, the file behind it is replaced, not the link.
    options, failures = ServerOptions(), errors_path(output)
    for path in (output, failures):
        if path.exists() and not path.is_file():
            raise BadSetting(f"{path} is a folder or a device; name a file, which is written when all lines are done")
        if path.resolve() == source.resolve():
            raise BadSetting(f"{path} is the input file; write the output elsewhere")
    total, faults = _checked(source, options)
    if faults:
        raise BadSetting(f"{source} cannot be run: " + "; ".join(faults))
    content = _hash(source)
    seed = int(content[:16], 16) % SEED_LIMIT if seed is None else seed
    identity = BatchIdentity(content, 0, seed, llm.card.fingerprint)
    endpoints = Endpoints(llm, options)
    prompts = completions = 0

    async def answer(line: BatchLine) -> LineResult:
        return await endpoints.answer_line(line, identity.line(line.number), None)

    partial = output.with_name(output.name + ".partial")
    with _log(partial, f"input {content} seed {seed} model {llm.card.fingerprint}") as results:
        resumed, begun = len(results), time.perf_counter()

        def ended(result: LineResult) -> None:
            nonlocal prompts, completions
            if result.ok:
                usage = _DECODER.decode(result.text).response.body.usage
                prompts, completions = prompts + usage.prompt_tokens, completions + usage.completion_tokens
            notify(len(results), total)

        notify(resumed, total)
        lines = read_lines(source, longest=options.max_body)
        await run_lines(lines, results, answer, most=lines_at_once(llm.service.capacity.lanes), ended=ended)
        seconds = time.perf_counter() - begun
        write_whole(output, (text + b"\n" for _, text in results.results(ok=True)))
        if results.failed:
            write_whole(failures, (text + b"\n" for _, text in results.results(ok=False)))
        else:
            failures.unlink(missing_ok=True)
        completed, failed = results.completed, results.failed
    partial.unlink()
    written = failures if failed else None
    return BatchSummary(
        lines=total,
        completed=completed,
        failed=failed,
        resumed=resumed,
        prompt_tokens=prompts,
        completion_tokens=completions,
        seconds=seconds,
        seed=seed,
        fingerprint=llm.card.fingerprint,
        output=output,
        errors=written,
    )


def _checked(source: Path, options: ServerOptions) -> tuple[int, list[str]]:
    try:
        total, faults = check_lines(source, longest=options.max_body)
    except OSError as error:
        raise BadSetting(f"cannot read {source} ({error.strerror})") from None
    shown = [f"{one.message}" if one.line is None else f"line {one.line}: {one.message}" for one in faults[:SHOWN]]
    return total, shown + ([f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else [])


def _hash(source: Path) -> str:
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _log(path: Path, title: str) -> ResultLog:
    try:
        return ResultLog(path, title=title)
    except ForeignResults:
        raise BadSetting(
            f"{path} has results of another input, seed or model; remove it, or write to another output file"
        ) from None
    except OSError as error:
        raise BadSetting(f"cannot write to {path} ({error.strerror})") from None

"""A quick local evaluation: questions with expected answers in, scores with confidence intervals out.

A question with choices is answered by the choice that is likeliest after its prompt; one without by a generated reply, which is
compared with the expected answer. The seed of each question follows from the run's seed and the number of the question, so the
answers depend on the task, the options and the model (its fingerprint) only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onedraw.errors import BadRequest, BadSetting
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply, new_replies
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import Prompt, generation_from_keywords, score_options
from onedraw.sampling.noise import prompt_seed

Match = Literal["exact", "ignore-case", "contains"]
NORMAL_95 = 1.959963984540054  # the quantile of the normal distribution for an interval of 95 %


@dataclass(frozen=True, slots=True)
class Question:
    """One line of a task. With `choices`, `right` is the index of the right one and `answer` is its text."""

    number: int
    prompt: str | tuple[Mapping[str, Any], ...]  # a text, or chat messages
    answer: str
    choices: tuple[str, ...] = ()
    right: int = -1


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    digest: str  # SHA-256 of the file
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question. `scores` holds the logprob of each choice; `seed` is that of a generated reply."""

    number: int
    right: bool
    text: str
    seed: int | None = None
    tokens: int = 0
    scores: tuple[float, ...] = ()
    right_normalized: bool | None = None  # `right` if each logprob is divided by the characters of its choice


@dataclass(frozen=True, slots=True)
class Metric:
    """A share of right answers, with the bounds between which it lies with 95 % confidence (Wilson's interval)."""

    name: str
    right: int
    count: int

    @property
    def value(self) -> float:
        return self.right / self.count

    @property
    def interval(self) -> tuple[float, float]:
        share, count, z = self.value, self.count, NORMAL_95
        middle = (share + z * z / (2 * count)) / (1 + z * z / count)
        half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
        return max(middle - half, 0.0), min(middle + half, 1.0)


@dataclass(frozen=True, slots=True)
class Evaluation:
    task: Task
    fingerprint: str
    seed: int
    metrics: tuple[Metric, ...]
    answers: tuple[Answer, ...]


def read_task(path: Path) -> Task:
    """Read a file of JSON lines: `prompt` or `messages`, `answer`, and optionally `choices`. Empty lines are skipped."""
    try:
        content = path.read_bytes()
        rows = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise BadSetting(f"cannot read {path} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadSetting(f"{path} is not UTF-8 text") from None
    questions: list[Question] = []
    for line, row in enumerate(rows, start=1):
        if row.strip():
            try:
                questions.append(_question(len(questions), json.loads(row)))
            except (ValueError, RecursionError) as error:
                raise BadSetting(f"{path}:{line}: {error}") from None
    if not questions:
        raise BadSetting(f"{path} has no questions")
    return Task(path.stem, hashlib.sha256(content).hexdigest(), tuple(questions))


def _question(number: int, row: object) -> Question:
    if not isinstance(row, dict):
        raise ValueError("a question must be a JSON object with prompt and answer")
    if strays := set(row) - {"prompt", "messages", "answer", "choices", "id"}:
        raise ValueError(f"{min(strays)!r} is unknown; a question has prompt or messages, answer, choices, id")
    prompt, messages, answer, choices = (row.get(name) for name in ("prompt", "messages", "answer", "choices"))
    if (prompt is None) == (messages is None):
        raise ValueError("give either prompt or messages")
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError("prompt must be a text")
    if messages is not None and not (isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages)):
        raise ValueError("messages must be a list of objects")
    asked: str | tuple[Mapping[str, Any], ...] = prompt if isinstance(prompt, str) else tuple(messages or ())
    if choices is None:
        if not isinstance(answer, str):
            raise ValueError("answer must be a text")
        return Question(number, asked, answer)
    if not (isinstance(choices, list) and len(choices) > 1 and all(isinstance(one, str) and one for one in choices)):
        raise ValueError("choices must be a list of at least two texts")
    right = choices.index(answer) if isinstance(answer, str) and answer in choices else answer
    if isinstance(right, bool) or not isinstance(right, int) or not 0 <= right < len(choices):
        raise ValueError("answer must be one of the choices, or its index from 0")
    return Question(number, asked, choices[right], tuple(choices), right)


def evaluate(
    llm: LLM,
    task: Task,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    match: Match = "exact",
    chat: bool = False,
    notify: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Answer all questions. `options` apply to generated replies only; with `chat` a prompt is sent as a user message."""
    jobs = [(question, job) for question in task.questions for job in _jobs(llm, question, options, seed=seed, chat=chat)]
    found: list[list[Reply]] = [[] for _ in task.questions]
    most = llm.service.max_requests
    for start in range(0, len(jobs), most):
        part = jobs[start : start + most]
        generations = [job for _, job in part]
        replies, done = new_replies(generations), start
        for piece in llm.pieces(llm.prepare(*generations)):
            replies[piece.index].add(piece)
            if piece.finish is not None:
                done += 1
                notify(done, len(jobs))
        for (question, _), reply in zip(part, replies, strict=True):
            found[question.number].append(reply)
    answers = tuple(_answer(question, replies, match) for question, replies in zip(task.questions, found, strict=True))
    return Evaluation(task, llm.card.fingerprint, seed, _metrics(task.questions, answers), answers)


def _jobs(llm: LLM, question: Question, options: Mapping[str, Any], *, seed: int, chat: bool) -> list[Generation]:
    """Return what to generate for a question: a reply to sample, or each choice as a reply to score."""
    prompt: Prompt = question.prompt if isinstance(question.prompt, str) else [dict(one) for one in question.prompt]
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    try:
        if not question.choices:
            asked = {**options, "seed": prompt_seed(seed, question.number), "n": 1}
            return [generation_from_keywords(llm, prompt, asked)]
        return [_scored(llm, prompt, choice) for choice in question.choices]
    except BadRequest as error:
        raise BadSetting(f"question {question.number + 1}: {error}") from None


def _scored(llm: LLM, prompt: Prompt, choice: str) -> Generation:
    """Return the generation that scores a choice as the reply. After a text, prompt and choice are tokenized together, since the
    tokens of a text may depend on what follows. If the prompt alone has k tokens, those after the first k are the choice's."""
    if isinstance(prompt, str):
        whole, alone = llm.encode(prompt + choice), llm.encode(prompt)
        prompt, reply = whole[: len(alone)], whole[len(alone) :]
    else:
        reply = llm.encode(choice, add_special=False)
    return generation_from_keywords(llm, prompt, score_options(reply, {"ignore_eos": True, "seed": 0}))


def _answer(question: Question, replies: Sequence[Reply], match: Match) -> Answer:
    if not question.choices:
        [reply] = replies
        text, wanted = reply.text.strip(), question.answer.strip()
        if match != "exact":
            text, wanted = text.casefold(), wanted.casefold()
        right = wanted in text if match == "contains" else wanted == text
        return Answer(question.number, right, reply.text, reply.seed, len(reply.tokens))
    scores = tuple(math.fsum(token.logprobs.logprob for token in reply.tokens if token.logprobs) for reply in replies)
    per_character = [score / len(choice) for score, choice in zip(scores, question.choices, strict=True)]
    best, best_normalized = scores.index(max(scores)), per_character.index(max(per_character))
    return Answer(
        question.number,
        best == question.right,
        question.choices[best],
        scores=scores,
        right_normalized=best_normalized == question.right,
    )


def _metrics(questions: Sequence[Question], answers: Sequence[Answer]) -> tuple[Metric, ...]:
    found: list[Metric] = []
    for name, of, right in (
        ("match", False, lambda answer: answer.right),
        ("choice", True, lambda answer: answer.right),
        ("choice per character", True, lambda answer: bool(answer.right_normalized)),
    ):
        counted = [right(answer) for question, answer in zip(questions, answers, strict=True) if bool(question.choices) is of]
        if counted:
            found.append(Metric(name, sum(counted), len(counted)))
    return tuple(found)

"""The client interface of the engine, which is the same in whichever process or on whichever machine the engine runs.

Everything above the engine (`llm`, `server`, `contract`, `cli`) knows it as an EngineClient. Requests and events are plain data;
a constraint is sent as its description. What can be refused without the engine's state is decided by `check_request` and
`check_count`, on the caller's side, so every client refuses the same requests with the same errors before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from onedraw.backends.base import Backend, Capacity
from onedraw.engine.engine import Event, Sink
from onedraw.engine.stats import Stats
from onedraw.errors import BadParameter, BadRequest, ContextOverflow, Unsupported
from onedraw.memory.disk_snapshots import SnapshotFolder
from onedraw.memory.pages import longest_context
from onedraw.sampling.adjustments import is_allowed
from onedraw.types import Constraint, ConstraintSpec, Request, SamplingParams

__all__ = ["BuildConstraint", "CheckedRequest", "EngineClient", "Event", "Sink", "check_count", "check_request"]

CONTINUE_IDS = "continue_ids"  # the name of the request option that becomes `Request.given`
REPLY_IDS = "reply_ids"  # the name of the request option that becomes `Request.forced`
BuildConstraint = Callable[[ConstraintSpec], Constraint | None]


def refuse_constraints(spec: ConstraintSpec) -> Constraint | None:
    raise Unsupported("this service was built without constraints", code="constraints_unsupported")


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that the backend can serve. A client in the engine's process passes the constraint on; any other sends only the
    request, which describes the constraint."""

    request: Request
    constraint: Constraint | None = None


class EngineClient(Protocol):
    """An engine that runs somewhere. Its methods are thread-safe."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def ready(self) -> bool:
        """Whether the engine runs and takes requests."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the engine has ended, without being closed, and will not come back."""
        ...

    @property
    def max_requests(self) -> int:
        """The most requests that may run and wait together. A call for more choices than this could never be accepted."""
        ...

    def stats(self) -> Stats:
        """Return the counters as they were after the last step that is known here."""
        ...

    def check(self, request: Request) -> CheckedRequest:
        """Build the request's constraint, and raise if the request cannot be served. This takes time on the caller's thread."""
        ...

    def check_count(self, replies: int, *, param: str | None = None) -> None:
        """Raise if this number of replies could never be submitted together, because the queue is too short."""
        ...

    def submit(self, requests: Sequence[tuple[CheckedRequest, Sink]]) -> None:
        """Accept all of the requests or none. A sink gets the events of its request, on a thread of the client, so it must not
        block; the last event has a finish reason or an error. If the queue is full, this raises an error; a client that cannot
        know it sends each of these requests one event, with that error."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request early. An unknown id belongs to a request that has ended, so it is ignored."""
        ...

    @property
    def paused(self) -> bool: ...

    def pause(self, *, end: bool = False) -> None:
        """Submit no more steps, until `resume`. Requests are still accepted, and wait. With `end` those that are running or
        waiting now end with the finish reason "moved". Returns when no step is in flight."""
        ...

    def resume(self) -> None:
        """Submit steps again after `pause`."""
        ...

    def replace_weights(self, replace: Callable[[Backend], None], snapshots: Callable[[Backend], SnapshotFolder]) -> None:
        """Have `replace` replace the weights of the backend, on the engine's thread between two steps, and forget all state that
        was computed with the old ones. `snapshots` opens the folder of the new weights' snapshots, if there are any. What
        `replace` raises is raised here, and the old weights stay in use."""
        ...

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish within `drain_seconds`, then cancel the rest and stop the engine."""
        ...


class FixedWeights:
    """The part of an EngineClient that refuses to pause and to replace weights, for engines that keep those they were started
    with. `where` says in errors where the engine runs."""

    where: str

    @property
    def paused(self) -> bool:
        return False

    def pause(self, *, end: bool = False) -> None:
        raise self._refusal()

    def resume(self) -> None:
        raise self._refusal()

    def replace_weights(self, replace: Callable[[Backend], None], snapshots: Callable[[Backend], SnapshotFolder]) -> None:
        raise self._refusal()

    def _refusal(self) -> Unsupported:
        return Unsupported(
            f"{self.where} cannot be paused and keeps the weights that it was started with; serve one engine in the server's own "
            "process to replace weights",
            code="weight_updates_unsupported",
        )


def check_request(request: Request, capacity: Capacity, build_constraint: BuildConstraint) -> CheckedRequest:
    """Build the request's constraint, and raise if an engine of this capacity cannot serve the request."""
    params = request.params
    constraint = None if request.constraint is None else build_constraint(request.constraint)
    for token in request.prompt:
        if not 0 <= token < capacity.vocab:
            raise BadParameter("prompt", f"token id {token} is outside the vocabulary of {capacity.vocab}")
    for token in params.logprob_token_ids:
        if not 0 <= token < capacity.vocab:
            raise BadParameter("logprob_token_ids", f"token id {token} is outside the vocabulary of {capacity.vocab}")
    if request.given:
        _check_beginning(CONTINUE_IDS, request.given, request, constraint, vocab=capacity.vocab)
    if request.forced:
        _check_beginning(REPLY_IDS, request.forced, request, constraint, vocab=capacity.vocab)
    if not request.prompt:
        raise BadParameter("prompt", "needs at least one token")
    total = len(request.prompt) + params.max_tokens
    room = longest_context(capacity.groups, page_size=capacity.page_size, max_context=capacity.max_context, chunk=capacity.chunk)
    if total > room:
        raise ContextOverflow(
            f"the prompt has {len(request.prompt)} tokens and max_tokens is {params.max_tokens}: together {total}, "
            f"over the context of {room}",
            param="max_tokens",
            prompt=len(request.prompt),
        )
    if not capacity.returns_logits and (constraint is not None or request.forced or not _plain_argmax(params)):
        raise Unsupported(
            "this backend does not return logits, so only plain greedy decoding is served: temperature 0 and no "
            "penalty, bias, min_tokens, bans, constraint or logprobs",
            code="sampling_unsupported",
        )
    if not capacity.scores_prompts and params.prompt_logprobs is not None:
        raise Unsupported(
            "prompt_logprobs: this backend returns the logits of sampled positions only; leave it out, or serve the model itself "
            "instead of its export",
            code="sampling_unsupported",
        )
    return CheckedRequest(request, constraint)


def check_count(replies: int, most: int, *, param: str | None = None) -> None:
    """Raise if there are more replies than the `most` requests that may run and wait together."""
    if replies > most:
        raise BadRequest(
            f"{replies} replies at once are more than the {most} that may run and wait; "
            f"split them over several requests, or raise --queue-limit or --max-batch",
            param=param,
            code="too_many_replies",
        )


def _check_beginning(name: str, given: tuple[int, ...], request: Request, constraint: Constraint | None, *, vocab: int) -> None:
    """Raise if these tokens, which callers know as `name`, cannot be the beginning of this request's reply, as far as that shows
    without the model."""
    params = request.params
    if len(given) > params.max_tokens:
        raise BadParameter(
            name,
            f"{len(given)} tokens are over the {params.max_tokens} of max_tokens, which counts from the beginning of the reply",
        )
    for index, token in enumerate(given):
        if not 0 <= token < vocab:
            raise BadParameter(name, f"token id {token} is outside the vocabulary of {vocab}")
        if token in params.stop_ids and index + 1 < len(given):
            raise BadParameter(name, f"token {index} has the id {token}, which ends the reply, and others follow it")
    legal = len(given) if constraint is None else _legal(given, constraint, params)
    if legal < len(given):
        raise BadParameter(
            name,
            f"token {legal} has the id {given[legal]}, which the response format or the thinking budget does not allow there; "
            "send the options that the reply was generated with",
        )


def _legal(given: tuple[int, ...], constraint: Constraint, params: SamplingParams) -> int:
    """Return how many of these leading tokens the constraint allows. If the last one is a stop id, it is looked up in the mask
    of its position, since a constraint whose grammar is complete need not accept a stop id as input."""
    if given[-1] not in params.stop_ids:
        return constraint.legal(given)
    before = given[:-1]
    legal = constraint.legal(before)
    if legal < len(before):
        return legal
    mask = constraint.allowed(before, ())
    return legal + (mask is None or is_allowed(mask, given[-1]))


def _plain_argmax(params: SamplingParams) -> bool:
    return (
        params.temperature == 0
        and not params.counts_history
        and params.dry is None
        and not params.logit_bias
        and not params.min_tokens
        and not params.bad_words
        and params.logprobs is None
        and params.prompt_logprobs is None
        and not params.checksums
    )

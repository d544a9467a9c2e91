"""The HTTP application: endpoints, and the run of one reply.

The input is an LLM and ServerOptions; the output is a FastAPI app. The middleware checks a request, `parsing.py` turns its body
into a typed request, `prompts.py` prepares that, and a writer turns the pieces of the reply (its parts, as they arrive) into the
shape of the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope

from onedraw import __version__
from onedraw.errors import EngineLost, ModelNotFound, OnedrawError, QueueFull, ShuttingDown
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply, new_replies
from onedraw.llm.request_options import check_ids
from onedraw.server import page as assets
from onedraw.server.anthropic.messages import CountRequest, MessagesRequest, MessagesWriter
from onedraw.server.auth import CALLER, OPEN_PATHS, ApiKeyMiddleware, ApiKeys, caller, turn_caller
from onedraw.server.batch.endpoints import BatchEndpoints
from onedraw.server.batch.lines import LINE, BatchLine, LineIdentity, LineMoved, LineResult, check_model, result_line
from onedraw.server.batch.requests import BatchRequest
from onedraw.server.body import read_body, read_json
from onedraw.server.config import ServerOptions
from onedraw.server.errors import TimedOut, error_response
from onedraw.server.limits import PERMIT, Accounts, Permit, PermitMiddleware, RateLimited
from onedraw.server.logs import RequestLog, note
from onedraw.server.metrics import Meters, RequestTimer
from onedraw.server.middleware import (
    CrossOriginMiddleware,
    ErrorMiddleware,
    LocalAccessMiddleware,
    RootPathMiddleware,
    or_disconnect,
)
from onedraw.server.ollama import writer as ollama
from onedraw.server.ollama.requests import OllamaChat, OllamaGenerate, OllamaShow
from onedraw.server.ollama.writer import OllamaWriter
from onedraw.server.openai.chat import Json, OpenAIWriter
from onedraw.server.openai.responses import ResponseStore, ResponsesWriter, check_query, listing, page_of
from onedraw.server.openai.responses_request import ResponsesRequest, numbered
from onedraw.server.openai.score import ScoreWriter
from onedraw.server.openapi import document
from onedraw.server.parsing import Parsed, RequestT, as_request, parse
from onedraw.server.prompts import PreparedRequest, bursts, chat_prompt, chat_text, count_prompt, prepare, total_usage
from onedraw.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, ScoreRequest, TokenizeRequest
from onedraw.server.streaming import LINES, NAMED, OPENAI, ChunkStream, Framing
from onedraw.server.tracing import RequestTrace, Tracing, TracingMiddleware, trace_of
from onedraw.server.weights import UPDATE_PATHS, WeightEndpoints
from onedraw.server.worker_threads import Workers
from onedraw.types import Finish, Piece, Usage

IGNORED = "x-onedraw-ignored"  # the header that lists unknown fields and left-out tools
LONG_BODY = 1 << 18  # Bodies of at least this many bytes are parsed on the few threads for long work, see `worker_threads.py`.

QUEUE_SECONDS = 0.2  # seconds after which a line of a batch is sent again if the queue was full
LOGPROBS_ON_LOOP = 1 << 13  # Replies with more logprobs are written on a thread, so that streams keep running meanwhile.
# Writes the same JSON as JSONResponse, but step by step: JSONResponse encodes in one call, which keeps other threads from
# running.
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

Result = TypeVar("Result")


class Endpoints:
    """The handlers of all endpoints of one LLM. `serve` sets `draining` when the shutdown begins; from then on requests for
    replies, batches and /health are answered with 503."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self.llm = llm
        self.options = options
        self.meters = Meters(llm.service.stats, llm.card.name, prefix=options.metrics_prefix)
        self._accounts = Accounts(options.limits, refused=self.meters.limited)
        self.meters.show_keys([key.name for key in options.keys], self._accounts)
        self.tracing = None if options.otlp_traces_endpoint is None else Tracing(options.otlp_traces_endpoint)
        self.draining = False
        self.batches = BatchEndpoints(llm, options, answer=self.answer_line, check_open=self._refuse_when_closed)
        self._store = ResponseStore()
        self._workers = Workers()

    # ------------------------------------------------------------------ replies

    async def complete(self, request: Request) -> Response:
        timer, parsed = RequestTimer(self.meters), await self._read(request, CompletionRequest)
        return await self._answer(request, parsed.request, parsed.ignored, timer=timer, write=self._openai(parsed.request))

    async def chat(self, request: Request) -> Response:
        timer, parsed = RequestTimer(self.meters), await self._read(request, ChatRequest)
        return await self._answer(request, parsed.request, parsed.ignored, timer=timer, write=self._openai(parsed.request))

    async def score(self, request: Request) -> Response:
        timer, parsed = RequestTimer(self.meters), await self._read(request, ScoreRequest)

        def write(prepared: PreparedRequest) -> ScoreWriter:
            return ScoreWriter(prepared, card=self.llm.card, tokenizer=self.llm.tokenizer)

        return await self._answer(request, parsed.request, parsed.ignored, timer=timer, write=write)

    async def respond(self, request: Request) -> Response:
        timer, parsed = RequestTimer(self.meters), await self._read(request, ResponsesRequest)
        body = parsed.request
        owner = caller(request)
        before, items, names, wanted = await self._convert(request, lambda: self._conversation(body, owner))

        def write(prepared: PreparedRequest) -> ResponsesWriter:
            openai = OpenAIWriter(prepared, card=self.llm.card, tokenizer=self.llm.tokenizer)
            return ResponsesWriter(
                prepared, body, before=before, items=items, card=self.llm.card, openai=openai, store=self._store, owner=owner
            )

        return await self._answer(
            request, wanted, parsed.ignored, timer=timer, write=write, framing=NAMED, prefix="resp_", names=names
        )

    async def response(self, request: Request, response_id: str) -> Response:
        if request.method == "DELETE":
            self._store.delete(response_id, caller(request))
            return JSONResponse({"id": response_id, "object": "response", "deleted": True})
        check_query(request, {"stream": ("false",), "include": (), "include[]": ()})
        return JSONResponse(self._store.find(response_id, caller(request)).response)

    async def response_items(self, request: Request, response_id: str) -> Response:
        items = self._store.find(response_id, caller(request)).items
        return JSONResponse(listing(items, page_of(request)))

    async def all_batches(self, request: Request) -> Response:
        if request.method == "GET":
            return await self.batches.listed(request)
        parsed = await self._read(request, BatchRequest)
        return await self.batches.create(request, parsed.request, headers=_headers(parsed.ignored))

    async def count_response(self, request: Request) -> Response:
        parsed = await self._read(request, ResponsesRequest)
        owner = caller(request)
        *_, names, wanted = await self._convert(request, lambda: self._conversation(parsed.request, owner, max_tokens=1))
        counted = await self._work(request, lambda: count_prompt(wanted, self.llm, names=names), compiles=wanted.compiles)
        reply = {"object": "response.input_tokens", "input_tokens": counted}
        return JSONResponse(reply, headers=_headers(parsed.ignored))

    def _conversation(
        self, body: ResponsesRequest, owner: str | None, **changes: Any
    ) -> tuple[Sequence[Json], Sequence[Json], Mapping[str, str], ChatRequest]:
        """Return four things: the messages up to the end of the previous response; this request's input, with item references
        replaced by the items; a map from field names of the equivalent chat request to the caller's, for errors; and that chat
        request, in which `changes` replace fields."""
        before, items = self._store.before(body.previous_response_id, owner), self._store.resolved(body.items, owner)
        messages = numbered(items)
        names = body.names(before, messages)
        return before, items, names, as_request(ChatRequest, {**body.chat(before, messages), **changes}, names)

    async def message(self, request: Request) -> Response:
        timer, parsed = RequestTimer(self.meters), await self._read(request, MessagesRequest)
        names, wanted = await self._convert(request, lambda: _equivalent(parsed.request))

        def write(prepared: PreparedRequest) -> MessagesWriter:
            return MessagesWriter(prepared, card=self.llm.card, omit_thinking=parsed.request.omits_thinking)

        return await self._answer(
            request, wanted, parsed.ignored, timer=timer, write=write, framing=NAMED, prefix="msg_", names=names
        )

    async def count(self, request: Request) -> Response:
        parsed = await self._read(request, CountRequest)
        names, wanted = await self._convert(request, lambda: _equivalent(parsed.request, max_tokens=1))
        counted = await self._work(request, lambda: count_prompt(wanted, self.llm, names=names), compiles=wanted.compiles)
        return JSONResponse({"input_tokens": counted}, headers=_headers(parsed.ignored))

    async def ollama_chat(self, request: Request) -> Response:
        return await self._ollama(request, OllamaChat, "chat")

    async def ollama_generate(self, request: Request) -> Response:
        return await self._ollama(request, OllamaGenerate, "generate")

    async def _ollama(self, request: Request, kind: type[OllamaChat] | type[OllamaGenerate], shape: ollama.Shape) -> Response:
        timer, parsed = RequestTimer(self.meters), await self._read(request, kind)
        body = parsed.request
        names, wanted = await self._convert(request, lambda: self._ollama_request(body.filled()))
        if body.is_empty:
            await self._work(request, lambda: prepare(wanted, self.llm, names=names), compiles=wanted.compiles)
            return JSONResponse(ollama.nothing_generated(self.llm.card, shape), headers=_headers(parsed.ignored))

        def write(prepared: PreparedRequest) -> OllamaWriter:
            openai = OpenAIWriter(prepared, card=self.llm.card, tokenizer=self.llm.tokenizer)
            return OllamaWriter(prepared, shape, card=self.llm.card, timer=timer, openai=openai)

        return await self._answer(
            request, wanted, parsed.ignored, timer=timer, write=write, framing=LINES, prefix="ollama-", names=names
        )

    def _ollama_request(self, body: OllamaChat | OllamaGenerate) -> tuple[Mapping[str, str], ChatRequest | CompletionRequest]:
        """Return a map from field names of the equivalent request to those of Ollama's, for errors, and that request. It is a
        completion if the prompt shall not go through a chat template, or the model has none."""
        names, context = body.names(), self.llm.card.max_context
        if isinstance(body, OllamaGenerate) and (body.raw or (self.llm.template is None and not body.system)):
            return names, as_request(CompletionRequest, body.completion(context=context), names)
        return names, as_request(ChatRequest, body.chat(context=context), names)

    def _openai(self, wanted: CompletionRequest | ChatRequest) -> Callable[[PreparedRequest], OpenAIWriter]:
        return lambda prepared: OpenAIWriter(
            prepared, card=self.llm.card, tokenizer=self.llm.tokenizer, stream_options=wanted.stream_options
        )

    async def _answer(
        self,
        request: Request,
        wanted: CompletionRequest | ChatRequest,
        ignored: tuple[str, ...],
        *,
        timer: RequestTimer,
        write: Callable[[PreparedRequest], Writer],
        framing: Framing = OPENAI,
        prefix: str | None = None,
        names: Mapping[str, str] | None = None,
    ) -> Response:
        """Run a request of any endpoint that generates or scores a reply. `write` makes the writer for the shape of the reply,
        `prefix` begins the reply's id, and `names` maps field names of `wanted` to the caller's, for errors."""
        self._refuse_when_closed()
        line: LineIdentity | None = request.scope.get(LINE)
        background = " in the background" if line is not None else ""  # lines of batches count as a caller of their own
        who = turn_caller(request.scope) + background
        permit = request.scope[PERMIT] = self._accounts.begin(who)
        gone = threading.Event()  # set if the client disconnects, so that the thread that prepares the request stops
        try:
            prepared = await self._work(
                request,
                lambda: prepare(
                    wanted,
                    self.llm,
                    prefix=prefix,
                    names=names or {},
                    caller=who,
                    line=line,
                    cancelled=gone.is_set,
                ),
                compiles=wanted.compiles,
            )
        finally:
            gone.set()
        asked = [choice.request for choice in prepared.choices]
        trace = trace_of(request.scope)
        trace.describe(prepared, self.llm.card)
        permit.reserve(prompt=sum(len(one.prompt) for one in asked), reply=sum(one.params.max_tokens for one in asked))
        note(id=prepared.id, seed=prepared.seed_of(0))
        if self.options.log_prompts:
            note(
                prompts=[self.llm.tokenizer.decode(generation.prompt, skip_special=False) for generation in prepared.generations]
            )
        headers = _headers(ignored) | {"x-request-id": prepared.id}
        writer = write(prepared)
        seconds = self.options.request_seconds if line is None else None
        run = ReplyRun(prepared, writer, llm=self.llm, timer=timer, permit=permit, trace=trace, seconds=seconds)
        if not wanted.stream:
            response = await or_disconnect(request.receive, run.response(headers))
            if line is not None and run.moved:
                raise LineMoved
            return response
        chunks = run.chunks()
        # Wait for the first chunk before the response starts: an error until then can still set the HTTP status.
        first = await or_disconnect(request.receive, anext(chunks))
        return ChunkStream(_after(first, chunks), headers, framing, writer.failed)

    # ------------------------------------------------------------------ lines of batches

    async def answer_line(self, line: BatchLine, identity: LineIdentity, owner: str | None) -> LineResult:
        """Answer a line of a batch as its endpoint answers a live request. Where a live request gets a 429, the line waits and is
        tried again. Raise ShuttingDown if the server stops, EngineLost if the engine has died, and ModelChanged if the model has
        changed: then the line has no result and must run again."""
        handlers = {"/v1/chat/completions": self.chat, "/v1/completions": self.complete, "/v1/score": self.score}
        while True:
            self._refuse_when_closed()
            check_model(self.llm.card.fingerprint, identity)
            scope: Scope = {
                "type": "http",
                "method": "POST",
                "path": line.url,
                "headers": [],
                "query_string": b"",
                LINE: identity,
            }
            if owner is not None:
                scope[CALLER] = owner
            try:
                answer = await handlers[line.url](Request(scope, _received(line.body)))
            except (RateLimited, QueueFull) as error:
                await asyncio.sleep(error.retry_seconds if isinstance(error, RateLimited) else QUEUE_SECONDS)
                continue
            except LineMoved:
                continue
            except ShuttingDown:
                raise
            except Exception as error:
                if isinstance(error, EngineLost) and not self.llm.service.ready:
                    raise  # No engine is left, so the line did not fail: it runs again after the next start.
                answer = error_response(error, path=line.url)
            finally:
                permit: Permit | None = scope.get(PERMIT)
                if permit is not None:
                    permit.close()
            check_model(self.llm.card.fingerprint, identity)
            return result_line(line, identity, status=answer.status_code, body=bytes(answer.body))

    # ------------------------------------------------------------------ tokens

    async def tokenize(self, request: Request) -> Response:
        parsed = await self._read(request, TokenizeRequest)
        return await self._work(request, lambda: self._tokenized(parsed))

    def _tokenized(self, parsed: Parsed[TokenizeRequest]) -> Response:
        wanted = parsed.request
        if wanted.prompt is None:
            ids = chat_prompt(wanted, self.llm)
        else:
            ids = self.llm.encode_within_context(wanted.prompt, param="prompt", add_special=wanted.add_special_tokens)
        body = {"tokens": list(ids), "count": len(ids), "max_model_len": self.llm.card.max_context}
        return JSONResponse(body, headers=_headers(parsed.ignored))

    async def apply_template(self, request: Request) -> Response:
        parsed = await self._read(request, ChatRequest)
        text = await self._work(request, lambda: chat_text(parsed.request, self.llm))
        return JSONResponse({"prompt": text}, headers=_headers(parsed.ignored))

    async def tokenizer_info(self) -> Response:
        tokenizer, template, card = self.llm.tokenizer, self.llm.template, self.llm.card
        special = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
        info: Json = {
            "vocab_size": card.vocab,
            "model_max_length": card.max_context,
            "eos_token_ids": list(card.eos_ids),
            "chat_template": None if template is None else template.source,
        }
        for name, id in special.items():
            info[f"{name}_token_id"] = id
            info[f"{name}_token"] = None if id is None else tokenizer.decode([id], skip_special=False)
        return JSONResponse(info)

    async def detokenize(self, request: Request) -> Response:
        parsed = await self._read(request, DetokenizeRequest)
        return await self._work(request, lambda: self._detokenized(parsed))

    def _detokenized(self, parsed: Parsed[DetokenizeRequest]) -> Response:
        check_ids("tokens", tuple(parsed.request.tokens), vocab=self.llm.card.vocab)
        text = self.llm.tokenizer.decode(parsed.request.tokens, skip_special=False)
        return JSONResponse({"prompt": text}, headers=_headers(parsed.ignored))

    # ------------------------------------------------------------------ about the server

    async def models(self) -> Response:
        """Return one list that has the fields of both OpenAI's and Anthropic's shape."""
        card = self._card()
        bounds = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": [card], **bounds})

    async def model(self, name: str) -> Response:
        self._find_model(name)
        return JSONResponse(self._card())

    async def ollama_show(self, request: Request) -> Response:
        parsed = await self._read(request, OllamaShow)
        self._check_model(parsed.request.name)
        return JSONResponse(ollama.shown_model(self.llm), headers=_headers(parsed.ignored))

    async def ollama_tags(self) -> Response:
        return JSONResponse({"models": [ollama.model_entry(self.llm.card)]})

    async def ollama_ps(self) -> Response:
        return JSONResponse({"models": [ollama.running_entry(self.llm.card)]})

    async def ollama_version(self) -> Response:
        return JSONResponse(ollama.version())

    async def health(self) -> Response:
        self._refuse_when_closed()
        return JSONResponse({"status": "ok"})

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def openapi(self) -> Response:
        found = document(self.llm.card, lenient=self.options.lenient, locked=bool(self.options.keys))
        servers = {"servers": [{"url": self.options.root_path}]} if self.options.root_path else {}
        return JSONResponse(found | servers)

    async def metrics(self) -> Response:
        return Response(self.meters.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    # ------------------------------------------------------------------ inside

    async def _read(self, request: Request, kind: type[RequestT]) -> Parsed[RequestT]:
        body = await read_body(request, limit=self.options.max_body)

        def parsed_body() -> Parsed[RequestT]:
            return parse(kind, read_json(body), lenient=self.options.lenient)

        request.state.long = len(body) >= LONG_BODY
        parsed = await self._convert(request, parsed_body)
        self._check_model(getattr(parsed.request, "model", None))
        if parsed.ignored:
            note(ignored=_headers(parsed.ignored)[IGNORED])
        return parsed

    async def _convert(self, request: Request, work: Callable[[], Result]) -> Result:
        """Run work whose time depends only on the size of the body: for a short body directly, for a long one on a thread."""
        return await self._work(request, work) if request.state.long else work()

    async def _work(self, request: Request, work: Callable[[], Result], *, compiles: bool = False) -> Result:
        """Run work on a thread, so that streams keep running meanwhile. `compiles`: it compiles a response format."""
        return await self._workers.run(request, work, long=request.state.long, compiles=compiles)

    def _check_model(self, name: str | None) -> None:
        """Refuse an unknown model name with `--strict-model-names`. Otherwise any name means the one model that is served."""
        if self.options.strict_model_names:
            self._find_model(name)

    def _find_model(self, name: str | None) -> None:
        card = self.llm.card
        known = (card.name, *self.options.aliases)
        if name is not None and name not in known and name.removesuffix(":latest") not in known:  # Ollama's clients add a tag.
            raise ModelNotFound(f"the model {name!r} is not served here; this server has {card.name!r}", param="model")

    def _refuse_when_closed(self) -> None:
        if self.draining or not self.llm.service.ready:
            reason = "the server is shutting down" if self.draining else "the engine has stopped"
            raise ShuttingDown(f"{reason} and takes no new requests")

    def _card(self) -> Json:
        card = self.llm.card
        return {
            "id": card.name,
            "object": "model",
            "type": "model",
            "display_name": card.name,
            "created": card.created,
            "created_at": datetime.fromtimestamp(card.created, UTC).isoformat(),
            "owned_by": "onedraw",
            "max_model_len": card.max_context,
            "defaults": dict(card.defaults),
            "eos_token_ids": list(card.eos_ids),
            "fingerprint": card.fingerprint,
            "family": card.family,
            "vocab": card.vocab,
            "dtype": card.dtype,
            "device": card.device,
            "aliases": list(self.options.aliases),
        }


def _received(body: bytes) -> Receive:
    """Return an ASGI `receive` that gives a whole body, and never a disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    return receive


def _equivalent(body: CountRequest, **changes: Any) -> tuple[Mapping[str, str], ChatRequest]:
    """Return a map from field names of the equivalent chat request to those of a Messages request, for errors, and that chat
    request."""
    names = body.names()
    return names, as_request(ChatRequest, {**body.chat(), **changes}, names)


class Writer(Protocol):
    """Writes the reply to one request in the shape of its endpoint, either as the chunks of a stream or as one object."""

    def chunks(self, piece: Piece) -> list[Json]: ...

    def ending(self, usage: Usage) -> list[Json]: ...

    def failed(self, error: OnedrawError) -> list[Json]: ...

    def whole(self, replies: Sequence[Reply], usage: Usage) -> Json: ...


class ReplyRun:
    """Runs one prepared request and writes its reply, as chunks or whole."""

    def __init__(
        self,
        prepared: PreparedRequest,
        writer: Writer,
        *,
        llm: LLM,
        timer: RequestTimer,
        permit: Permit,
        trace: RequestTrace,
        seconds: float | None = None,
    ) -> None:
        self._seconds = seconds
        self._deadline = None if seconds is None else timer.arrival + seconds  # by time.monotonic, like asyncio's timeouts
        self._prepared = prepared
        self._writer = writer
        self._llm = llm
        self._timer = timer
        self._permit = permit
        self._trace = trace
        params = prepared.choices[0].request.params
        # logprobs of each token of the replies
        self._logprobs = 0 if params.logprobs is None else 1 + params.logprobs + len(params.logprob_token_ids)
        self._finishes: dict[int, Finish] = {}  # choice index → how the choice ended
        self._usages: dict[int, Usage] = {}  # choice index → its token counts, once the choice has ended

    @property
    def moved(self) -> bool:
        """Whether a pause of the engine cut a choice off (finish reason "moved")."""
        return "moved" in self._finishes.values()

    async def chunks(self) -> AsyncGenerator[list[Json], None]:
        """Yield non-empty lists of chunks. The pieces that one engine step gives are sent in one write."""
        async with aclosing(self._bursts()) as bursts:
            async for burst in bursts:
                # A prompt token may have 128 alternatives. A client that reads slowly gets many steps in one burst.
                scored = sum(len(piece.tokens) * self._logprobs + len(piece.prompt_logprobs or ()) * 128 for piece in burst)
                many = scored > LOGPROBS_ON_LOOP
                if written := await asyncio.to_thread(self._written, burst) if many else self._written(burst):
                    yield written
        if ending := self._writer.ending(self._usage()):
            yield ending

    def _written(self, burst: Sequence[Piece]) -> list[Json]:
        return [chunk for piece in burst for chunk in self._writer.chunks(piece)]

    async def response(self, headers: Mapping[str, str]) -> Response:
        """Return the whole reply. One with many logprobs is written on a thread and in pieces, so that streams keep running."""
        replies = new_replies(self._prepared.generations)
        async with aclosing(self._bursts()) as bursts:
            async for burst in bursts:
                for piece in burst:
                    replies[piece.index].add(piece)

        def write() -> Json:
            return self._writer.whole(replies, self._usage())

        if sum(map(logprobs_in, replies)) <= LOGPROBS_ON_LOOP:
            return JSONResponse(write(), headers=dict(headers))
        written = await asyncio.to_thread(lambda: "".join(ENCODER.iterencode(write())).encode())
        return Response(written, media_type="application/json", headers=dict(headers))

    async def _bursts(self) -> AsyncGenerator[list[Piece], None]:
        self._timer.submit()
        async with aclosing(bursts(self._prepared, self._llm)) as stream:
            try:
                while (burst := await self._next(stream)) is not None:
                    for piece in burst:
                        self._timer.see(piece)
                        self._permit.use(len(piece.tokens))
                        if piece.usage is not None:
                            self._usages[piece.index] = piece.usage
                        if piece.finish is not None:
                            self._finishes[piece.index] = piece.finish
                    yield burst
            except BaseException as error:  # includes the cancellation after the client has disconnected
                self._trace.fail(error)
                raise
        usage = self._usage()
        self._trace.finish(usage, [self._finishes[index] for index in sorted(self._finishes)], self._timer)
        note(prompt_tokens=usage.prompt, completion_tokens=usage.completion, cached_tokens=usage.cached)

    def _usage(self) -> Usage:
        return total_usage(self._prepared, self._usages)

    async def _next(self, stream: AsyncGenerator[list[Piece], None]) -> list[Piece] | None:
        """Return the next pieces, or None at the end. When the deadline passes, TimedOut is raised, which cancels the reply."""
        if self._deadline is None:
            return await anext(stream, None)
        try:
            async with asyncio.timeout_at(self._deadline):
                return await anext(stream, None)
        except TimeoutError:
            raise TimedOut(
                f"the request took longer than {self._seconds:g} seconds, the limit set by --request-seconds"
            ) from None


async def _after(first: list[Json], chunks: AsyncGenerator[list[Json], None]) -> AsyncGenerator[list[Json], None]:
    async with aclosing(chunks):
        yield first
        async for more in chunks:
            yield more


def logprobs_in(reply: Reply) -> int:
    found = [*(reply.prompt_logprobs or ()), *(token.logprobs for token in reply.tokens if token.logprobs is not None)]
    return sum(1 + len(one.top) + len(one.asked) for one in found)


def _headers(ignored: tuple[str, ...]) -> dict[str, str]:
    """Return the header that lists ignored fields. Names are escaped and cut, since a header holds only short ASCII text."""
    names = ", ".join(name.encode("ascii", "backslashreplace").decode() for name in ignored)
    return {IGNORED: "".join(c for c in names if c.isprintable())[:2000]} if ignored else {}


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error, path=request.url.path)


def create_app(llm: LLM, options: ServerOptions) -> FastAPI:
    """Build the app. `app.state.endpoints` is its Endpoints, which `serve` needs for the shutdown."""
    app = FastAPI(title="onedraw", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.endpoints = endpoints = Endpoints(llm, options)
    for path, get in (("/v1/models", endpoints.models), ("/v1/models/{name:path}", endpoints.model)):
        app.add_api_route(path, get, methods=["GET"], response_model=None)
    for path, get in (("/api/tags", endpoints.ollama_tags), ("/api/ps", endpoints.ollama_ps)):
        app.add_api_route(path, get, methods=["GET"], response_model=None)
    app.add_api_route("/api/version", endpoints.ollama_version, methods=["GET"], response_model=None)
    for path, get in (("/tokenizer_info", endpoints.tokenizer_info), ("/version", endpoints.version)):
        app.add_api_route(path, get, methods=["GET"], response_model=None)
    for path, get in (("/health", endpoints.health), ("/metrics", endpoints.metrics), ("/openapi.json", endpoints.openapi)):
        app.add_api_route(path, get, methods=["GET"], response_model=None)
    posts = {
        "/v1/completions": endpoints.complete,
        "/v1/chat/completions": endpoints.chat,
        "/v1/score": endpoints.score,
        "/v1/responses": endpoints.respond,
        "/v1/responses/input_tokens": endpoints.count_response,
        "/v1/messages": endpoints.message,
        "/v1/messages/count_tokens": endpoints.count,
        "/api/chat": endpoints.ollama_chat,
        "/api/generate": endpoints.ollama_generate,
        "/api/show": endpoints.ollama_show,
        "/tokenize": endpoints.tokenize,
        "/detokenize": endpoints.detokenize,
        "/apply-template": endpoints.apply_template,
    }
    for path, post in posts.items():
        app.add_api_route(path, post, methods=["POST"], response_model=None)
    stored = "/v1/responses/{response_id}"
    app.add_api_route(stored, endpoints.response, methods=["GET", "DELETE"], response_model=None)
    app.add_api_route(f"{stored}/input_items", endpoints.response_items, methods=["GET"], response_model=None)
    stored_file, batches = "/v1/files/{file_id}", endpoints.batches
    app.add_api_route(stored_file, batches.file, methods=["GET", "DELETE"], response_model=None)
    app.add_api_route(f"{stored_file}/content", batches.content, methods=["GET"], response_model=None)
    app.add_api_route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"], response_model=None)
    app.add_api_route("/v1/batches/{batch_id}", batches.batch, methods=["GET"], response_model=None)
    app.add_api_route("/v1/files", batches.files, methods=["GET", "POST"], response_model=None)
    app.add_api_route("/v1/batches", endpoints.all_batches, methods=["GET", "POST"], response_model=None)
    weights = WeightEndpoints(llm, options)
    updates = {
        "/pause": weights.pause,
        "/resume": weights.resume,
        "/update_weights": weights.update_weights,
        "/start_weight_update": weights.no_op,
        "/finish_weight_update": weights.no_op,
        "/init_weight_transfer_engine": weights.refuse_nccl,
    }
    for path, post in updates.items():
        app.add_api_route(path, post, methods=["POST"], response_model=None)
    for path, get in (("/is_paused", weights.is_paused), ("/get_world_size", weights.world_size)):
        app.add_api_route(path, get, methods=["GET"], response_model=None)
    app.add_api_route("/server_info", weights.server_info, methods=["GET"], response_model=None)
    app.router.routes.extend(assets.routes(page := assets.load()))
    app.add_exception_handler(OnedrawError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    # Middleware that is added later runs earlier. CORS is added after all middleware that answers with errors, so that error
    # responses get CORS headers too.
    if options.keys:
        app.add_middleware(ApiKeyMiddleware, keys=ApiKeys(options.keys), open_paths=OPEN_PATHS | UPDATE_PATHS | page.keys())
    else:
        app.add_middleware(LocalAccessMiddleware, hosts=(options.host, *options.allow_hosts), origins=options.cors_origins)
    app.add_middleware(PermitMiddleware)
    app.add_middleware(ErrorMiddleware)
    if endpoints.tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=endpoints.tracing)
    if options.cors_origins:
        app.add_middleware(
            CrossOriginMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[IGNORED, "x-request-id", "request-id", "retry-after"],
        )
    app.add_middleware(RequestLog)
    if options.root_path:
        app.add_middleware(RootPathMiddleware, root=options.root_path)
    return app

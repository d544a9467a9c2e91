"""Generate docs/api.md from the tables by which the server checks requests: `python -m onedraw.server.api_docs > docs/api.md`.

The input is the rules of every request model; the output is Markdown. A test compares the output with docs/api.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from onedraw import limits
from onedraw.server.anthropic import messages
from onedraw.server.batch.requests import BatchRequest, ExpiresAfter
from onedraw.server.fields import Rule, Treatment
from onedraw.server.ollama import requests as ollama
from onedraw.server.openai import responses_request as items
from onedraw.server.parsing import TABLES
from onedraw.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FunctionTool,
    JsonSchema,
    Message,
    Prediction,
    ResponseFormat,
    ScoreRequest,
    StreamOptions,
    StructuredOutputs,
    TokenizeRequest,
    ToolSpec,
    WeightUpdateRequest,
)

_HEAD = """# The HTTP interface

This page is generated: `python -m onedraw.server.api_docs > docs/api.md`. A test keeps it current.

| path | what it does |
|---|---|
| `GET /v1/models`, `GET /v1/models/{id}` | the served model: `max_model_len`, sampling `defaults`, `fingerprint` |
| `POST /v1/completions` | continues prompts |
| `POST /v1/chat/completions` | answers messages |
| `POST /v1/score` | the logprobs of a given reply, as the sampler has them |
| `POST /v1/responses` | answers items, in the shape of OpenAI's Responses |
| `GET /v1/responses/{id}`, `DELETE /v1/responses/{id}` | a stored response; deletes it |
| `GET /v1/responses/{id}/input_items` | its input items: `limit`, `order`, `after` |
| `POST /v1/responses/input_tokens` | counts the tokens of a prompt |
| `POST /v1/messages`, `POST /v1/messages/count_tokens` | answers messages, in Anthropic's shape; counts the tokens of a prompt |
| `POST /api/chat`, `POST /api/generate` | answers messages, a prompt or a raw text, in Ollama's shape |
| `POST /api/show`, `GET /api/tags`, `GET /api/ps`, `GET /api/version` | model and version, in Ollama's shape |
| `POST /tokenize` | `{prompt, add_special_tokens}` or `{messages}` → `{tokens, count, max_model_len}` |
| `POST /detokenize` | `{tokens}` → `{prompt}`, special tokens spelled out |
| `POST /apply-template` | the body of a chat → `{prompt}`, the text that the model would read |
| `GET /tokenizer_info` | special tokens, sizes, the chat template |
| `POST /pause`, `POST /resume`, `GET /is_paused` | stops steps, see [training.md](training.md) |
| `POST /update_weights` | `{weight_dir}`, `{port}` or a safetensors file: replaces the weights → `{status, fingerprint}` |
| `GET /server_info`, `GET /get_world_size` | what trainers made for vLLM ask |
| `POST /start_weight_update`, `POST /finish_weight_update` | nothing; trainers made for vLLM call them around an update |
| `POST /init_weight_transfer_engine` | refused: weights are not received over NCCL |
| `GET /version` | the version of the server |
| `GET /health` | 200 when the server accepts requests, else 503; needs no key |
| `GET /metrics` | Prometheus text |
| `GET /openapi.json` | the accepted requests, as an OpenAPI 3.1 document |
| `GET /` | the web page, whose files need no key |

With `--api-key` or `--api-key-file`, everything but `/health` and the web page's files needs the header
`Authorization: Bearer KEY` (or `x-api-key: KEY`).

Without a key the server only accepts a `Host` that is an address, a name without a dot or a name of the local network, except
for `/health` (403 `unknown_host`). This protects against DNS rebinding, in which a web page lets its own host name resolve to
the visitor's machine. `--allow-host NAME` allows one more name. A browser's request from a web page on another site is refused
(403 `foreign_page`) unless `--cors-origin` names the page's origin; one that says `Sec-Fetch-Site: cross-site` and names no
`Origin` is refused too. Following a link to this server, which is a `GET`, is always allowed.

## What happens to a field

A field is **honoured**, **accepted** because it cannot change the answer, accepted **only with neutral values**, or
**refused**: a 400 whose `param` names it. An unknown field is refused too; with `--lenient` it is ignored, and the response
header `x-onedraw-ignored` lists it. `null` always means "not given". Numbers must be finite, and types are not converted:
`"1"` is not a number. A sampling value that is not given comes from the checkpoint's `generation_config.json` (see
`/v1/models`), else it is off. Without `max_tokens` a completion has at most 16 tokens, a chat reply as many as the context has
room for. A reply ends at the context, with the finish reason `length`, however large `max_tokens` is; only a prompt that leaves
no room for a token is refused. With 0 nothing is sampled: the prompt is read into the prefix cache, and returned with `echo`.

One model is served, so a request may call it by any name; with `--strict-model-names` other names than its own and its
`--alias` are not found.

**Tools of other types** than functions (`custom`, `namespace`, `web_search`, `mcp`, Anthropic's `bash_20250124` and the like)
are left out of the prompt, since the server cannot execute them or describe them to the model. The response header
`x-onedraw-ignored` and the server's log name them. A `tool_choice` that forces one is refused.

**Reasoning** effort and budgets are limits: on a model that does not reason they have no effect.

**System messages** may stand anywhere. Where a chat template shows only a first one, several at the beginning are joined, and a
later one becomes part of a user message, between `<system>` tags; where it shows none, so does the first.

## Coming from vLLM or llama.cpp

Requests for the OpenAI and Anthropic paths of these servers work here, but for these differences. The tables below say for every
field what happens to it.

| there | here |
|---|---|
| unknown fields are ignored | refused by name, unless `--lenient` |
| a role of any name (vLLM) | the roles of OpenAI's API |
| a last message of the assistant is continued (llama.cpp) | on chat with `continue_final_message`, on Messages always |
| prompts that mix ids and texts (llama.cpp) | a prompt is ids or text |
| `logit_bias` as pairs, or of texts (llama.cpp) | an object of ids, as in OpenAI's API |
| at most 20 logprobs (vLLM) | at most 128 |
| `post_sampling_probs` (llama.cpp) | `logprobs_mode: "processed"` |
| `allowed_token_ids`, `truncate_prompt_tokens`, `include_stop_str_in_output`, beam search (vLLM) | refused by name |
| mirostat, XTC, top-n-sigma, a dynamic temperature, `samplers` (llama.cpp) | refused by name, accepted where they are off |
| a prompt over the context is shortened, with context shift (llama.cpp) | 400 `context_length_exceeded` |
| `/tokenize` and `/detokenize` name the text `content` (llama.cpp) | `prompt`, as in vLLM |
| the list of models needs no key, every web origin may call (llama.cpp) | the list needs the key; `--cors-origin` names origins |
| `/completion`, `/props`, `/slots`, `/infill`, `/lora-adapters`, embeddings, reranking, LoRA, images, audio | do not exist |
"""

_REPLIES = """## Replies

Replies have OpenAI's shapes. A whole reply is the concatenation of its streamed chunks. Beyond OpenAI's fields:

| field | meaning |
|---|---|
| `choices[].seed` | the seed of this choice; with `n: 1` and one prompt it replays the choice |
| `choices[].stop_reason` | the stop string or token id that ended the reply, else null |
| `choices[].token_ids`, `choices[].prompt_token_ids` | with `return_token_ids`; in a stream the prompt's come once |
| `prompt_token_ids` | the same beside `choices`, where there is one prompt |
| `prompt_logprobs` | with `prompt_logprobs`, as in vLLM: beside `choices` of a chat, in the choice of a completion, see below |
| `choices[].score_checksums` | with `return_checksums`: one string per token, equal exactly when the scores had equal bits |
| `choices[].token_details` | with `return_token_details`: `id`, `text`, `kept`, `rejected` of each token, see below |
| `system_fingerprint` | version, weights (by samples), device, dtypes, chunk length: equal for equal replies to one prompt |
| `usage.prompt_tokens_details.cached_tokens` | prompt tokens that no choice had to compute |
| `usage.completion_tokens_details.reasoning_tokens` | tokens of reasoning, its markers included |
| `usage.completion_tokens_details` | `accepted_prediction_tokens` and `rejected_prediction_tokens`: drafts kept and rejected |
| `message.reasoning_content`, `delta.reasoning_content` | the reasoning of a reasoning model, without its markers |

A prompt counts once in `usage`, however many choices continue it. A token that is not a whole character is written as
`bytes:\\xe2\\x82` in logprobs. A logprob of minus infinity is written as -9999. `text_offset` counts characters of the
choice's text; the tokens of a stop string have offsets beyond its end. In `token_details` a token is `kept` if it was drafted,
`rejected` counts the drafts that were rejected at its position, and `text` has the characters that the token completes.

`prompt_logprobs` has null for the first token of the prompt, and for each one after it an object that maps its id, and those of
the likeliest tokens there, to `logprob`, `rank` and `decoded_token`. The rank is null where the token is not among the likeliest.
The whole prompt is computed, also where it is cached; in a stream the field is in the first chunk.

`logprob_token_ids`, as in vLLM, adds tokens of your choice to `top_logprobs` at every position of the reply: after the likeliest
tokens come those that are not among them, and each entry of a chat has an `id`. In a completion, whose alternatives are named by
their text, such a token is named `token_id:N` if another one has its text. They follow `logprobs_mode`.

The last chunk of a chat choice has its `finish_reason` and an empty `delta`. A tool call that `max_tokens` cuts is a call with
the arguments so far, if its name is complete, and else it is dropped; the finish reason is `length` either way, and its markers
are never part of the content. Where `tool_choice` forces a call, a `response_format` beside it has no effect.

A stream ends with `data: [DONE]`. If it fails after it began, its last event is `{"error": …}`, without `[DONE]`; on
`/v1/responses` it is `error` and then `response.failed`, on `/v1/messages` `error`, below `/api` `{"error": …}` as a line. A
client that disconnects cancels its request.

Replies of `/api/chat` and `/api/generate` have Ollama's shape, and the tokens that the same request has on
`/v1/chat/completions` (with `raw`, on `/v1/completions`). The last object has `done_reason`, the counts and durations, and also
the `seed` and `system_fingerprint` of the reply. `prompt_eval_duration` is the time to the first token, waiting included; nothing
is loaded, so `load_duration` is 0. A tool call is written once it is complete, with its `id`; a call that `num_predict` cuts is
left out. A result of a tool belongs to the call with its `tool_call_id`, else to the first open call of its `tool_name`, else to
the first open call. A request without messages or prompt generates nothing (`done_reason` is `load`), and models are neither
loaded nor unloaded by it. `/api/version` has the version of Ollama whose API this is, which clients compare, and that of the
server as `onedraw`. The endpoints of Ollama that create, copy, pull and delete models, and its embeddings, do not exist here.

Stored responses (`store`, on by default) are kept in memory, up to a limit, and can only be read with the API key that created
them. One of more than 4 MiB as JSON, with the conversation before it, is not stored.

## Continuing a reply

A stream that broke off, or a reply that stopped at `max_tokens`, is continued with `continue_ids`: the ids of its tokens so far
(`return_token_ids`), sent with the same request and the `seed` that the choice reported. The answer is the rest of the same
reply, token for token, on any server with the same `system_fingerprint`; send that too, and a server with another one refuses.
It works with every sampling parameter, response format, tool, thinking budget and stop string.

- The reply holds what follows the given tokens. Its text begins with the text that waited for later tokens there: a part of a
  character, of a marker or of a stop string. (A reply that ended with `length` has shown that text already.)
- `max_tokens`, `min_tokens`, stop strings and `text_offset` count from the beginning of the reply. `usage` counts the prompt
  and the new tokens, so `completion_tokens` of the parts add up to those of the whole reply.
- A reply that the given tokens already end finishes at once, with the reason that the whole reply has.
- `n` choices are continued one by one, each with its own seed and `n: 1`. `echo` and a list of prompts are refused.
- A call that the given tokens began keeps its `index`; its name comes again, with a new id, before the rest of its arguments.
- Refused are ids outside the vocabulary, more of them than `max_tokens`, tokens behind one that ends the reply, and tokens
  that the response format or the thinking budget does not allow.
- A continued response on `/v1/responses` is not stored, so `store: true` is refused there.
- Replies of `/v1/responses` and `/v1/messages` have no token ids; who continues them must have the ids from elsewhere.

To let a reply become longer, continue it with a higher `max_tokens`: the tokens before do not depend on it.

## Scoring a reply

`POST /v1/score` takes a request as it was generated (`messages` or `prompt`, with the same sampling parameters, response format,
tools and stop strings) and a reply: `reply_ids`, or `reply`, a text. It samples nothing and returns one entry per token:

| field | meaning |
|---|---|
| `token_ids`, `tokens` | the reply |
| `logprobs` | the model's own logprob of each token |
| `processed_logprobs` | its logprob in the distribution that is sampled from; -9999 if a filter or a ban excludes it |
| `kept_masses` | the share of the probability that `min_p`, `top_k`, `top_p` left, after bias, penalties, bans, temperature |
| `top_logprobs` | with `top_logprobs: n` or `logprob_token_ids`: the likeliest tokens of each position, then those, with `id` |
| `score_checksums`, `prompt_token_ids` | with `return_checksums` and `return_token_ids` |

The numbers have the bits that a generation of this reply has, alone or batched, with drafts or none, cold or from the cache; the
`seed` does not matter. With `logprobs_mode: "both"` a generation reports the same numbers itself: `processed_logprob` and
`kept_mass` with each token of a chat, `processed_token_logprobs` and `kept_masses` with a completion. Up to 65 tokens are
computed at once, like drafts that are known to be right. With `continue_ids` only the tokens after these are scored. Tokens that
cannot follow each other in a reply are refused: outside the vocabulary, behind one that ends the reply, not allowed by the
response format, behind a stop string. [training.md](training.md) shows how a trainer uses it.

## Limits

Each limit is checked before the work that it bounds, and its error says what to do. Sizes of your choice are flags: `--max-body`,
`--max-context`, `--queue-limit`, `--max-batch`, `--request-seconds`, `--batch-disk`.

| limit | number |
|---|---|
LIMIT_ROWS

## Errors

`{"error": {"message", "type", "param", "code"}}`, always; below `/v1/messages` it is
`{"type": "error", "error": {"type", "message", "param"}}`, and below `/api` `{"error", "param", "code"}`, where `error` is the
message.

| status | when |
|---|---|
| 400 | the request is wrong: `param` names the field, `code` the reason |
| 401 | wrong or missing key |
| 404 | unknown path, a model that is not served (`model_not_found`), a response, file or batch that is not stored |
| 405 | the path does not accept this method |
| 408 | the body did not arrive within a minute |
| 413 | the body is over `--max-body`; a file is over its limit, or does not fit into `--batch-disk` |
| 429 | the queue is full, or a limit per key is reached (`--key-requests` and others); `Retry-After` says when to try again |
| 500 | an error of the server, with an id that is also in the server's log |
| 503 | the server is shutting down |
| 504 | the request took longer than `--request-seconds` |
| 507 | the server's disk is full, so a file, a batch or weights cannot be stored |

Every response has an `x-request-id`, which is also in the server's log: the caller's own, if the request has one of up to 128
letters, digits and `_ . : -`; else the reply's `id`, or a new one.
"""


def page() -> str:
    sections = (
        ("`POST /v1/completions`", CompletionRequest),
        ("`POST /v1/chat/completions`", ChatRequest),
        ("`POST /v1/score`", ScoreRequest),
        ("A message", Message),
        ("A tool", ToolSpec),
        ("The function of a tool", FunctionTool),
        ("`stream_options`", StreamOptions),
        ("`prediction`", Prediction),
        ("`response_format`", ResponseFormat),
        ("`response_format.json_schema`", JsonSchema),
        ("`structured_outputs`", StructuredOutputs),
        ("`POST /v1/responses`", items.ResponsesRequest),
        ("A tool of a response", items.ResponseTool),
        ("`POST /v1/batches`", BatchRequest),
        ("`output_expires_after`", ExpiresAfter),
        ("`POST /v1/messages`", messages.MessagesRequest),
        ("`POST /v1/messages/count_tokens`", messages.CountRequest),
        ("A message in Anthropic's shape", messages.MessageParam),
        ("A tool in Anthropic's shape", messages.MessageTool),
        ("`POST /api/chat`", ollama.OllamaChat),
        ("`POST /api/generate`", ollama.OllamaGenerate),
        ("`options` of Ollama's API", ollama.OllamaOptions),
        ("A message in Ollama's shape", ollama.OllamaMessage),
        ("A tool call in Ollama's shape", ollama.OllamaCall),
        ("The function of a tool call in Ollama's shape", ollama.OllamaFunction),
        ("`POST /api/show`", ollama.OllamaShow),
        ("`POST /tokenize`", TokenizeRequest),
        ("`POST /detokenize`", DetokenizeRequest),
        ("`POST /update_weights`", WeightUpdateRequest),
    )
    tables = (f"## {title}\n\n{_table(TABLES[kind])}" for title, kind in sections)
    inside = (_inside("Items of a response", items.ITEM_RULES), _inside("Blocks in Anthropic's shape", messages.BLOCK_RULES))
    return "\n".join([_HEAD, *tables, *inside, _REPLIES.replace("LIMIT_ROWS", "\n".join(_limits()))])


def _limits() -> list[str]:
    """Return the rows of the Markdown table of limits, whose values are in `onedraw/limits.py`."""
    rows: dict[str, float] = {
        "bytes of the URL and headers of one request, about; then 431": limits.MAX_HEAD,
        "values of one body: commas outside of texts": limits.MAX_BODY_VALUES,
        "lists, objects and fields of one body": limits.MAX_BODY_PARTS,
        "lists and objects inside each other": limits.MAX_BODY_DEPTH,
        "characters of all `stop` strings, of all `bad_words`, of all `dry_sequence_breakers`": limits.MAX_CHARACTERS,
        "characters of a text that is tokenized even if it cannot fit; a longer one is refused as soon as its bytes show that it "
        "cannot (prompts, messages, tools, `prediction`, also where tokens are only counted)": limits.MAX_CHARACTERS_COUNTED,
        "tokens of all prompts of one request": limits.MAX_PROMPT_TOKENS,
        "characters of all stored items that the input of a response refers to": limits.MAX_REFERENCED_CHARACTERS,
        "logprobs of prompts (`echo`, `prompt_logprobs`): their tokens × `n` × (1 + alternatives)": limits.MAX_PROMPT_LOGPROBS,
        "logprobs of replies: replies × `max_tokens` × (1 + alternatives + `logprob_token_ids`)": limits.MAX_REPLY_LOGPROBS,
        "requests that are checked and tokenized at once; callers take turns": limits.MAX_SHORT_WORK,
        "requests with bodies of 256 KiB or more that are read and tokenized at once; callers take turns": limits.MAX_LONG_WORK,
        "requests with a response format that are read at once; callers take turns": limits.MAX_FORMAT_WORK,
        "the same of one caller": limits.MAX_CALLER_FORMAT_WORK,
        "bytes of replies that wait until their clients read them; then connections are closed": limits.MAX_UNREAD,
        "bytes of an uploaded file": limits.MAX_BATCH_FILE,
        "lines of a batch": limits.MAX_BATCH_LINES,
        "files, and batches, of one caller": limits.MAX_BATCH_FILES,
        "characters of a `custom_id`": limits.MAX_CUSTOM_ID,
        "entries of the metadata of a response or batch": limits.MAX_METADATA,
        "characters of a response format: a schema as JSON, a grammar, an expression, all choices": limits.MAX_FORMAT_CHARACTERS,
        "JSON values of a schema inside each other": limits.MAX_FORMAT_NESTING,
        "levels of a schema or grammar, with references and rules followed": limits.MAX_FORMAT_DEPTH,
        "JSON values of a schema, symbols of a grammar": limits.MAX_FORMAT_VALUES,
        "references of a schema": limits.MAX_FORMAT_REFERENCES,
        "members of one list in a schema, texts of a choice": limits.MAX_FORMAT_MEMBERS,
        "rules of a grammar": limits.MAX_FORMAT_RULES,
        "levels of a tool's schema where the model's call syntax is not JSON": limits.MAX_LITERAL_DEPTH,
        "characters of the grammar for the calls of all tools": limits.MAX_TOOL_CHARACTERS,
        "characters that are written and checked for it": limits.MAX_TOOL_WORK,
        "seconds of processor time to compile a response format": limits.COMPILE_SECONDS,
        "the same for the schemas of all tools of a request": limits.TOOL_SECONDS,
        "bytes of memory to compile it": limits.COMPILE_MEMORY,
        "seconds that a new format waits while others are compiled; then a 429": limits.COMPILE_WAIT_SECONDS,
        "characters of an error's message; the rest is cut off": limits.MAX_ERROR_CHARACTERS,
    }
    return [f"| {what} | {number:,g} |" if number < 100 else f"| {what} | {number:,} |" for what, number in rows.items()]


def _inside(title: str, kinds: Mapping[str, tuple[Rule, ...]]) -> str:
    """Return a Markdown table with one row per type of item or block: which of its fields have an effect (are honoured), and
    which are accepted without one."""
    lines = [f"## {title}", "", "| type | honoured | accepted, cannot change the answer |", "|---|---|---|"]
    for kind, rules in kinds.items():
        named = [
            ", ".join(f"`{rule.name}`" for rule in rules if rule.treatment is treatment and rule.name != "type")
            for treatment in (Treatment.HONOURED, Treatment.INERT)
        ]
        lines.append(f"| `{kind}` | {named[0]} | {named[1]} |")
    return "\n".join(lines) + "\n"


def _table(rules: Mapping[str, Rule]) -> str:
    order = list(Treatment)
    lines = ["| field | what we do with it | values | note |", "|---|---|---|---|"]
    for rule in sorted(rules.values(), key=lambda rule: (order.index(rule.treatment), rule.name)):
        lines.append(f"| `{rule.name}` | {rule.treatment} | {_values(rule)} | {rule.note} |")
    return "\n".join(lines) + "\n"


def _values(rule: Rule) -> str:
    match rule.treatment:
        case Treatment.HONOURED:
            return rule.values
        case Treatment.INERT if not rule.neutral:
            return "any"
        case Treatment.REFUSED:
            return "`null`"
        case _:
            return ", ".join(dict.fromkeys(f"`{json.dumps(value)}`" for value in (*rule.neutral, None)))


if __name__ == "__main__":
    print(page(), end="")

"""The OpenAPI document of `/openapi.json`, made from the tables that requests are checked by.

The input is the request models with the rules of their fields, and the model's card. A field is honoured if it has an effect; a
neutral value of another field is accepted because it asks for nothing. Ranges are parsed from the texts that
docs/api.md shows, so the document and that page cannot disagree. A test compares the ranges with the server's behaviour.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, PlainValidator
from pydantic.fields import FieldInfo

from onedraw import __version__
from onedraw.server import protocol
from onedraw.server import protocol as tool_fields
from onedraw.server.anthropic import messages
from onedraw.server.anthropic.messages import CountRequest, MessagesRequest
from onedraw.server.batch.requests import FIELDS, BatchRequest
from onedraw.server.fields import LEFT_OUT_TOOL, Rule, Treatment
from onedraw.server.ollama.requests import OllamaChat, OllamaGenerate, OllamaShow
from onedraw.server.openai import responses_request as items
from onedraw.server.openai.responses_request import ResponsesRequest
from onedraw.server.parsing import TOOL_TYPES, kinds_in, table_of
from onedraw.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ScoreRequest,
    TokenizeRequest,
    WeightUpdateRequest,
)
from onedraw.types import ModelCard

Json = dict[str, Any]

COMPONENT = "#/components/schemas/{model}"
POSTS: Mapping[str, tuple[type[BaseModel], str, str]] = {
    "/v1/completions": (CompletionRequest, "Continue prompts", "Completion"),
    "/v1/chat/completions": (ChatRequest, "Answer messages", "ChatCompletion"),
    "/v1/score": (ScoreRequest, "The logprobs of a given reply", "Score"),
    "/v1/responses": (ResponsesRequest, "Answer items", "Response"),
    "/v1/responses/input_tokens": (ResponsesRequest, "Count the tokens of items", "InputTokens"),
    "/v1/batches": (BatchRequest, "Run the requests of a file", "Batch"),
    "/v1/messages": (MessagesRequest, "Answer messages, in Anthropic's shape", "MessageReply"),
    "/v1/messages/count_tokens": (CountRequest, "Count the tokens of messages", "TokenCount"),
    "/api/chat": (OllamaChat, "Answer messages, in Ollama's shape", "OllamaReply"),
    "/api/generate": (OllamaGenerate, "Answer or continue a prompt, in Ollama's shape", "OllamaReply"),
    "/api/show": (OllamaShow, "The served model, in Ollama's shape", "OllamaModel"),
    "/tokenize": (TokenizeRequest, "A text or a chat as token ids", "Tokens"),
    "/detokenize": (DetokenizeRequest, "Token ids as text", "Text"),
    "/update_weights": (WeightUpdateRequest, "Replace the weights; the body may be a safetensors file instead", "Update"),
    "/apply-template": (ChatRequest, "The prompt of a chat, as text", "Text"),
}
GETS: Mapping[str, tuple[str, str]] = {
    "/v1/models": ("The served model, in a list", "ModelList"),
    "/v1/models/{name}": ("The served model", "Model"),
    "/v1/responses/{response_id}": ("A stored response", "Response"),
    "/v1/responses/{response_id}/input_items": ("Its input items", "ItemList"),
    "/v1/files": ("Files, the newest first", "ItemList"),
    "/v1/files/{file_id}": ("A file", "File"),
    "/v1/batches": ("Batches, the newest first", "ItemList"),
    "/v1/batches/{batch_id}": ("A batch", "Batch"),
    "/api/tags": ("The served model, in Ollama's shape", "OllamaModels"),
    "/api/ps": ("The served model, in Ollama's shape", "OllamaModels"),
    "/api/version": ("The version of Ollama's API, and of the server", "Version"),
    "/is_paused": ("Whether the engine is paused", "Paused"),
    "/get_world_size": ("The number of processes that receive weights", "WorldSize"),
    "/server_info": ("What trainers ask about the server, in vLLM's shape", "ServerInfo"),
    "/tokenizer_info": ("Tokenizer and chat template", "TokenizerInfo"),
    "/version": ("The version of the server", "Version"),
    "/health": ("Whether the server accepts requests", "Health"),
}
PLAIN: Mapping[str, tuple[str, str]] = {
    "/v1/files/{file_id}/content": ("The content of a file", "application/octet-stream"),
    "/metrics": ("Counters for Prometheus", "text/plain"),
    "/openapi.json": ("This document", "application/json"),
    "/": ("The web page", "text/html"),
}
# Paths that trainers call without a body. They need the update token.
ACTIONS: Mapping[str, str] = {
    "/pause": "Submit no more steps; requests wait, or end",
    "/resume": "Go on after a pause",
    "/start_weight_update": "Nothing; clients of vLLM call it before an update",
    "/finish_weight_update": "Nothing; clients of vLLM call it after an update",
    "/init_weight_transfer_engine": "Refused: weights are not received over NCCL",
}
TOKEN: Json = {"security": [{"token": []}]}
PAGE: list[Json] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]
FORM: Json = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in FIELDS}
    | {"file": {"type": "string", "contentMediaType": "application/octet-stream"}, "purpose": {"const": "batch"}},
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
ERROR_SHAPES = {"/v1/messages": "MessageError", "/api/": "OllamaError"}  # the beginning of a path → the shape of its errors
ERRORS = (400, 401, 404, 405, 408, 409, 413, 429, 500, 503, 504)

_TEXTS: Json = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}]}
_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PART: Json = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}, "cache_control": {}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
# A tool that the prompt leaves out. Only its type is read, so its other fields may have any value.
_LEFT_OUT_TOOL: Json = {
    "type": "object",
    "properties": {"type": {"type": "string", "pattern": LEFT_OUT_TOOL.pattern}},
    "required": ["type"],
}
_STRING: Json = {"type": "string"}
_NAME: Json = {"type": "object", "properties": {"name": _STRING}, "required": ["name"], "additionalProperties": False}


def _object(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _allowed(tool: Json) -> Json:
    tools = {"type": "array", "items": _object({"type": {"const": "function"}, **tool}), "minItems": 1}
    return _object({"mode": {"enum": ["auto", "required"]}, "tools": tools})


def _choice(named: Json, allowed: Json) -> Json:
    """Return the schema of `tool_choice`: a mode such as "auto", one tool, or a list of allowed tools."""
    one = _object({"type": {"const": "function"}, **named})
    some = _object({"type": {"const": "allowed_tools"}, **allowed})
    return {"anyOf": [{"enum": ["none", "auto", "required"]}, one, some]}


# Schemas of the values that our own validator functions accept: pydantic cannot derive a schema from a function.
VALIDATOR_SCHEMAS: Mapping[Callable[..., Any], Json] = {
    protocol.function_type: {"const": "function"},
    messages.tool_type: {"const": "custom"},
    protocol.texts: _TEXTS,
    protocol._prompts: {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1},
        ]
    },
    protocol._bias: {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,11}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    messages._text_of: {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
    messages._blocks: {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]},
    tool_fields.chat_choice: _choice({"function": _NAME}, {"allowed_tools": _allowed({"function": _NAME})}),
    tool_fields.response_choice: _choice({"name": _STRING}, _allowed({"name": _STRING})["properties"]),
    items._items: {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]},
    protocol._content: {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]},
}
OBJECTS = {
    "Error": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    },
    "MessageError": {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {"type": "object", "required": ["message", "type"]},
        },
        "required": ["type", "error"],
    },
    "OllamaError": {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error", "param", "code"]},
    "OllamaReply": {
        "type": "object",
        "properties": {"model": {"type": "string"}, "created_at": {"type": "string"}, "done": {"type": "boolean"}},
        "required": ["model", "created_at", "done"],
    },
    "OllamaModel": {
        "type": "object",
        "properties": {"capabilities": {"type": "array", "items": {"type": "string"}}, "model_info": {"type": "object"}},
        "required": ["details", "model_info", "capabilities", "template"],
    },
    "OllamaModels": {
        "type": "object",
        "properties": {
            "models": {"type": "array", "items": {"type": "object", "required": ["name", "model", "digest", "details"]}}
        },
        "required": ["models"],
    },
    "Score": {
        "type": "object",
        "properties": {
            "object": {"const": "score"},
            **{
                name: {"type": "array", "items": {"type": "number"}}
                for name in ("token_ids", "logprobs", "processed_logprobs", "kept_masses")
            },
        },
        "required": ["id", "object", "model", "token_ids", "tokens", "logprobs", "processed_logprobs", "kept_masses", "usage"],
    },
    "Update": {
        "type": "object",
        "properties": {"status": {"type": "string"}, "fingerprint": {"type": "string"}},
        "required": ["status"],
    },
    "Paused": {"type": "object", "properties": {"is_paused": {"type": "boolean"}}, "required": ["is_paused"]},
    "WorldSize": {"type": "object", "properties": {"world_size": {"type": "integer"}}, "required": ["world_size"]},
    "ServerInfo": {"type": "object", "properties": {"vllm_config": {"type": "object"}}, "required": ["vllm_config", "version"]},
    "Version": {"type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]},
    "TokenizerInfo": {
        "type": "object",
        "properties": {"vocab_size": {"type": "integer"}, "chat_template": {"type": ["string", "null"]}},
        "required": ["vocab_size", "model_max_length", "eos_token_ids", "chat_template"],
    },
    "Health": {"type": "object", "properties": {"status": {"const": "ok"}}, "required": ["status"]},
    "Tokens": {
        "type": "object",
        "properties": {
            "tokens": {"type": "array", "items": {"type": "integer"}},
            "count": {"type": "integer"},
            "max_model_len": {"type": "integer"},
        },
        "required": ["tokens", "count", "max_model_len"],
    },
    "InputTokens": {
        "type": "object",
        "properties": {"object": {"const": "response.input_tokens"}, "input_tokens": {"type": "integer"}},
        "required": ["object", "input_tokens"],
    },
    "Deleted": {
        "type": "object",
        "properties": {"id": {"type": "string"}, "object": {"const": "response"}, "deleted": {"const": True}},
        "required": ["id", "object", "deleted"],
    },
    "DeletedFile": {
        "type": "object",
        "properties": {"id": {"type": "string"}, "object": {"const": "file"}, "deleted": {"const": True}},
        "required": ["id", "object", "deleted"],
    },
    "File": {
        "type": "object",
        "properties": {"id": {"type": "string"}, "object": {"const": "file"}, "bytes": {"type": "integer"}},
        "required": ["id", "object", "bytes", "created_at", "expires_at", "filename", "purpose", "status"],
    },
    "Batch": {
        "type": "object",
        "properties": {"id": {"type": "string"}, "object": {"const": "batch"}, "status": {"type": "string"}},
        "required": ["id", "object", "endpoint", "status", "input_file_id", "request_counts", "created_at", "expires_at", "seed"],
    },
    "ItemList": {
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"type": "object"}},
            "has_more": {"type": "boolean"},
        },
        "required": ["object", "data", "has_more"],
    },
    "TokenCount": {"type": "object", "properties": {"input_tokens": {"type": "integer"}}, "required": ["input_tokens"]},
    "Response": {
        "type": "object",
        "properties": {"id": {"type": "string"}, "object": {"const": "response"}, "output": {"type": "array"}},
        "required": ["id", "object", "status", "model", "output", "usage", "seed"],
    },
    "MessageReply": {
        "type": "object",
        "properties": {"id": {"type": "string"}, "type": {"const": "message"}, "content": {"type": "array"}},
        "required": ["id", "type", "role", "model", "content", "stop_reason", "usage", "seed"],
    },
    "Text": {"type": "object", "properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
    "Model": {
        "type": "object",
        "properties": {"id": {"type": "string"}, "object": {"const": "model"}, "max_model_len": {"type": "integer"}},
        "required": ["id", "object", "created", "owned_by"],
    },
    "ModelList": {
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": COMPONENT.format(model="Model")}},
        },
        "required": ["object", "data"],
    },
}


def _reply(kind: str, content: str, shape: Json) -> Json:
    choice = {
        "type": "object",
        "properties": {
            "index": {"type": "integer"},
            content: shape,
            "finish_reason": {"type": "string"},
            "seed": {"type": "integer"},
            "logprobs": {"type": ["object", "null"]},
        },
        "required": ["index", content, "finish_reason", "seed", "logprobs"],
    }
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "system_fingerprint": {"type": "string"},
            "choices": {"type": "array", "items": choice, "minItems": 1},
            "usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]},
        },
        "required": ["id", "object", "created", "model", "choices", "usage"],
    }


def document(card: ModelCard, *, lenient: bool = False, locked: bool = False) -> Json:
    """Build the whole document. With `lenient` unknown fields are allowed; with `locked` the endpoints need an API key."""
    schemas: Json = dict(OBJECTS)
    schemas["Completion"] = _reply("text_completion", "text", {"type": "string"})
    schemas["ChatCompletion"] = _reply("chat.completion", "message", {"type": "object", "required": ["role", "content"]})
    bodies: list[type[BaseModel]] = [model for model, _, _ in POSTS.values()]
    sifted = {model.__name__: model for body in bodies for model in (body, *kinds_in(body))}
    for model in bodies:
        inner = model.model_json_schema(ref_template=COMPONENT).get("$defs", {})
        schemas |= {name: _without(found) for name, found in inner.items() if name not in sifted}
    schemas |= {name: schema(model, table_of(model), card=card, lenient=lenient) for name, model in sifted.items()}
    key: Json = {"security": [{"key": []}]} if locked else {}
    paths: Json = {path: {"post": {**_post(path, *found), **key}} for path, found in POSTS.items()}
    for path, (summary, shape) in GETS.items():
        paths.setdefault(path, {})["get"] = {**_get(path, summary, _json(shape)), **({} if path == "/health" else key)}
    for path, (summary, media) in PLAIN.items():
        content: Json = {media: {"schema": {"type": "object" if media.endswith("json") else "string"}}}
        paths[path] = {"get": {**_get(path, summary, content), **({} if path == "/" else key)}}
    for path, summary in ACTIONS.items():
        paths[path] = {"post": {**_get(path, summary, _json("Update")), **TOKEN}}
    paths["/pause"]["post"]["parameters"] = [{"name": "mode", "in": "query", "schema": {"enum": ["keep", "abort"]}}]
    paths["/update_weights"]["post"] |= TOKEN
    stored = "/v1/responses/{response_id}"
    paths[stored]["delete"] = {**_get(stored, "Delete a stored response", _json("Deleted")), **key}
    paths["/v1/responses/{response_id}/input_items"]["get"]["parameters"] = PAGE
    form = {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}
    paths["/v1/files"]["post"] = {**_get("/v1/files", "Upload a file", _json("File")), "requestBody": form, **key}
    paths["/v1/files/{file_id}"]["delete"] = {**_get("/v1/files", "Delete a file", _json("DeletedFile")), **key}
    cancel = "/v1/batches/{batch_id}/cancel"
    paths[cancel] = {"post": {**_get(cancel, "Cancel a batch", _json("Batch")), **key}}
    paths["/v1/batches"]["get"]["parameters"] = PAGE
    purpose: Json = {"name": "purpose", "in": "query", "schema": {"type": "string"}}
    paths["/v1/files"]["get"]["parameters"] = [
        {**PAGE[0], "schema": {**PAGE[0]["schema"], "maximum": 10_000}},
        *PAGE[1:],
        purpose,
    ]
    paths["/v1/responses"]["post"]["responses"]["200"]["links"] = _links(paths, stored)
    for path, methods in paths.items():
        for name in re.findall(r"{(\w+)}", path):
            given = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for found in methods.values():
                found["parameters"] = [given, *found.get("parameters", [])]
    components: Json = {
        "schemas": schemas,
        "securitySchemes": {name: {"type": "http", "scheme": "bearer"} for name in ("key", "token")},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Onedraw", "version": __version__, "summary": "Speed never changes the answer."},
        "paths": paths,
        "components": components,
    }


def _links(paths: Json, stem: str) -> Json:
    """Add links from a created response to the endpoints that take its id, so tools can follow them."""
    links: Json = {}
    for path, methods in paths.items():
        for method, operation in methods.items() if path.startswith(stem) else ():
            operation["operationId"] = name = f"{method}_{path.rpartition('/')[2].strip('{}')}"
            links[name] = {"operationId": name, "parameters": {"response_id": "$response.body#/id"}}
    return links


def _post(path: str, model: type[BaseModel], summary: str, shape: str) -> Json:
    content = _json(shape)
    if "stream" in model.model_fields and shape not in ("InputTokens", "Score"):
        media = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
        content = {**content, media: {"schema": {"type": ["string", "object"]}}}
    body = {"required": True, "content": _json(model.__name__)}
    return {**_get(path, summary, content), "requestBody": body}


def _get(path: str, summary: str, content: Json) -> Json:
    error = next((shape for beginning, shape in ERROR_SHAPES.items() if path.startswith(beginning)), "Error")
    errors = {str(status): {"description": HTTPStatus(status).phrase, "content": _json(error)} for status in ERRORS}
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}, **errors}}


def _json(shape: str) -> Json:
    return {"application/json": {"schema": {"$ref": COMPONENT.format(model=shape)}}}


# ---------------------------------------------------------------------------------------------- schemas of request bodies


def schema(model: type[BaseModel], rules: Mapping[str, Rule], *, card: ModelCard, lenient: bool = False) -> Json:
    """Return the schema of a request body: honoured fields with their ranges, other fields with their neutral values."""
    made = model.model_json_schema(ref_template=COMPONENT)
    required = made.get("required", [])
    fields = {info.alias or name: info for name, info in model.model_fields.items()}
    properties: Json = {}
    for name, rule in rules.items():
        if rule.treatment is Treatment.HONOURED:
            found = _honoured(name, fields[name], made["properties"][name], card=card)
        else:
            found = _other(rule)
        described = {"description": rule.note} if rule.note else {}
        properties[name] = {**(found if name in required else _nullable(found)), **described}
    # A field that is null counts as not sent, even if its name is unknown.
    body: Json = {"type": "object", "properties": properties, "additionalProperties": lenient or {"type": "null"}}
    if required:
        body["required"] = required
    return {"anyOf": [body, _LEFT_OUT_TOOL]} if model in TOOL_TYPES else body


def _honoured(name: str, field: FieldInfo, made: Json, *, card: ModelCard) -> Json:
    validator = next((entry for entry in field.metadata if isinstance(entry, PlainValidator)), None)
    if validator is None:
        validator = next((entry for entry in _inner(field) if isinstance(entry, PlainValidator)), None)
    if validator is not None:
        return VALIDATOR_SCHEMAS[validator.func]
    found = _without(made)
    for inner in (found, *found.get("anyOf", [])):
        if inner.get("type") in ("integer", "number"):
            inner |= limits(str((field.json_schema_extra or {}).get("values", "")))  # type: ignore[union-attr]
    if name in ("tokens", "stop_token_ids"):
        found["items"] = {"type": "integer", "minimum": 0, "exclusiveMaximum": card.vocab}
    return found


def _inner(field: FieldInfo) -> tuple[Any, ...]:
    """Return the metadata of the `Annotated` members of a union such as `Annotated[…] | None`."""
    arguments = getattr(field.annotation, "__args__", ())
    return tuple(entry for argument in arguments for entry in getattr(argument, "__metadata__", ()))


def _without(made: Json) -> Json:
    """Return the schema without documentation, and without null, which `_nullable` adds again."""
    found = {key: value for key, value in made.items() if key not in ("title", "values", "default", "description")}
    if "properties" in found:
        shown = ("title", "values", "default")
        found["properties"] = {
            name: {key: value for key, value in inner.items() if key not in shown} for name, inner in found["properties"].items()
        }
    if "anyOf" in found:
        found["anyOf"] = [dict(entry) for entry in found["anyOf"] if entry.get("type") != "null"]
        if len(found["anyOf"]) == 1:
            return {**found["anyOf"][0]}
    return found


def limits(values: str) -> Json:
    """Turn the text of a range, such as 'integer, 1 … 128', 'number over 0' or 'integer >= -1', into JSON schema bounds."""
    found: Json = {}
    if between := re.search(r"(over )?(-?[\d.^]+) … (.+)", values):
        found["exclusiveMinimum" if between[1] else "minimum"] = _number(between[2])
        found["maximum"] = _number(between[3])
    elif above := re.search(r"(over|>=) (-?[\d.]+)", values):
        found["exclusiveMinimum" if above[1] == "over" else "minimum"] = _number(above[2])
    return found


def _number(text: str) -> int | float:
    if power := re.fullmatch(r"(-?)(\d+)\^(\d+)( - 1)?", text):
        value: int = int(power[2]) ** int(power[3])
        return -value if power[1] else value - 1 if power[4] else value
    return float(text) if "." in text else int(text)


def _nullable(found: Json) -> Json:
    return {"anyOf": [found, {"type": "null"}]} if found else {}


def _other(rule: Rule) -> Json:
    match rule.treatment:
        case Treatment.INERT if not rule.neutral:
            return {}
        case Treatment.REFUSED:
            return {"type": "null"}
        case _:
            return {"enum": list(rule.neutral)}

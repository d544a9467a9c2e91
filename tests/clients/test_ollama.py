"""The ollama package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator

import ollama
import pytest

from tests.clients.conftest import HELLO, WEATHER, Server, running
from tests.clients.test_coding_agents import ANSWER, scripted

OPTIONS = {"seed": 7, "num_predict": 12}


def client_of(server: Server, key: str | None = None) -> ollama.Client:
    return ollama.Client(host=server.url, headers={"Authorization": f"Bearer {key or server.key}"})


@pytest.fixture
def client(server: Server, needs: Callable[..., None]) -> ollama.Client:
    needs(path="/api/chat")
    return client_of(server)


def test_chat(server: Server, client: ollama.Client) -> None:
    reply = client.chat(server.model, HELLO, options=OPTIONS)
    assert reply.message.content == server.reply(seed=7, max_tokens=12)
    assert (reply.done, reply.done_reason, reply.eval_count) == (True, "length", 12)
    assert reply.total_duration
    assert reply.prompt_eval_count


def test_streaming(server: Server, client: ollama.Client) -> None:
    parts = list(client.chat(server.model, HELLO, options=OPTIONS, stream=True, keep_alive="5m"))
    assert "".join(part.message.content or "" for part in parts) == server.reply(seed=7, max_tokens=12)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_streaming_with_asyncio(server: Server, client: ollama.Client) -> None:
    async def text() -> str:
        one = ollama.AsyncClient(host=server.url, headers={"Authorization": f"Bearer {server.key}"})
        stream = await one.chat(server.model, HELLO, options=OPTIONS, stream=True)
        return "".join([part.message.content or "" async for part in stream])

    assert asyncio.run(text()) == server.reply(seed=7, max_tokens=12)


def test_generate(server: Server, client: ollama.Client) -> None:
    assert client.generate(server.model, "Hello.", options=OPTIONS).response == server.reply(seed=7, max_tokens=12)
    parts = client.generate(server.model, "Hello.", raw=True, options=OPTIONS, stream=True)
    raw = "".join(part.response or "" for part in parts)
    assert raw == client.generate(server.model, "Hello.", raw=True, options=OPTIONS).response


def test_structured_output_and_logprobs(server: Server, client: ollama.Client) -> None:
    reply = client.chat(server.model, HELLO, format=WEATHER, options={"seed": 7}, logprobs=True, top_logprobs=2)
    assert 1 <= json.loads(reply.message.content or "")["days"] <= 9
    assert reply.logprobs
    assert len(reply.logprobs[0].top_logprobs or []) == 2


def test_thinking(server: Server, client: ollama.Client) -> None:
    options = {"seed": 7, "num_predict": 40}
    assert client.chat(server.model, HELLO, think=True, options=options).message.thinking
    assert client.chat(server.model, HELLO, think=False, options=options).message.thinking is None


def test_about_the_model(server: Server, client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == [server.model]
    assert [model.context_length for model in client.ps().models] == [4096]
    shown = client.show(server.model)
    assert "tools" in (shown.capabilities or [])
    assert 4096 in (shown.modelinfo or {}).values()


def test_errors(server: Server, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="temperature") as refused:
        client.chat(server.model, HELLO, options={"temperature": -1})
    assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="reads text"):
        client.chat(server.model, [{**HELLO[0], "images": ["aGk="]}])
    with pytest.raises(ollama.ResponseError, match="not served") as unknown:
        client.chat("another", HELLO)
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="key"):
        client_of(server, "wrong").list()
    with pytest.raises(ollama.ResponseError, match="no such path"):
        client.embed(server.model, "a")


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with scripted(tmp_path_factory.mktemp("ollama") / "model", "days_of_rain", {"city": "Oslo"}) as server:
        yield server


def days_of_rain(city: str) -> int:
    """How many days it rains.

    Args:
        city: the name of the city
    """
    return len(city)


@pytest.mark.parametrize("stream", [False, True])
def test_a_python_function_is_called_and_its_result_answered(caller: Server, stream: bool) -> None:
    client, said = client_of(caller), list(HELLO)
    asked = {"tools": [days_of_rain], "options": {"temperature": 0}}
    parts = list(client.chat(caller.model, said, stream=True, **asked)) if stream else [client.chat(caller.model, said, **asked)]
    (call,) = [call for part in parts for call in part.message.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("days_of_rain", {"city": "Oslo"})
    result = days_of_rain(**call.function.arguments)
    said += [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": call.function.name, "content": str(result)},
    ]
    assert client.chat(caller.model, said, **asked).message.content == ANSWER


def test_a_name_with_ollamas_tag_is_the_served_model() -> None:
    with running("--strict-model-names") as server:
        assert client_of(server).chat(f"{server.model}:latest", HELLO, options={"num_predict": 1}).done

"""Pieces of a reply: the number of tokens per event changes neither the text nor the channel of a token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from onedraw.engine.engine import Event
from onedraw.errors import BadParameter
from onedraw.llm.reply import Reply
from onedraw.llm.reply_stream import Generation, ReplyStream
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.reasoning import ReasoningSyntax
from onedraw.text.reply_parser import PLAIN_TEXT, ReplySyntax
from onedraw.text.tools.dialects import CallableTools
from onedraw.types import Finish, Piece, SampledToken, SamplingParams

TOKENIZER = fake_tokenizer()
EOS = 256
THINK = ReasoningSyntax("<think>", "</think>", "\n</think>\n\n")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
SYNTAX = ReplySyntax(reasoning=THINK, thinking="may", calls=CallableTools("hermes"))
REPLIES = {
    "all": f"<think>\nhm é😀\n</think>\n\nAh, so 😀é.\n{CALL}\n{CALL} and more stopp",
    "text": "😀é" * 5 + " sto and st",
    "call": f"{CALL}",
    "cut": '😀 well <tool_call>\n{"na',
}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special=False)


def pieces(
    tokens: Sequence[int], cuts: Sequence[int], *, syntax: ReplySyntax, stop: tuple[str, ...], finish: Finish
) -> list[Piece]:
    generation = Generation(prompt=(1,), params=SamplingParams(stop_ids=frozenset({EOS})), stop=stop, syntax=syntax)
    stream = ReplyStream(0, generation, TOKENIZER)
    found: list[Piece] = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        if stream.done:
            break
        chosen = tuple(SampledToken(token) for token in tokens[start:end])
        found += stream.push(Event("r", chosen, finish if end == len(tokens) else None))
    return found


def summary(found: Sequence[Piece]) -> tuple[list[tuple[int, str]], dict[str, str], Finish | None, object]:
    """Return the tokens with their channels, the texts by channel, and the finish reason."""
    channels = [
        (choice.token, f"{piece.channel}{'' if piece.call is None else piece.call.index}")
        for piece in found
        for choice in piece.tokens
    ]
    texts: dict[str, str] = {}
    for piece in found:
        texts[piece.channel] = texts.get(piece.channel, "") + piece.text
    return channels, {name: text for name, text in texts.items() if text}, found[-1].finish, found[-1].stop_reason


def blocks(found: Sequence[Piece]) -> list[tuple[str, str, list[int], bool]]:
    reply = Reply()
    for piece in found:
        reply.add(piece)
    return [(block.channel, block.text, [token.token for token in block.tokens], block.cut) for block in reply.blocks]


@pytest.mark.parametrize("name", list(REPLIES))
@pytest.mark.parametrize("stop", [(), ("stop",), ("t",)])
@pytest.mark.parametrize("syntax", [SYNTAX, PLAIN_TEXT], ids=["read", "plain"])
def test_the_number_of_tokens_per_event_changes_nothing(name: str, stop: tuple[str, ...], syntax: ReplySyntax) -> None:
    for ends in (True, False):
        tokens = [*ids(REPLIES[name]), *([EOS] if ends else [])]
        finish: Finish = "stop" if ends else "length"
        one_by_one = pieces(tokens, range(1, len(tokens)), syntax=syntax, stop=stop, finish=finish)
        expected, expected_blocks = summary(one_by_one), blocks(one_by_one)
        rng = random.Random(1)
        for _ in range(40):
            cuts = sorted(rng.sample(range(1, len(tokens)), rng.randrange(len(tokens) - 1)))
            found = pieces(tokens, cuts, syntax=syntax, stop=stop, finish=finish)
            assert summary(found) == expected
            assert blocks(found) == expected_blocks


def test_every_content_token_belongs_to_a_content_block() -> None:
    tokens = [*ids("😀é 😀"), EOS]
    found = pieces(tokens, range(1, len(tokens)), syntax=PLAIN_TEXT, stop=("é é",), finish="stop")
    assert blocks(found) == [("content", "😀é 😀", tokens, False)]


@pytest.mark.parametrize("stop", [(), ("{",), ("<tool",)])
def test_a_call_cut_off_before_its_name_is_no_stop(stop: tuple[str, ...]) -> None:
    tokens = ids(REPLIES["cut"])
    found = pieces(tokens, [3], syntax=SYNTAX, stop=stop, finish="length")
    assert found[-1].finish == "length"
    assert found[-1].stop_reason is None


def test_held_back_text_comes_before_a_call_that_is_cut_off() -> None:
    tokens = ids('well st<tool_call>\n{"na')
    for stop in ((), ("stop",)):
        found = pieces(tokens, [3], syntax=SYNTAX, stop=stop, finish="length")
        assert summary(found)[1] == {"content": "well st"}


@pytest.mark.parametrize(
    ("reply", "texts"),
    [
        ("<think>\nhm\n</think>\n\nAh.", [("Ah.", "Ah.")]),
        (f"{CALL} after", [("after", "after")]),
        (f"Sure.{CALL}", [("Sure.", 'Sure.<tool_call>\n{"name": "f')]),
    ],
)
def test_a_text_block_has_the_tokens_of_its_text(reply: str, texts: list[tuple[str, str]]) -> None:
    tokens = ids(reply)
    found = pieces(tokens, range(1, len(tokens)), syntax=SYNTAX, stop=(), finish="stop")
    assert [(text, TOKENIZER.decode(own)) for kind, text, own, _ in blocks(found) if kind == "content"] == texts


def test_a_stop_string_shortens_only_the_open_block() -> None:
    begun = '<tool_call>\n{"name": "f", "arguments": {"a"'
    found = pieces(ids(CALL + begun), [5], syntax=SYNTAX, stop=(), finish="length")
    assert [(kind, cut) for kind, _, _, cut in blocks(found)] == [("tool", False), ("tool", True)]
    found = pieces(ids(CALL), [5], syntax=SYNTAX, stop=(), finish="length")
    assert [(kind, cut) for kind, _, _, cut in blocks(found)] == [("tool", False)]


def test_a_token_after_an_incomplete_character_begins_after_it() -> None:
    class Bytes:
        def token_bytes(self, token: int) -> bytes:
            return [b"\xe6\x97", b"y", b"\xa5", b"z", b"\xff"][token]

        def is_special(self, token: int) -> bool:
            return False

        strips_space = False

    stream = ReplyStream(0, Generation(prompt=(1,), params=SamplingParams()), Bytes())  # type: ignore[arg-type]

    def places(*tokens: int) -> list[tuple[int, str]]:
        (piece,) = stream.push(Event("r", tuple(map(SampledToken, tokens))))
        return [(token.offset, token.text) for token in piece.tokens]

    assert places(0, 1) == [(0, ""), (1, "\ufffdy")]
    assert places(0, 2, 3) == [(2, ""), (2, "日"), (3, "z")]
    assert places(4, 3) == [(4, "\ufffd"), (5, "z")]


def test_the_stop_token_of_a_reply_adds_no_text() -> None:
    params = SamplingParams(stop_ids=frozenset(ids("!")))
    stream = ReplyStream(0, Generation(prompt=(1,), params=params), TOKENIZER)
    tokens = [*ids("é")[:1], *ids("!")]  # half a character, then the stop token
    (piece,) = stream.push(Event("r", tuple(map(SampledToken, tokens)), "stop", tokens[-1]))
    assert (piece.text, piece.stop_reason) == ("\ufffd", tokens[-1])
    assert [(token.offset, token.text) for token in piece.tokens] == [(0, ""), (1, "\ufffd!")]


@pytest.mark.parametrize("name", list(REPLIES))
@pytest.mark.parametrize("stop", [(), ("stop",), ("t",), (" st", "stopp")])
@pytest.mark.parametrize("syntax", [SYNTAX, PLAIN_TEXT], ids=["read", "plain"])
def test_a_stream_that_is_cut_after_any_token_is_continued_without_a_gap(
    name: str, stop: tuple[str, ...], syntax: ReplySyntax
) -> None:
    for ends in (True, False):
        tokens = [*ids(REPLIES[name]), *([EOS] if ends else [])]
        finish: Finish = "stop" if ends else "length"
        whole = pieces(tokens, range(1, len(tokens)), syntax=syntax, stop=stop, finish=finish)
        kept = [token.token for piece in whole for token in piece.tokens]
        for count in range(1, len(kept) + 1):
            generation = Generation(
                (1,), SamplingParams(stop_ids=frozenset({EOS})), stop, syntax=syntax, given=tuple(kept[:count])
            )
            stream = ReplyStream(0, generation, TOKENIZER)
            new = () if stream.ended_by_text else tuple(map(SampledToken, tokens[count:]))
            rest = stream.push(Event("r", new, finish))
            (channels, *same), (expected, *of_whole) = summary([*stream.begun, *rest]), summary(whole)
            assert [token for token, _ in channels] == [token for token, _ in expected]
            assert same == of_whole
            assert rest[-1].usage is not None
            assert rest[-1].usage.completion == len(kept) - count == sum(len(piece.tokens) for piece in rest)


def test_tokens_behind_the_end_of_a_reply_are_refused() -> None:
    generation = Generation((1,), SamplingParams(), stop=("stop",), given=tuple(ids("one stop two")))
    with pytest.raises(
        BadParameter, match="continue_ids: the reply ends after 8 of these 12 tokens, with the stop string 'stop'"
    ):
        ReplyStream(0, generation, TOKENIZER)

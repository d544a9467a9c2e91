"""`onedraw chat`: a conversation that a person steers."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onedraw.build.llm import open_door
from onedraw.cli.chat import HELP_LINES, Conversation, answer, line_reader, obey, talk
from onedraw.llm.llm import Door, Prompted, settled_stats
from onedraw.llm.options import Wishes
from onedraw.settings import Settings
from tests.cli.running import FAKE, Terminal
from tests.serve.running import slowed


@pytest.fixture
def door() -> Iterator[Door]:
    with open_door(Settings(model="fake", backend="fake")) as opened:
        yield opened


def a_conversation(**wishes: object) -> Conversation:
    return Conversation(Wishes.of(**{"max_tokens": 8, "ignore_eos": True, **wishes}))


def typing(*lines: str | type[BaseException]) -> Callable[[], str]:
    """A person who types these lines, presses ctrl-C where KeyboardInterrupt stands, and leaves with ctrl-D."""
    script = iter(lines)

    def read() -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


class Interrupting(io.StringIO):
    """A terminal at which somebody presses ctrl-C while the answer is being written."""

    pressed = False

    def write(self, text: str) -> int:
        if text and not self.pressed and self.getvalue():
            self.pressed = True
            raise KeyboardInterrupt
        return super().write(text)


def test_an_answer_is_remembered_and_its_seed_is_shown(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = a_conversation(seed=5)
    answer(door, conversation, "hello")
    out = capsys.readouterr().out
    assert [t["role"] for t in conversation.turns] == ["user", "assistant"]
    assert out.startswith(conversation.turns[1]["content"] + "\n")
    assert "seed 5" in out


def test_the_next_question_is_asked_with_all_that_was_said(door: Door) -> None:
    conversation = a_conversation(seed=5)
    talk(door, conversation, read=typing("hello", "and again"))
    replayed = a_conversation(seed=5)
    answer(door, replayed, "and again")
    assert [t["role"] for t in conversation.turns] == ["user", "assistant"] * 2
    assert conversation.turns[3] != replayed.turns[1]  # another history, another prompt


def test_a_seed_repeats_an_answer(door: Door) -> None:
    conversation = a_conversation()
    talk(door, conversation, read=typing("hello"))
    first, seed = conversation.turns[1], conversation.seeds[0]
    talk(door, conversation, read=typing("/undo", f"/seed {seed}", "hello"))
    assert conversation.turns[1] == first


def test_control_c_stops_the_answer_and_keeps_what_was_said(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Interrupting()
    monkeypatch.setattr(sys, "stdout", screen)
    conversation = a_conversation(max_tokens=1500)
    talk(slowed(door, 0.02), conversation, read=typing("hello", "/max 3", "go on"))
    assert "stopped" in screen.getvalue()
    assert [t["role"] for t in conversation.turns] == ["user", "assistant"] * 2
    assert settled_stats(door).completion_tokens < 1500


def test_an_answer_stopped_before_its_first_word_leaves_no_question(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(ask: object) -> Iterator[object]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(door, "stream", interrupted)
    conversation = a_conversation()
    answer(door, conversation, "hello")
    assert conversation.turns == []


def test_control_c_at_the_prompt_does_not_leave(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = a_conversation()
    talk(door, conversation, read=typing(KeyboardInterrupt, "hello"))
    assert len(conversation.turns) == 2
    assert "/quit leaves" in capsys.readouterr().out


def test_quit_leaves_before_the_next_line(door: Door) -> None:
    conversation = a_conversation()
    talk(door, conversation, read=typing("/quit", "hello"))
    assert conversation.turns == []


def test_a_question_that_cannot_be_answered_is_taken_back(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = a_conversation(max_tokens=5000)
    talk(door, conversation, read=typing("hello"))
    assert conversation.turns == []
    assert "over the context" in capsys.readouterr().out


def test_an_answer_that_fails_under_way_takes_its_question_back(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = a_conversation(min_tokens=1, stop_token_ids=tuple(range(door.card.vocab)))
    talk(door, conversation, read=typing("hello"))
    assert conversation.turns == []
    assert "leave no token to choose" in capsys.readouterr().out


def test_control_c_before_an_answer_begins_does_not_leave(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    render, pressed = door.chat, iter([True])

    def interrupted(*given: Any, **named: Any) -> Prompted:
        if next(pressed, False):
            raise KeyboardInterrupt
        return render(*given, **named)

    monkeypatch.setattr(door, "chat", interrupted)
    conversation = a_conversation()
    talk(door, conversation, read=typing("hello", "once more"))
    assert [t["content"] for t in conversation.turns[:1]] == ["once more"]


def test_settings_change_while_talking() -> None:
    conversation = a_conversation()
    assert obey(conversation, "/temperature 0.3") == "temperature 0.3"
    obey(conversation, "/max 77")
    obey(conversation, "/seed 12")
    assert (conversation.wishes.temperature, conversation.wishes.max_tokens, conversation.wishes.seed) == (0.3, 77, 12)
    obey(conversation, "/seed")
    assert conversation.wishes.seed is None
    obey(conversation, "/system be brief")
    assert conversation.messages() == [{"role": "system", "content": "be brief"}]
    obey(conversation, "/system")
    assert conversation.messages() == []


def test_undo_takes_back_one_exchange_and_reset_all() -> None:
    conversation = a_conversation()
    for word in ("one", "two"):
        conversation.turns += [{"role": "user", "content": word}, {"role": "assistant", "content": word}]
        conversation.seeds.append(1)
    obey(conversation, "/undo")
    assert [t["content"] for t in conversation.turns] == ["one", "one"]
    assert len(conversation.seeds) == 1
    obey(conversation, "/reset")
    assert (conversation.turns, conversation.seeds) == ([], [])
    assert obey(conversation, "/undo") == "nothing to take back"


def test_a_saved_conversation_can_be_read_again(tmp_path: Path) -> None:
    conversation = a_conversation()
    conversation.turns, conversation.seeds = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ja"}], [3]
    assert obey(conversation, f"/save {tmp_path / 'talk.json'}").startswith("saved")
    saved = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))
    assert saved == {"messages": conversation.turns, "seeds": [3]}


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    assert "cannot write" in obey(a_conversation(), f"/save {tmp_path / 'no' / 'folder'}")
    assert "save where" in obey(a_conversation(), "/save")


def test_mistyped_commands_are_answered(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    talk(door, a_conversation(), read=typing("/sed 5", "/temperature warm", "/help"))
    out = capsys.readouterr().out
    assert "no command /sed" in out
    assert "not a number: 'warm'" in out
    assert all(line in out for line, _ in HELP_LINES)


def test_a_piped_conversation_ends_with_its_input(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/quit\n"))
    assert line_reader() is input
    assert terminal.run("chat", *FAKE, "--max-tokens", "4", "--seed", "9") == 0
    assert "seed 9" in terminal.out

"""`onedraw chat`: a conversation in the terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onedraw.build.llm import build_llm
from onedraw.cli.chat import HELP_LINES, Conversation, answer, chat_loop, line_reader, run_command
from onedraw.llm.llm import LLM, ChatPrompt, idle_stats
from onedraw.llm.request_options import RequestOptions
from onedraw.settings import Settings
from tests.cli.running import FAKE, Terminal
from tests.server.running import slowed


@pytest.fixture
def llm() -> Iterator[LLM]:
    with build_llm(Settings(model="fake", backend="fake")) as opened:
        yield opened


def a_conversation(**options: object) -> Conversation:
    return Conversation(RequestOptions.of(**{"max_tokens": 8, "ignore_eos": True, **options}))


def typing(*lines: str | type[BaseException]) -> Callable[[], str]:
    """Input lines; KeyboardInterrupt in the list is ctrl-C, and the end of the list is ctrl-D."""
    script = iter(lines)

    def read() -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


class Interrupting(io.StringIO):
    """Output during which ctrl-C is pressed."""

    pressed = False

    def write(self, text: str) -> int:
        if text and not self.pressed and self.getvalue():
            self.pressed = True
            raise KeyboardInterrupt
        return super().write(text)


def test_a_reply_becomes_part_of_the_conversation_and_its_seed_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = a_conversation(seed=5)
    answer(llm, conversation, "hello")
    out = capsys.readouterr().out
    assert [t["role"] for t in conversation.turns] == ["user", "assistant"]
    assert out.startswith(conversation.turns[1]["content"] + "\n")
    assert "seed 5" in out


def test_the_next_prompt_contains_the_whole_conversation(llm: LLM) -> None:
    conversation = a_conversation(seed=5)
    chat_loop(llm, conversation, read=typing("hello", "and again"))
    replayed = a_conversation(seed=5)
    answer(llm, replayed, "and again")
    assert [t["role"] for t in conversation.turns] == ["user", "assistant"] * 2
    assert conversation.turns[3] != replayed.turns[1]  # another history, another prompt


def test_a_seed_repeats_an_answer(llm: LLM) -> None:
    conversation = a_conversation()
    chat_loop(llm, conversation, read=typing("hello"))
    first, seed = conversation.turns[1], conversation.seeds[0]
    chat_loop(llm, conversation, read=typing("/undo", f"/seed {seed}", "hello"))
    assert conversation.turns[1] == first


def test_control_c_stops_the_reply_and_keeps_its_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Interrupting()
    monkeypatch.setattr(sys, "stdout", screen)
    conversation = a_conversation(max_tokens=1500)
    chat_loop(slowed(llm, 0.02), conversation, read=typing("hello", "/max 3", "go on"))
    assert "stopped" in screen.getvalue()
    assert [t["role"] for t in conversation.turns] == ["user", "assistant"] * 2
    assert idle_stats(llm).completion_tokens < 1500


def test_a_reply_stopped_before_its_first_token_removes_its_question(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(choices: object) -> Iterator[object]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(llm, "pieces", interrupted)
    conversation = a_conversation()
    answer(llm, conversation, "hello")
    assert conversation.turns == []


def test_control_c_at_the_prompt_does_not_exit(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = a_conversation()
    chat_loop(llm, conversation, read=typing(KeyboardInterrupt, "hello"))
    assert len(conversation.turns) == 2
    assert "/quit quits" in capsys.readouterr().out


def test_quit_exits_before_the_next_line(llm: LLM) -> None:
    conversation = a_conversation()
    chat_loop(llm, conversation, read=typing("/quit", "hello"))
    assert conversation.turns == []


def test_a_question_that_is_refused_is_removed_from_the_conversation(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = a_conversation()
    chat_loop(llm, conversation, read=typing("hello" * 1000))
    assert conversation.turns == []
    assert "prompt is too long" in capsys.readouterr().out


def test_a_reply_that_fails_midway_removes_its_question(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = a_conversation(min_tokens=1, stop_token_ids=tuple(range(llm.card.vocab)))
    chat_loop(llm, conversation, read=typing("hello"))
    assert conversation.turns == []
    assert "leave no token to sample" in capsys.readouterr().out


def test_control_c_before_a_reply_begins_does_not_exit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    render, pressed = llm.chat_prompt, iter([True])

    def interrupted(*given: Any, **named: Any) -> ChatPrompt:
        if next(pressed, False):
            raise KeyboardInterrupt
        return render(*given, **named)

    monkeypatch.setattr(llm, "chat_prompt", interrupted)
    conversation = a_conversation()
    chat_loop(llm, conversation, read=typing("hello", "once more"))
    assert [t["content"] for t in conversation.turns[:1]] == ["once more"]


def test_settings_change_during_a_conversation() -> None:
    conversation = a_conversation()
    assert run_command(conversation, "/temperature 0.3") == "temperature 0.3"
    run_command(conversation, "/max 77")
    run_command(conversation, "/seed 12")
    assert (conversation.options.temperature, conversation.options.max_tokens, conversation.options.seed) == (0.3, 77, 12)
    run_command(conversation, "/seed")
    assert conversation.options.seed is None
    run_command(conversation, "/system be brief")
    assert conversation.messages() == [{"role": "system", "content": "be brief"}]
    run_command(conversation, "/system")
    assert conversation.messages() == []


def test_undo_removes_one_exchange_and_reset_removes_all() -> None:
    conversation = a_conversation()
    for word in ("one", "two"):
        conversation.turns += [{"role": "user", "content": word}, {"role": "assistant", "content": word}]
        conversation.seeds.append(1)
    run_command(conversation, "/undo")
    assert [t["content"] for t in conversation.turns] == ["one", "one"]
    assert len(conversation.seeds) == 1
    run_command(conversation, "/reset")
    assert (conversation.turns, conversation.seeds) == ([], [])
    assert run_command(conversation, "/undo") == "nothing to remove"


def test_a_saved_conversation_can_be_read_again(tmp_path: Path) -> None:
    conversation = a_conversation()
    conversation.turns, conversation.seeds = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ja"}], [3]
    assert run_command(conversation, f"/save {tmp_path / 'talk.json'}").startswith("saved")
    saved = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))
    assert saved == {"messages": conversation.turns, "seeds": [3]}


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    assert "cannot write" in run_command(a_conversation(), f"/save {tmp_path / 'no' / 'folder'}")
    assert "save where" in run_command(a_conversation(), "/save")


def test_mistyped_commands_are_reported(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    chat_loop(llm, a_conversation(), read=typing("/sed 5", "/temperature warm", "/help"))
    out = capsys.readouterr().out
    assert "no command /sed" in out
    assert "not a number: 'warm'" in out
    assert all(line in out for line, _ in HELP_LINES)


def test_a_piped_conversation_ends_with_its_input(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/quit\n"))
    assert line_reader() is input
    assert terminal.run("chat", *FAKE, "--max-tokens", "4", "--seed", "9") == 0
    assert "seed 9" in terminal.out

"""Stop strings against a slow look at every beginning of the text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.errors import BadParameter
from onedraw.text.stop_strings import StopFinder


def slow(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read one character more at a time until a stop string is complete; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            hit = max(ending, key=len)
            return text[: end - len(hit)], hit
    return text, None


def stream(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None, str]:
    """Shown texts, the hit, and what finish gave."""
    finder = StopFinder(stops)
    shown, hit = [], None
    for piece in pieces:
        text, hit = finder.push(piece)
        shown.append(text)
    return shown, hit, finder.finish()


TEXT = st.text("aabc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8))
@settings(max_examples=1000)
def test_however_a_text_is_cut_the_result_is_the_same(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(edges)]
    shown, hit, rest = stream(pieces, stops)
    assert ("".join(shown) + rest, hit) == slow(text, stops)


@given(TEXT, STOPS)
@settings(max_examples=500)
def test_only_what_could_begin_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    given_out = ""
    for end in range(1, len(text) + 1):
        shown, hit = finder.push(text[end - 1])
        given_out += shown
        if hit is not None:
            return
        held = text[len(given_out) : end]
        longest = max((n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])), default=0)
        assert len(held) == longest


def test_the_hit_comes_with_the_character_that_completes_it() -> None:
    finder = StopFinder(["END"])
    assert finder.push("text E") == ("text ", None)
    assert finder.push("N") == ("", None)
    assert finder.push("D and more") == ("", "END")
    assert finder.push("never shown") == ("", "END")
    assert finder.finish() == ""


def test_a_false_beginning_is_given_out() -> None:
    shown, hit, rest = stream(["a", "b", "x"], ["abc"])
    assert (shown, hit, rest) == (["", "", "abx"], None, "")


def test_what_was_held_back_comes_at_the_end() -> None:
    assert stream(["hello\n"], ["\n\n"]) == (["hello"], None, "\n")


def test_of_equal_beginnings_the_one_complete_first_wins() -> None:
    assert stream(["xabc"], ["abc", "ab"])[:2] == (["x"], "ab")


def test_of_equal_ends_the_one_that_began_first_wins() -> None:
    assert stream(["xabc"], ["bc", "abc"])[:2] == (["x"], "abc")


def test_a_complete_stop_does_not_wait_for_a_longer_one() -> None:
    """The reply must end at the token that completes a stop, although "abcd" might have come of it."""
    assert stream(["abc"], ["abcd", "bc"])[:2] == (["a"], "bc")


def test_without_stops_everything_passes() -> None:
    assert stream(["a", "", "b"], []) == (["a", "", "b"], None, "")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(BadParameter, match="empty"):
        StopFinder(["a", ""])


def test_what_comes_after_the_end_of_a_text_is_another_text() -> None:
    stops = StopFinder(["abc"])
    assert stops.push("xab") == ("x", None)
    assert stops.finish() == "ab"
    assert stops.push("c") == ("c", None)
    assert stops.push("abc") == ("", "abc")


def test_twenty_thousand_stops_are_looked_for_at_once() -> None:
    stops = [f"<{number}>" for number in range(20_000)]
    finder = StopFinder(stops)
    assert finder.push("<1999<20000><1") == ("<1999<20000>", None)
    assert finder.push("2345>6") == ("", "<12345>")

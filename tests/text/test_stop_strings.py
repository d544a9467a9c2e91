"""The stop string finder against a slow search of every prefix of the text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.errors import BadParameter
from onedraw.text.stop_strings import StopFinder


def slow(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read one more character at a time until a stop string is complete; return the longest that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[: end - len(found)], found
    return text, None


def stream(chunks: list[str], stops: list[str]) -> tuple[list[str], str | None, str]:
    """The texts to show, the stop string that was found, and the result of finish()."""
    finder = StopFinder(stops)
    shown, found = [], None
    for chunk in chunks:
        text, found = finder.push(chunk)
        shown.append(text)
    return shown, found, finder.finish()


TEXT = st.text("aabc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8))
@settings(max_examples=1000)
def test_the_chunks_of_text_do_not_change_the_result(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[start:stop] for start, stop in pairwise(edges)]
    shown, found, rest = stream(chunks, stops)
    assert ("".join(shown) + rest, found) == slow(text, stops)


@given(TEXT, STOPS)
@settings(max_examples=500)
def test_only_the_possible_beginning_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    returned = ""
    for end in range(1, len(text) + 1):
        shown, found = finder.push(text[end - 1])
        returned += shown
        if found is not None:
            return
        held = text[len(returned) : end]
        longest = max((n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])), default=0)
        assert len(held) == longest


def test_a_stop_string_is_found_at_the_character_that_completes_it() -> None:
    finder = StopFinder(["END"])
    assert finder.push("text E") == ("text ", None)
    assert finder.push("N") == ("", None)
    assert finder.push("D and more") == ("", "END")
    assert finder.push("never shown") == ("", "END")
    assert finder.finish() == ""


def test_text_that_does_not_become_a_stop_string_is_returned() -> None:
    shown, found, rest = stream(["a", "b", "x"], ["abc"])
    assert (shown, found, rest) == (["", "", "abx"], None, "")


def test_held_back_text_is_returned_at_the_end() -> None:
    assert stream(["hello\n"], ["\n\n"]) == (["hello"], None, "\n")


def test_of_two_stop_strings_with_the_same_beginning_the_shorter_is_found() -> None:
    assert stream(["xabc"], ["abc", "ab"])[:2] == (["x"], "ab")


def test_of_two_stop_strings_that_end_together_the_longer_is_found() -> None:
    assert stream(["xabc"], ["bc", "abc"])[:2] == (["x"], "abc")


def test_a_complete_stop_string_does_not_wait_for_a_longer_one() -> None:
    """The reply must end at the token that completes a stop string, although "abcd" could still follow."""
    assert stream(["abc"], ["abcd", "bc"])[:2] == (["a"], "bc")


def test_without_stop_strings_all_text_is_returned() -> None:
    assert stream(["a", "", "b"], []) == (["a", "", "b"], None, "")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadParameter, match="empty"):
        StopFinder(["a", ""])


def test_text_after_finish_is_searched_as_a_new_text() -> None:
    stops = StopFinder(["abc"])
    assert stops.push("xab") == ("x", None)
    assert stops.finish() == "ab"
    assert stops.push("c") == ("c", None)
    assert stops.push("abc") == ("", "abc")


def test_twenty_thousand_stop_strings_are_searched_at_once() -> None:
    stops = [f"<{number}>" for number in range(20_000)]
    finder = StopFinder(stops)
    assert finder.push("<1999<20000><1") == ("<1999<20000>", None)
    assert finder.push("2345>6") == ("", "<12345>")

"""Stop strings: where the text is cut, whatever the chunks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxhost.frontend.text.stops import StopMatcher


def feed(chunks: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], bool]:
    """What each chunk let out (the flush last), and whether a stop string was met."""
    matcher = StopMatcher(stops, include=include)
    shown = []
    for chunk in chunks:
        text, matched = matcher.push(chunk)
        shown.append(text)
        if matched:
            return shown, True
    return [*shown, matcher.flush()], False


@pytest.mark.parametrize(
    ("chunks", "stops", "shown", "matched"),
    [
        (["hello world"], ["world"], ["hello "], True),
        (["hello wo", "rld!"], ["world"], ["hello ", ""], True),
        (["hello wo", "rd"], ["world"], ["hello ", "word", ""], False),
        (["a", "a", "b"], ["ab"], ["", "a", ""], True),
        (["aab"], ["ab"], ["a"], True),
        (["abab", "abc"], ["ababc"], ["", "ab"], True),
        (["xEN"], ["END"], ["x", "EN"], False),
        (["END"], ["END"], [""], True),
        (["abc"], ["b", "abc"], ["a"], True),
        (["abc"], ["bc", "abc"], [""], True),
        (["日本", "語です"], ["本語"], ["日", ""], True),
        (["plain"], [], ["plain", ""], False),
    ],
)
def test_text_is_cut_before_the_stop_string(
    chunks: list[str], stops: list[str], shown: list[str], matched: bool
) -> None:
    """A partial match is held back, a full one ends the text before it, a failed one is let out."""
    assert feed(chunks, stops) == (shown, matched)


@pytest.mark.parametrize(("chunks", "text"), [(["a END b"], "a END"), (["a E", "ND"], "a END")])
def test_stop_string_is_kept_when_asked_for(chunks: list[str], text: str) -> None:
    """include_stop_str_in_output leaves the stop string, and nothing after it, in the text."""
    shown, matched = feed(chunks, ["END"], include=True)
    assert ("".join(shown), matched) == (text, True)


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    include=st.booleans(),
)
def test_outcome_does_not_depend_on_the_chunks(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """Cut anywhere, the text shown is that of character by character, and of a plain search."""
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    chunks = [text[a:b] for a, b in pairwise(edges)]
    ends = [(i + len(s), -len(s)) for s in stops for i in range(len(text)) if text.startswith(s, i)]
    end, minus_length = min(ends, default=(len(text), 0))
    expected = (text[: end if include else end + minus_length], bool(ends))
    for pieces in (chunks, list(text)):
        shown, matched = feed(pieces, stops, include=include)
        assert ("".join(shown), matched) == expected


@given(text=st.text("abc", max_size=40), stop=st.text("abc", min_size=1, max_size=6))
def test_partial_match_never_leaks(text: str, stop: str) -> None:
    """Whatever has been shown at any point is a prefix of the final text."""
    matcher, shown = StopMatcher([stop]), ""
    final = text.split(stop)[0]
    for char in text:
        out, matched = matcher.push(char)
        shown += out
        assert final.startswith(shown)
        if matched:
            break

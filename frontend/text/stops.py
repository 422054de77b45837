"""Stop strings, matched across chunks so that a partial match never leaks.

The outcome does not depend on how the text is cut into chunks: the match that is complete first wins,
and among those complete at the same character the longest (the one that began first).
"""

import re
from collections.abc import Sequence


class StopMatcher:
    """Feeds text through; holds back whatever may still become a stop string.

    One Knuth-Morris-Pratt state per stop string, so the cost is linear in the text whatever the strings.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._borders = [_borders(s) for s in stops]
        self._states = [0] * len(stops)
        self._held = ""
        firsts = re.escape("".join(s[0] for s in stops))
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)").search  # the latter is found nowhere

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string was met). After a match, push no more."""
        if not self._held:  # no match is under way, and only a first character can begin one
            found = self._first(text)
            if found is None:
                return text, False
            buffer, start = text, found.start()
        else:
            buffer, start = self._held + text, len(self._held)
        for position in range(start, len(buffer)):
            matched = self._advance(buffer[position])
            if matched:
                self._held = ""
                end = position + 1
                return buffer[: end if self._include else end - matched], True
        keep = max(self._states, default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """What was held back, once it is known that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Move every state by one character; the length of the longest stop string now complete, or 0."""
        matched = 0
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = self._borders[i][state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                matched = max(matched, state)
            self._states[i] = state
        return matched


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is also a prefix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders

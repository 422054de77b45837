"""Where each key of a TOML document stands, for messages that point at it.

tomllib tells no positions, and neither does any other maintained reader for Python. This one assumes a
document that tomllib has accepted, which is what makes it small: it only has to tell keys from values. A test
holds it to tomllib's view of the same document.
"""

import re
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterator

Path = tuple[str | int, ...]  # keys, and the index of an array's item
Place = tuple[int, int]  # line and column, both from 1

# Deeper keys are followed, but not noted: a name of 100,000 parts must not take memory by its square.
MAX_DEPTH = 12

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
# The long forms first; a long string may end in up to two quotes of its own.
_STRING = re.compile(r'''"""(?:[^\\]|\\.)*?"{3,5}|\'{3}.*?\'{3,5}|"(?:[^"\\]|\\.)*"|'[^']*\'''', re.DOTALL)
_SCALAR = re.compile(r"[^,\]}#\r\n]*")


def positions(text: str) -> dict[Path, Place]:
    """The place of every key and table of `text`, which must be valid TOML."""
    reader = _Reader(text.replace("\r\n", "\n"))
    reader.document()
    return reader.places


class _Reader:
    def __init__(self, text: str) -> None:
        self.places: dict[Path, Place] = {}
        self._text, self._at = text, 0
        self._lines = [0, *(found.end() for found in re.finditer("\n", text))]  # where each begins
        self._counts: dict[Path, int] = {}  # items so far of arrays of tables

    def document(self) -> None:
        table: Path = ()
        while self._skip():
            if self._take("[["):
                table = self._item(self._keys(self._header))
                self._at = self._text.index("]]", self._at) + 2
            elif self._take("["):
                table = self._keys(self._header)
                self._at = self._text.index("]", self._at) + 1
            else:
                self._pair(table)

    def _header(self, key: Path) -> Path:
        """A header's key goes on from the latest item of an array of tables."""
        return (*key, self._counts[key] - 1) if key in self._counts else key

    def _item(self, key: Path) -> Path:
        array = key[:-1] if key[-1:] and isinstance(key[-1], int) else key
        self._counts[array] = self._counts.get(array, 0) + 1
        item = (*array, self._counts[array] - 1)
        self.places.setdefault(item, self.places[array])
        return item

    def _pair(self, table: Path) -> None:
        path = self._keys(lambda key: key, table)
        self._at = self._text.index("=", self._at) + 1
        self._value(path)

    def _keys(self, step: Callable[[Path], Path], table: Path = ()) -> Path:
        """A dotted key below `table`, each part noted where it first stands."""
        path = table
        while True:
            self._blank()
            start = self._at
            key = self._key()
            if len(path) < MAX_DEPTH:
                path = (*path, key)
                self.places.setdefault(path, self._place(start))
                path = step(path)
            dot = _DOT.match(self._text, self._at)
            if not dot:
                return path
            self._at = dot.end()

    def _key(self) -> str:
        found = _KEY.match(self._text, self._at)
        word = found[0] if found else ""
        self._at += len(word)
        return next(iter(tomllib.loads(f"{word} = 0"))) if word[:1] in ("'", '"') else word

    def _value(self, path: Path) -> None:
        self._blank()
        if self._take("["):
            for index in self._until("]"):
                item = (*path, index)
                if len(item) <= MAX_DEPTH:
                    self.places[item] = self._place(self._at)
                self._value(item)
        elif self._take("{"):
            for _ in self._until("}"):
                self._pair(path)
        elif string := _STRING.match(self._text, self._at):
            self._at = string.end()
        elif scalar := _SCALAR.match(self._text, self._at):
            self._at = scalar.end()

    def _until(self, closing: str) -> Iterator[int]:
        """Once for each item, with commas and comments passed over."""
        index = 0
        while self._skip() and not self._take(closing):
            if not self._take(","):
                yield index
                index += 1

    def _skip(self) -> bool:
        """Pass over space, newlines and comments; False at the end of the document."""
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at
        return self._at < len(self._text)

    def _blank(self) -> None:
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._at += 1

    def _take(self, token: str) -> bool:
        found = self._text.startswith(token, self._at)
        self._at += len(token) if found else 0
        return found

    def _place(self, at: int) -> Place:
        line = bisect_right(self._lines, at)
        return line, at - self._lines[line - 1] + 1

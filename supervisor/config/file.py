"""mlxhost.toml as checked values, each with its place. All mistakes of a file are found, not only the first.

[fleet]          what the whole fleet does: the options of supervisor.settings.Settings
[models.NAME]    a model: `path`, the options of supervisor.modelspec.Model, and `sampling`
[keys.NAME]      an API key: the options of supervisor.config.apikeys.KeyOptions
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxhost.supervisor.config.apikeys import KeyOptions
from mlxhost.supervisor.config.positions import Place, positions
from mlxhost.supervisor.config.sampling import SAMPLING, SamplingOptions
from mlxhost.supervisor.config.table import Option, options
from mlxhost.supervisor.config.tables import FLEET, MODEL
from mlxhost.supervisor.console import printable
from mlxhost.supervisor.errors import ConfigError, UserError
from mlxhost.supervisor.modelspec import check_name
from mlxhost.supervisor.nearby import nearby

MAX_BYTES = 256 * 1024
# tomllib takes time by the square of a dotted key's parts, which stand on one line.
MAX_LINE = 8192
MAX_PROBLEMS = 100  # nobody reads more at once
SECTIONS = ("fleet", "models", "keys")
_AT = re.compile(r" \(at line (\d+), column (\d+)\)$")
_AT_END = re.compile(r" \(at end of document\)$")


@dataclass(frozen=True, slots=True)
class Entry:
    value: Any
    place: Place


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `key` is empty for one of the file as a whole."""

    file: str
    line: int
    column: int
    key: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Document:
    """What a file says. `models` and `keys` hold the tables by name, in the file's order."""

    path: Path | None = None
    fleet: Mapping[str, Entry] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    tables: Mapping[str, Place] = field(default_factory=dict)  # where each model's table is
    keys: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)

    def where(self, entry: Entry) -> str:
        """`mlxhost.toml:3:1`."""
        return f"{self.path}:{entry.place[0]}:{entry.place[1]}"


class Problems(ConfigError):
    """A file with mistakes, one a line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(problems, key=lambda p: (p.line, p.column))
        super().__init__("\n".join(map(str, self.problems)))


def load(path: Path) -> Document:
    """The checked document. Raises Problems."""
    shown = str(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise Problems([Problem(shown, 0, 0, "", f"cannot be read: {error.strerror}")]) from None
    if len(data) > MAX_BYTES:
        raise Problems([Problem(shown, 0, 0, "", f"is larger than {MAX_BYTES} bytes")])
    return parse(data, path)


def parse(data: bytes, path: Path) -> Document:
    """The document in `data`. Raises Problems."""
    text, tree = _syntax(data, str(path))
    checker = _Checker(path, positions(text))
    document = checker.document(tree)
    if checker.problems:
        raise Problems(checker.problems)
    return document


def _syntax(data: bytes, shown: str) -> tuple[str, dict[str, Any]]:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise Problems([Problem(shown, line, column, "", "is not UTF-8 here")]) from None
    for number, content in enumerate(text.split("\n"), start=1):
        if len(content) > MAX_LINE:
            raise Problems(
                [Problem(shown, number, MAX_LINE + 1, "", f"is longer than {MAX_LINE} characters")]
            )
    try:
        return text, tomllib.loads(text)
    except RecursionError:
        raise Problems([Problem(shown, 0, 0, "", "is nested too deeply")]) from None
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        if at := _AT.search(message):
            line, column = int(at[1]), int(at[2])
        else:
            line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
        reason = printable(_AT_END.sub("", _AT.sub("", message)))
        raise Problems([Problem(shown, line, column, "", f"not TOML: {reason}")]) from None
    except ValueError:  # Python's own limit on the digits of a number
        raise Problems([Problem(shown, 0, 0, "", "holds a number of too many digits")]) from None


class _Checker:
    """Walks the parsed file beside the tables, and notes what does not fit."""

    def __init__(self, path: Path, places: Mapping[tuple[str | int, ...], Place]) -> None:
        self._path, self._places = path, places
        self.problems: list[Problem] = []

    def document(self, tree: Mapping[str, Any]) -> Document:
        for key in list(tree.keys() - set(SECTIONS))[:MAX_PROBLEMS]:
            known = key if key in FLEET else ""
            hint = "; it belongs under [fleet]" if known else nearby(key, SECTIONS)
            self._problem((key,), f"unknown key; there are the tables {', '.join(SECTIONS)}{hint}")
        fleet = self._table(("fleet",), tree.get("fleet", {}), FLEET)
        models = {
            name: self._model(("models", name), table)
            for name, table in self._named("models", tree, check_name).items()
        }
        keys = {
            name: self._table(("keys", name), table, options(KeyOptions))
            for name, table in self._named("keys", tree, _check_key_name).items()
        }
        for name, table in keys.items():
            if ("file" in table) == ("env" in table):
                self._problem(("keys", name), "needs either `file` or `env`: where the key itself is")
        self._unique_names(models)
        tables = {name: self._place(("models", name)) for name in models}
        return Document(self._path, fleet, models, tables, keys)

    def _model(self, path: tuple[str, ...], table: object) -> dict[str, Entry]:
        sampling = None
        if isinstance(table, dict) and SAMPLING in table:
            table = dict(table)
            sampling = table.pop(SAMPLING)
        found = self._table(path, table, MODEL, also=(SAMPLING,))
        if sampling is not None:
            values = self._table((*path, SAMPLING), sampling, options(SamplingOptions))
            found[SAMPLING] = Entry(values, self._place((*path, SAMPLING)))
        return found

    def _table(
        self, path: tuple[str, ...], table: object, known: Mapping[str, Option], also: tuple[str, ...] = ()
    ) -> dict[str, Entry]:
        """The entries of one table; what is wrong with it is noted and left out."""
        found: dict[str, Entry] = {}
        if not isinstance(table, dict):
            self._problem(path, f"must be a table, not {_shown(table)}")
            return found
        for key, value in table.items():
            if len(self.problems) >= MAX_PROBLEMS:
                break
            here = (*path, key)
            if key not in known:
                names = [*known, *also]
                hint = nearby(key, names) or f"; there are {', '.join(names)}"
                self._problem(here, f"unknown key{hint}")
                continue
            try:
                found[key] = Entry(known[key].kind.of_value(value), self._place(here))
            except ValueError as error:
                self._problem(here, f"{_shown(value)}: {error}")
        return found

    def _named(
        self, section: str, tree: Mapping[str, Any], check: Callable[[str], None]
    ) -> dict[str, object]:
        tables = tree.get(section, {})
        if not isinstance(tables, dict):
            self._problem((section,), f"must be tables: [{section}.NAME]")
            return {}
        for name in tables:
            try:
                check(name)
            except UserError as error:
                self._problem((section, name), str(error))
        return tables

    def _unique_names(self, models: Mapping[str, Mapping[str, Entry]]) -> None:
        """No two models may answer to one name."""
        owner = {name: name for name in models}
        for name, table in models.items():
            for index, alias in enumerate(table["aliases"].value if "aliases" in table else ()):
                here = ("models", name, "aliases", index)
                try:
                    check_name(alias)
                except UserError as error:
                    self._problem(here, str(error))
                if owner.setdefault(alias, name) != name:
                    self._problem(here, f"{alias!r} is a name of the model {owner[alias]} already")

    def _place(self, path: tuple[str | int, ...]) -> Place:
        return self._places.get(path) or self._places.get(path[:-1]) or (1, 1)

    def _problem(self, path: tuple[str | int, ...], message: str) -> None:
        line, column = self._place(path)
        key = ".".join(str(part) for part in path if not isinstance(part, int))
        self.problems.append(
            Problem(str(self._path), line, column, key, f"{printable(key)}: {printable(message)}")
        )


def _check_key_name(name: str) -> None:
    if not re.fullmatch(r"[\w.@-]{1,64}", name, re.ASCII):
        raise ConfigError("a key's name has 1 to 64 letters, digits, or any of _ . @ -")


def _shown(value: object) -> str:
    """A value as a user wrote it, more or less, and not too much of it."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""docs/wire.md says what the code does: every struct, field, default, byte and the schema hash."""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import NODEFAULT, Struct

from mlxhost.wire import boot, codec, control, data
from mlxhost.wire.version import PROTOCOL_MAJOR, PROTOCOL_MINOR, SCHEMA

samples = runpy.run_path(str(Path(__file__).parent / "samples.py"))
TEXT = samples["DOCUMENT"].read_text()
HEADINGS = re.compile(r"^#### `(\w+)`(?: \(tag `(\w+)`\))?$", re.MULTILINE)
UPDATE = "update docs/wire.md: "


def structs() -> list[type[Struct]]:
    return [
        value
        for module in (boot, codec, data, control)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Struct) and value.__module__ == module.__name__
    ]


def section(name: str) -> str:
    """The text under a struct's heading."""
    found = next(m for m in HEADINGS.finditer(TEXT) if m[1] == name)
    return re.split(r"^#", TEXT[found.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def rows(name: str) -> Iterator[list[str]]:
    """Cells of each row of a struct's table, the first after its heading."""
    for line in section(name).strip().split("\n\n")[0].splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if any(c.startswith("`") for c in cells[:2]):
            yield cells


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """As the document writes it; empty for a struct's own defaults and where there is none."""
    value = field.default
    if field.default_factory is not NODEFAULT:
        value = field.default_factory()
    if value is NODEFAULT or isinstance(value, Struct):
        return ""
    words = {"None": "nil", "True": "true", "False": "false"}
    return words.get(repr(value), repr(value).replace("'", '"'))


def test_every_struct_has_a_section() -> None:
    """No struct of the wire is left out, and none is described that does not exist."""
    documented = {m[1]: m[2] for m in HEADINGS.finditer(TEXT)}
    tags = {s.__name__: s.__struct_config__.tag for s in structs()}
    assert documented == tags, UPDATE + str(documented.items() ^ tags.items())


@pytest.mark.parametrize("struct", structs(), ids=lambda s: s.__name__)
def test_every_field_is_listed_in_order(struct: type[Struct]) -> None:
    """A struct's table has its fields in order, with array positions and defaults."""
    name = struct.__name__
    first = 1 if struct.__struct_config__.tag else 0
    told, expected = [], []
    for position, (cells, field) in enumerate(
        zip(rows(name), msgspec.structs.fields(struct), strict=False), start=first
    ):
        start = [str(position)] if struct.__struct_config__.array_like else []
        column = len(start) + 2
        told.append(
            [*cells[: len(start)], cells[len(start)], cells[column].strip("`").replace("its own", "")]
        )
        expected.append([*start, f"`{field.name}`", default_of(field)])
    assert told == expected, UPDATE + name
    assert len(list(rows(name))) == len(struct.__struct_fields__), UPDATE + name


def test_numbers_and_names_are_explained() -> None:
    """Finish codes, REJECT codes and the protocol version are those of the code."""
    for finish in data.Finish:
        assert f"| {int(finish)} | {finish.name} |" in TEXT
    for name, code in vars(data).items():
        if name.startswith("REJECT_"):
            assert f"| `{code}` |" in TEXT, UPDATE + name
    assert f"Version {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}." in TEXT
    assert samples["SCHEMA_LINE"].findall(TEXT) == [SCHEMA], "run tests/wire/samples.py"


def test_annotated_bytes_are_the_fixtures() -> None:
    """The bytes shown are those of the golden fixtures."""
    golden = json.loads((samples["GOLDEN"] / f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}.json").read_text())
    part = TEXT[TEXT.index("## Bytes, annotated") :]
    shown = []
    for block in re.findall(r"```\n(.*?)```", part, re.DOTALL):
        lines = (re.match(r" *((?:[0-9a-f]{2} ?)*)(?= {2}|$)", line) for line in block.splitlines())
        frames = "\n".join(m[1].replace(" ", "") if m else "" for m in lines).split("\n\n")
        shown.append([frame.replace("\n", "") for frame in frames])
    accepted, add, out, progress = shown
    assert accepted == golden["accepted"]
    assert add == [golden["add"][0], golden["add"][2]]
    assert golden["out"][1].startswith(out[0])
    assert len(out[0]) > 100
    assert progress == golden["progress"]

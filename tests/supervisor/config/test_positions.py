"""Positions of keys: held to what tomllib sees in the same document."""

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxhost.supervisor.config.positions import Path, positions

DOCUMENTS = {
    "tables": '# c\n[a]\nx = 1 # y = 2\n"q.r" = "a#b"\n[a.b . c]\n\'z\' = []\n',
    "dotted": "a.b.c = 1\na.b.d = 2\n",
    "strings": 's = """a\nb = 1\n"x"""\nt = \'\'\'\n[no]\n\'\'\'\nu = "\\"]"\nv = \'\\\'\nw = """a""""\n',
    "arrays": "a = [1, [2,\n # ]\n 3], {x = '}', y.z = [1]}]\nd = [\n]\n",
    "arrays of tables": "[[b]]\nk = 1\n[b.s]\nm = 1\n[[b]]\n[[b.t]]\nq = 1\n",
    "values": "a = 1979-05-27 07:32:00\nb = 1e5\nc = +inf\nd = true\r\ne = 0x1F # x\n",
    "inline": "a = { }\nb = {c = [], d = {e = 1}}\nf = [ ]\n",
}


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths(inner, (*path, key))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_key_that_tomllib_sees_has_a_place(name: str) -> None:
    """No key is missed, and none is made up."""
    text = DOCUMENTS[name]
    assert set(positions(text)) == set(paths(tomllib.loads(text)))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_place_is_where_the_key_stands(name: str) -> None:
    """At line and column the text begins with the key, quoted or bare."""
    lines = DOCUMENTS[name].replace("\r\n", "\n").split("\n")
    for path, (line, column) in positions(DOCUMENTS[name]).items():
        if isinstance(path[-1], str):
            assert lines[line - 1][column - 1 :].lstrip("\"'").startswith(path[-1])


_KEYS = st.sampled_from(["a", "b-c", '"d.e"', "'f'", "g . h"])
_VALUES = st.recursive(
    st.sampled_from(["1", "true", '"x]"', "'y}'", '"""\n#"""', "'''a'b'''", "1.5", "2020-01-01"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + ", # c\n".join(items) + "]")
        | st.lists(inner, max_size=2).map(
            lambda v: "{" + ", ".join(f"k{i} = {x}" for i, x in enumerate(v)) + "}"
        )
    ),
    max_leaves=5,
)
_LINES = st.lists(
    st.tuples(_KEYS, _VALUES).map(" = ".join)
    | _KEYS.map(lambda k: f"[{k}]")
    | _KEYS.map(lambda k: f"[[x.{k}]]"),
    max_size=8,
)


@given(_LINES)
def test_any_valid_document_is_followed(lines: list[str]) -> None:
    """Whatever tomllib accepts has the same keys here."""
    text = "\n".join(lines)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert set(positions(text)) == set(paths(tree))

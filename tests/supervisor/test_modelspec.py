"""Reading `--models`, and the names that come of it."""

from pathlib import Path

import pytest

from mlxhost.supervisor.errors import UsageError
from mlxhost.supervisor.modelspec import Model, Spec, parse, settle_names


@pytest.mark.parametrize(
    ("values", "specs"),
    [
        (["demo"], [Spec("demo")]),
        (["demo:2"], [Spec("demo", replicas=2)]),
        (["demo,/a/b:3"], [Spec("demo"), Spec("/a/b", replicas=3)]),
        (["demo, /a/b ,"], [Spec("demo"), Spec("/a/b")]),
        (["demo", "x=/a/b:2"], [Spec("demo"), Spec("/a/b", "x", 2)]),
        (["small=owner/name"], [Spec("owner/name", "small")]),
    ],
)
def test_specifications(values: list[str], specs: list[Spec]) -> None:
    """Source, name and replica count are told apart."""
    assert parse(values) == specs


def test_a_path_that_holds_a_colon_or_equals_sign_is_taken_whole(tmp_path: Path) -> None:
    """What exists under its full name is that, not a count or a name."""
    for name in ("model:7", "a=b"):
        (tmp_path / name).mkdir()
        assert parse([str(tmp_path / name)]) == [Spec(str(tmp_path / name))]


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("", "names no model"),
        (",,", "names no model"),
        ("demo:0", "'0', not a whole number from 1 to 64"),
        ("demo:65", "'65'"),
        ("demo:two", "'two'"),
        ("demo:-1", "'-1'"),
        ("demo:", "''"),
        ("demo:²", "'²'"),
        ("=demo", "empty name"),
    ],
)
def test_mistakes_name_the_value(value: str, part: str) -> None:
    """A bad specification is a usage error that says what is wrong with it."""
    with pytest.raises(UsageError) as caught:
        parse([value])
    assert part in str(caught.value)
    assert caught.value.exit_code == 2


def test_two_models_of_one_name_are_refused_with_a_proposal() -> None:
    """The message shows both paths and how to tell them apart."""
    with pytest.raises(UsageError, match=r"--models m=/x/m,other-name=/y/m"):
        settle_names([Model("m", Path("/x/m")), Model("m", Path("/y/m"))])


def test_ambiguous_aliases_are_dropped() -> None:
    """An alias that is another's name, or shared, would mislead; the rest stay, once each."""
    models = [
        Model("a", Path("/x/m"), 1, ("m", "b", "/x/m", "/x/m", "a")),
        Model("b", Path("/y/m"), 1, ("m", "/y/m")),
    ]
    assert [m.aliases for m in settle_names(models)] == [("/x/m",), ("/y/m",)]


@pytest.mark.parametrize("name", ["", " a", "a\nb", "a\x1b[31m", "é" * 101])
def test_names_that_cannot_be_shown_or_sent_are_refused(name: str) -> None:
    """Control characters and overlong names never reach a terminal or a socket identity."""
    with pytest.raises(UsageError, match="give one with name=path"):
        settle_names([Model(name, Path("/x"))])

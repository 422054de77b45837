"""mlxhost.toml: what is read, and every mistake with its place."""

from pathlib import Path

import pytest

from mlxhost.supervisor.config import file

HERE = Path("/etc/mlxhost.toml")


def problems(text: str | bytes) -> list[str]:
    """What is said of a file, without its path."""
    data = text if isinstance(text, bytes) else text.encode()
    try:
        file.parse(data, HERE)
    except file.Problems as wrong:
        return [str(p).removeprefix(f"{HERE}:") for p in wrong.problems]
    return []


def test_a_file_is_read_with_the_place_of_each_value() -> None:
    """Values have their kinds' types; `where` is FILE:LINE:COLUMN."""
    text = '[fleet]\nport = 9\n\n[models.a]\n  path = "x"\nsampling.temperature = 1\n[keys.k]\nenv = "K"\n'
    document = file.parse(text.encode(), HERE)
    assert document.fleet["port"] == file.Entry(9, (2, 1))
    assert document.where(document.models["a"]["path"]) == f"{HERE}:5:3"
    assert document.models["a"]["sampling"].value["temperature"].value == 1.0
    assert list(document.keys) == ["k"]


def test_an_empty_file_says_nothing() -> None:
    """No tables are no mistake."""
    assert file.parse(b"", HERE) == file.Document(HERE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "port = 1",
            "1:1: port: unknown key; there are the tables fleet, models, keys; it belongs under [fleet]",
        ),
        ("[flet]", "1:2: flet: unknown key; there are the tables fleet, models, keys; did you mean fleet?"),
        ("[fleet]\nprot = 1", "2:1: fleet.prot: unknown key; did you mean port"),
        ("[fleet]\nport = 'x'", "2:1: fleet.port: 'x': must be a whole number from 0 to 65535"),
        ("[fleet]\nport = true", "2:1: fleet.port: true: must be a whole number from 0 to 65535"),
        (
            "[fleet]\n\n  routing = 'round_robin'",
            "3:3: fleet.routing: 'round_robin': must be one of round-robin, ",
        ),
        ("fleet = 3", "1:1: fleet: must be a table, not 3"),
        ("models = []", "1:1: models: must be tables: [models.NAME]"),
        ("models.a = 1", "1:8: models.a: must be a table, not 1"),
        ("[models.a]\ncontxt = 1", "2:1: models.a.contxt: unknown key; did you mean context?"),
        (
            "[models.a]\nsampling = {temperature = 9}",
            "2:13: models.a.sampling.temperature: 9: must be a number",
        ),
        ("[models.a]\nsampling = 1", "2:1: models.a.sampling: must be a table, not 1"),
        ("[models.' a']", "1:9: models. a: ' a' cannot be a model's name"),
        (
            "[models.a]\n[models.b]\naliases = ['c', 'a']",
            "3:17: models.b.aliases: 'a' is a name of the model a",
        ),
        (
            "[models.a]\naliases = ['x']\n[models.b]\naliases = ['x']",
            "4:12: models.b.aliases: 'x' is a name of",
        ),
        ("[keys.a]", "1:7: keys.a: needs either `file` or `env`"),
        ("[keys.a]\nfile = 'x'\nenv = 'X'", "1:7: keys.a: needs either `file` or `env`"),
        ("[keys.'a b']\nenv = 'X'", "1:7: keys.a b: a key's name has 1 to 64"),
        ("[fleet\n", "1:7: not TOML: "),
        ("[fleet]\nport = 1\nport = 2\n", "3:9: not TOML: Cannot overwrite a value"),
        ("[fleet]\nhost = '", "2:9: not TOML: "),
        (b"[fleet]\nhost = '\xff'", "2:9: is not UTF-8 here"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_the_way_out(text: str | bytes, message: str) -> None:
    """LINE:COLUMN: KEY: the value, and what is allowed or was meant."""
    (told,) = problems(text)
    assert told.startswith(message)


def test_all_mistakes_are_told_in_order() -> None:
    """One run shows everything that is wrong."""
    told = problems("[keys.a]\n[fleet]\nport = -1\nhost = 3\n[models.x]\ny = 1\n")
    assert [line.split(": ")[1] for line in told] == ["keys.a", "fleet.port", "fleet.host", "models.x.y"]


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5_000,
        "x" * (file.MAX_BYTES + 1),
        "[a" + ".b" * 20_000 + "]",
        "\n".join(["[a" + ".b" * 4_000 + "]"] * 2),
        "\n".join(f"k{i} = 1" for i in range(20_000)),
        "[fleet]\nx = [\n" + "1,\n" * 80_000 + "]",
        "[fleet]\nport = " + "9" * 5_000,
    ],
    ids=["nested", "large", "long line", "deep keys", "many keys", "long list", "long number"],
)
def test_a_hostile_file_is_a_clear_error(tmp_path: Path, text: str) -> None:
    """Deep nesting, endless keys, many keys and a huge file end in Problems, and soon."""
    path = tmp_path / "mlxhost.toml"
    path.write_text(text)
    with pytest.raises(file.Problems):
        file.load(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A directory, and a path that is not there."""
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "no", "No such file")):
        with pytest.raises(file.Problems, match=f"{path}: cannot be read: {why}"):
            file.load(path)

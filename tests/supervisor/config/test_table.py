"""One table of options: every flag has a key and a variable, with one precedence, and the docs say so."""

import argparse
import ast
import dataclasses
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mlxhost.supervisor import cli
from mlxhost.supervisor.config import effective, file
from mlxhost.supervisor.config.apikeys import KeyOptions
from mlxhost.supervisor.config.asked import Asked
from mlxhost.supervisor.config.kinds import Choice
from mlxhost.supervisor.config.sampling import SamplingOptions
from mlxhost.supervisor.config.table import Option, options
from mlxhost.supervisor.config.tables import FLEET, MODEL
from mlxhost.supervisor.config.template import sample, template
from mlxhost.supervisor.errors import ConfigError, UsageError
from mlxhost.supervisor.modelspec import Model, Spec
from mlxhost.supervisor.settings import Settings

# Flags that choose what is read, not a value of the fleet.
NO_OPTIONS = {"--help", "--config", "--bundle"}
ALL = [*FLEET.values(), *MODEL.values(), *options(SamplingOptions).values(), *options(KeyOptions).values()]


def flags_of(command: str) -> set[str]:
    """The long flags of a command of `mlxhost`."""
    commands = next(a.choices for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {flag for a in commands[command]._actions for flag in a.option_strings if flag[:2] == "--"}


def other(option: Option) -> tuple[str, Any]:
    """A value that is not the default, as text, and what it reads as."""
    choices = option.kind.names if isinstance(option.kind, Choice) else ()
    for text in (*reversed(choices), sample(option).strip('"'), "true", "2", "9m", "some,text"):
        try:
            value = option.kind.of_text(text)
        except ValueError:
            continue
        if value != option.default:
            return text, value
    pytest.fail(f"no value for {option.name}")


@pytest.mark.parametrize("command", ["up", "join"])
def test_every_flag_is_an_option_of_the_table(command: str) -> None:
    """A flag that is not in the table would have neither key nor variable."""
    flags = flags_of(command) - NO_OPTIONS
    assert flags <= {option.flag for option in FLEET.values()}
    if command == "up":
        assert flags == {option.flag for option in FLEET.values()}


def test_every_option_is_a_field_that_is_passed_down() -> None:
    """Each key of [fleet] and [models.NAME] lands in Settings or Model, where the fleet reads it."""
    assert set(FLEET) - {"models"} <= {f.name for f in dataclasses.fields(Settings)}
    assert set(MODEL) - {"path"} <= {f.name for f in dataclasses.fields(Model)}


@pytest.mark.parametrize("name", FLEET)
def test_flag_beats_variable_beats_file_beats_default(name: str) -> None:
    """Taking the sources away one by one leaves the next."""
    option = FLEET[name]
    text, value = other(option)
    variable = {option.variable: text}
    entry = file.Entry(value, (2, 3))
    document = file.Document(Path("f.toml"), {name: entry})
    none = file.Document()

    def source(flags: dict[str, Any], environment: dict[str, str], found: file.Document) -> tuple[Any, str]:
        got = effective.value(option, Asked(flags, environment), found)
        return got.value, got.source

    assert source({name: value}, variable, document) == (value, f"flag {option.flag}")
    assert source({}, variable, document) == (value, f"variable {option.variable}")
    assert source({}, {option.variable: ""}, document) == (value, "f.toml:2:3")
    assert source({}, {}, none) == (option.default, "default")


@pytest.mark.parametrize("option", ALL, ids=lambda o: o.name)
def test_a_value_reads_the_same_from_text_and_from_toml(option: Option) -> None:
    """What `shown` writes is TOML that reads back as the value."""
    value = other(option)[1]
    written = tomllib.loads(f"x = {option.kind.shown(value)}")["x"]
    assert option.kind.of_value(written) == value


def test_wrong_values_are_refused_by_flag_variable_and_file(tmp_path: Path) -> None:
    """The message names the source and what is allowed."""
    with pytest.raises(UsageError, match="MLXHOST_PORT='x': must be a whole number"):
        effective.read(Asked(environment={"MLXHOST_PORT": "x"}, path=written(tmp_path, "")))
    with pytest.raises(ConfigError, match=r"f\.toml:1:2: fleet: must be a table"):
        effective.read(Asked(path=written(tmp_path, " fleet = 1")))


def test_a_mistyped_variable_is_not_ignored(tmp_path: Path) -> None:
    """MLXHOST_PROT is refused, and MLXHOST_FAKE, which resembles none, is someone else's."""
    path = written(tmp_path, "")
    with pytest.raises(UsageError, match="did you mean MLXHOST_PORT"):
        effective.read(Asked(environment={"MLXHOST_PROT": "1"}, path=path))
    effective.read(Asked(environment={"MLXHOST_FAKE": "1"}, path=path))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "f.toml"
    path.write_text(text)
    return path


MODELS = """
[fleet]
context = 100
[models.a]
path = "./a"
replicas = 2
context = 50
aliases = ["x"]
sampling = { top_k = 3 }
[models.demo]
"""


def test_all_tables_are_served_unless_models_says_which(tmp_path: Path) -> None:
    """Tables give path, replicas and settings; `models` picks, renames and counts."""
    path = written(tmp_path, MODELS)
    (tmp_path / "a").mkdir()
    table = {"replicas": 2, "context": 50, "aliases": ("x",), "sampling_defaults": {"top_k": 3}}
    a = Spec(str(tmp_path / "a"), "a", 0, table)
    assert effective.read(Asked(path=path)).specs == (a, Spec("demo", "demo"))
    some = effective.read(Asked({"models": ("b=a:3", "a=./z")}, path=path)).specs
    assert some == (Spec(a.source, "b", 3, table), Spec("./z", "a", 0, table))


def test_a_flag_is_stronger_than_a_models_own_value(tmp_path: Path) -> None:
    """The fleet's value in the file is not."""
    path = written(tmp_path, MODELS)
    for asked in (Asked({"context": 7}, path=path), Asked({}, {"MLXHOST_CONTEXT": "7"}, path)):
        config = effective.read(asked)
        assert (config.fleet["context"].value, "context" in config.specs[0].settings) == (7, False)


def test_a_key_is_known_by_its_hash_only(tmp_path: Path) -> None:
    """From a closed file or a variable; the key itself is nowhere in what is read."""
    (tmp_path / "k").write_text("k" * 20 + "\n")
    (tmp_path / "k").chmod(0o600)
    path = written(tmp_path, '[keys.a]\nfile = "k"\n[keys.b]\nenv = "B"\nadmin = true\n')
    config = effective.read(Asked(environment={"B": "b" * 16}, path=path))
    assert [(k.name, k.admin, len(k.sha256)) for k in config.keys] == [("a", False, 64), ("b", True, 64)]
    assert "kkkk" not in repr(config)


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("k" * 20, 0o644, "can be read by others; close it with `chmod 600 "),
        ("short", 0o600, "is no key: 16 to 512 printable characters"),
        ("k" * 16 + " x", 0o600, "is no key"),
        (None, 0, "cannot be read: No such file"),
    ],
)
def test_a_bad_key_is_named_with_its_place_and_not_shown(
    tmp_path: Path, content: str | None, mode: int, message: str
) -> None:
    """The message has the line of the file and the name, not the content."""
    if content is not None:
        (tmp_path / "k").write_text(content)
        (tmp_path / "k").chmod(mode)
    path = written(tmp_path, '[keys.alice]\nfile = "k"\n')
    with pytest.raises(ConfigError) as caught:
        effective.read(Asked(path=path))
    assert str(caught.value).startswith(f"{path}:2:1: keys.alice: ")
    assert message in str(caught.value)
    assert content is None or content not in str(caught.value)


def test_the_file_of_config_init_is_valid_with_every_line_uncommented(tmp_path: Path) -> None:
    """As it is, and with all its examples in force, it has no mistake; each option is in it."""
    text = template()
    assert file.parse(text.encode(), tmp_path / "x").models.keys() == {"demo"}
    active = re.sub(r"^# ((?:\[[\w.]+\]|\w+ = .*))$", r"\1", text, flags=re.MULTILINE)
    document = file.parse(active.replace('env = "VARIABLE"\n', "").encode(), tmp_path / "x")
    assert document.fleet.keys() == FLEET.keys()
    assert document.models["demo"].keys() - {"sampling"} == MODEL.keys()
    assert document.models["demo"]["sampling"].value.keys() == options(SamplingOptions).keys()
    assert document.keys["alice"].keys() == options(KeyOptions).keys() - {"env"}


def test_the_reference_in_the_docs_is_that_of_the_code() -> None:
    """Run tests/supervisor/config/document.py after changing an option."""
    made = runpy.run_path(str(Path(__file__).with_name("document.py")))
    text = made["DOCUMENT"].read_text()
    assert made["updated"](text) == text


def test_every_option_is_read() -> None:
    """A value that is accepted acts: each option's attribute is used outside the tables themselves."""
    root = Path(effective.__file__).parents[1]
    sources = [p for p in root.rglob("*.py") if p.name not in ("settings.py", "modelspec.py")]
    used = {
        node.attr
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    taken_apart = {"models", "path"}  # specifications, read by name in config.effective
    assert {*FLEET, *MODEL} - taken_apart <= used

"""Every `ctl` operation and command of `mlxhost` teaches and answers in the same way."""

import argparse
from collections.abc import Iterator

import pytest

from mlxhost.supervisor import cli
from mlxhost.supervisor.commands import ctl

NAMES = [module.__name__.rpartition(".")[2].replace("_", "-") for module in ctl.MODULES]
# What an operator needs at least.
WANTED = {
    *("status", "load", "unload", "drain", "resume", "flush", "pin", "unpin", "abort", "explain", "reload"),
    *("routing", "log-level"),
}


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command below `parser`, by its full name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found = list(commands(inner))
                yield from ((f"{name} {below}", p) for below, p in found) if found else [(name, inner)]


ALL = dict(commands(cli.parser()))


def test_every_operation_that_an_operator_needs_is_there() -> None:
    """None is missing from `mlxhost ctl`."""
    assert set(NAMES) >= WANTED


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_has_json_an_example_and_its_exit_codes(name: str) -> None:
    """Its help shows it in use, says what goes over the wire and how it exits."""
    parser = ALL[f"ctl {name}"]
    assert {"--json", "--fleet"} <= {flag for a in parser._actions for flag in a.option_strings}
    text = parser.format_help()
    assert f"  mlxhost ctl {name}" in text
    assert "On the wire: CTL {op: " in text
    assert "exit codes:" in text
    summary = (ctl.MODULES[NAMES.index(name)].__doc__ or "").partition(": ")[2].partition(".")[0]
    assert len(summary) > 15, f"`ctl --help` would say no more than {summary!r}"


@pytest.mark.parametrize("name", ALL)
def test_every_argument_of_every_command_is_explained(name: str) -> None:
    """No flag or argument without a help text."""
    for action in ALL[name]._actions:
        assert action.help, f"{name}: {action.option_strings or action.dest}"

"""What a changed configuration means for a running fleet, as a table."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlxhost.supervisor.config.diff import Differences, differences, settled, taken
from mlxhost.supervisor.modelspec import Model
from mlxhost.supervisor.settings import Settings
from mlxhost.wire.control import ApiKey

A = Model("a", Path("/a"), aliases=("x",))
B = Model("b", Path("/b"), dtype="float16")
BASE = Settings(models=(A, B), keys=(ApiKey("k", "00"),))


def changed(name: str, **fields: object) -> Settings:
    return replace(BASE, models=tuple(replace(m, **fields) if m.name == name else m for m in BASE.models))


CASES: list[tuple[str, Settings, Differences]] = [
    ("nothing", BASE, Differences()),
    ("order of models", replace(BASE, models=(B, A)), Differences()),
    (
        "a model more",
        replace(BASE, models=(A, B, Model("c", Path("/c")))),
        Differences(added=(Model("c", Path("/c")),)),
    ),
    ("a model less", replace(BASE, models=(B,)), Differences(removed=("a",))),
    ("another path", changed("a", path=Path("/z")), Differences(renewed={"a": ("path",)})),
    ("live fields", changed("a", aliases=(), replicas=3), Differences(live={"a": ("replicas", "aliases")})),
    (
        "both kinds",
        changed("b", routing="round-robin", dtype="auto"),
        Differences(renewed={"b": ("routing", "dtype")}),
    ),
    (
        "sampling",
        changed("a", sampling_defaults={"top_k": 3}),
        Differences(live={"a": ("sampling_defaults",)}),
    ),
    ("port", replace(BASE, port=9), Differences(waiting={"port": (8080, 9)})),
    ("log level", replace(BASE, log_level="debug"), Differences(applied={"log_level": ("info", "debug")})),
    ("keys", replace(BASE, keys=(ApiKey("k", "11"), ApiKey("l", "22"))), Differences(keys=("k", "l"))),
]


@pytest.mark.parametrize(("after", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_differences(after: Settings, expected: Differences) -> None:
    """Only what differs is named, under what it needs."""
    found = differences(BASE, after)
    # `added` models come settled: with the fleet's values.
    expected = replace(expected, added=tuple(settled(m, after) for m in expected.added))
    assert found == expected
    assert bool(found) is (found != Differences())


def test_a_fleet_option_renews_the_models_that_have_no_value_of_their_own() -> None:
    """dtype of the fleet changes a, and not b, which says its own."""
    found = differences(BASE, replace(BASE, dtype="float32"))
    assert (dict(found.renewed), dict(found.applied)) == ({"a": ("dtype",)}, {"dtype": ("auto", "float32")})


def test_what_waits_for_a_restart_is_told_again_until_then() -> None:
    """The settings after a reload hold all that was applied, and the old value of what was not."""
    after = replace(changed("a", replicas=2), port=9, log_level="debug", keys=())
    now = taken(BASE, after, differences(BASE, after))
    assert now == replace(after, port=8080)
    assert differences(now, after) == Differences(waiting={"port": (8080, 9)})

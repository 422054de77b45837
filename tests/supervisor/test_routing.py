"""The routing policy of a running fleet: chosen at the start, shown and changed by `ctl`."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.supervisor_up import Stream, Up, serving, status_of, wait_for


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]) -> Iterator[Up]:
    """Two models of two replicas each."""
    models = f"a={tiny_models['llama']}:2,b={tiny_models['llama']}:2"
    with serving(
        tmp_path_factory.mktemp("home"), models, "--routing", "round-robin", script={"length": 4000}
    ) as running:
        yield running


def policies(up: Up) -> dict[str, str]:
    shown: dict[str, str] = json.loads(up.ctl("routing", "--json").stdout)["routing"]
    return shown


def test_shown(up: Up) -> None:
    """Each model starts with the policy that `up` was given; `ctl routing` and `ctl status` say so."""
    assert policies(up) == {"a": "round-robin", "b": "round-robin"}
    assert up.ctl("routing", "b").stdout == "b round-robin\n"
    assert [m["routing"] for m in up.status()["models"]] == ["round-robin", "round-robin"]


def test_changed_for_one_model_and_for_all(up: Up) -> None:
    """A change touches the model that is named, or every model when none is."""
    assert up.ctl("routing", "a", "prefix-affinity").stdout == "a prefix-affinity\n"
    assert policies(up) == {"a": "prefix-affinity", "b": "round-robin"}
    up.ctl("routing", "minimum-kv-usage")
    assert policies(up) == {"a": "minimum-kv-usage", "b": "minimum-kv-usage"}


@pytest.mark.parametrize(
    ("args", "words"),
    [(("a", "by-magic"), "by-magic"), (("c", "round-robin"), "'c'"), (("c",), "'c'")],
)
def test_refused(up: Up, args: tuple[str, ...], words: str) -> None:
    """An unknown policy or model is refused by name, and changes nothing."""
    before = policies(up)
    done = up.ctl("routing", *args, check=False)
    assert done.returncode == 4
    assert words in done.stderr
    assert policies(up) == before


def test_live(up: Up) -> None:
    """The next request goes by the new policy: a missing room is a 400 as soon as rooms decide."""
    up.ctl("routing", "b", "bootstrap-room")
    wait_for(lambda: status_of(up.url(), "b") == 400, 5)
    up.ctl("routing", "b", "least-in-flight")
    wait_for(lambda: status_of(up.url(), "b") == 200, 5)


def test_running_requests_stay(up: Up) -> None:
    """A change of policy while streams run harms none of them."""
    with ThreadPoolExecutor(4) as pool:
        streams = list(pool.map(lambda _: Stream(up.url(), "a", 1000).begun(), range(4)))
    up.ctl("routing", "a", "round-robin")
    for stream in streams:
        assert stream.join().error is None
        assert stream.finish == "length"

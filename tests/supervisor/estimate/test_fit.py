"""Does it fit: the numbers, the command, and what a running fleet says over HTTP."""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.supervisor_up import mlxhost, serving
from support.tiny_models import build

from mlxhost.supervisor.estimate.estimate import sizer
from mlxhost.supervisor.estimate.fit import fit, sentence
from mlxhost.supervisor.estimate.library import Held, find, in_hub_cache, in_own_cache, library

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=32_768)


def test_the_safe_context_is_the_longest_that_fits(model: Path) -> None:
    """It fits, and one step more does not; a large budget allows the model's own bound."""
    sizes = sizer(model)
    budget = sizes.at(10_000).total_bytes
    found = fit(sizes, 0, budget)
    assert sizes.at(found.safe_context).total_bytes <= budget
    assert sizes.at(found.safe_context + 256).total_bytes > budget
    assert fit(sizes, 0, 1 << 50).safe_context == 32_768


def test_what_others_hold_counts_for_now_only(model: Path) -> None:
    """A model fits the budget, though not beside what is resident."""
    sizes = sizer(model)
    budget = sizes.at(0).total_bytes
    found = fit(sizes, 0, budget, held=budget // 2)
    assert found.fits
    assert not found.fits_now
    assert found.safe_context_now < found.safe_context
    assert "once others make room" in sentence("m", found.as_json())


def test_a_model_without_a_growing_cache_is_safe_at_its_own_bound(tmp_path: Path) -> None:
    """A state-space model that fits at all fits at any length."""
    path = build("mamba2", tmp_path)
    assert fit(sizer(path), 0, 1 << 40).safe_context == 4096


def test_a_pipeline_is_charged_the_whole_budget(tmp_path: Path) -> None:
    """A model kind that plans its own memory gets what there is."""
    (tmp_path / "model_index.json").write_text("{}")
    found = fit(sizer(tmp_path), 0, 1 << 30)
    assert found.fits
    assert not fit(sizer(tmp_path), 0, 1 << 30, held=1).fits_now


def run(home: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    return mlxhost(home, "fit", *args)


def test_the_command_answers_by_its_exit_code(model: Path, tmp_path: Path) -> None:
    """0 and the numbers when it fits; 4 and the safe context when it does not."""
    fits = run(tmp_path, str(model), "--context", "4096", "--budget", "4GiB", "--json")
    assert fits.returncode == 0
    told = json.loads(fits.stdout)
    assert told["context"] == 4096
    parts = ("weights_bytes", "kv_bytes", "transient_bytes", "process_bytes")
    assert told["total_bytes"] == sum(told[part] for part in parts)
    small = run(tmp_path, str(model), "--budget", "60MB")
    assert small.returncode == 4
    assert "does not fit" in small.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["/nowhere"], "not found"),
        (["MODEL", "--context", "0"], "whole number from 1 up"),
        (["MODEL", "--budget", "lots"], "bytes such as"),
        (["demo"], "mlxhost pull demo"),
    ],
)
def test_the_command_says_what_is_wrong(args: list[str], says: str, model: Path, tmp_path: Path) -> None:
    """Every mistake is one line that names the way out."""
    done = run(tmp_path, *(str(model) if arg == "MODEL" else arg for arg in args))
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_the_library_has_fleet_hub_and_cache(model: Path, tmp_path: Path) -> None:
    """Each model once, by name; the hub's by its id, at the revision that main names."""
    snapshot = tmp_path / "hub" / "models--owner--some-model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc\n")
    (tmp_path / "hub" / "models--owner--half" / "refs").mkdir(parents=True)
    own = tmp_path / "cache"
    (own / "converted-float32-1").mkdir(parents=True)
    (own / "converted-float32-1" / "config.json").write_text("{}")
    (own / "some.gguf").write_bytes(b"GGUF")
    assert [(h.name, h.path) for h in in_hub_cache(tmp_path / "hub")] == [("owner/some-model", snapshot)]
    assert {(h.name, h.form) for h in in_own_cache(own)} == {
        ("converted-float32-1", "converted"),
        ("some.gguf", "gguf"),
    }
    fleet = Held("mine", model, "fleet", "directory", ("other",))
    assert find(library([fleet], own), "other") == fleet
    assert find(library([fleet], own), str(model)) is None


def get(url: str, path: str, **query: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_fleet_answers_over_http(model: Path, tmp_path: Path) -> None:
    """Names are keys: a path is not one. The budget is the fleet's, and what others hold is counted."""
    with serving(tmp_path, f"mine={model},other={model}", "--budget", "4GiB") as up:
        url = up.url()
        status, found = get(url, "/fit", model="mine", context="4096")
        assert status == 200
        assert found["fits"]
        assert found["budget_bytes"] == 4 << 30
        assert found["context"] == 4096
        assert found["free_bytes"] < 4 << 30
        status, found = get(url, "/library")
        assert status == 200
        assert {"mine", "other"} <= {m["model"] for m in found["data"] if m["source"] == "fleet"}
        assert str(model) not in json.dumps(found)
        for wrong, code in (({"model": "nope"}, 404), ({}, 400), ({"model": "mine", "context": "-3"}, 400)):
            status, found = get(url, "/fit", **wrong)
            assert status == code
            assert found["error"]["message"]
        assert get(url, "/fit", model=f"{model}/../tiny")[0] == 404

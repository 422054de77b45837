"""What meets residency from the side: more replicas, a load during the start, an unload while one waits."""

from pathlib import Path

import pytest
from support.residency_up import RULES, done, models, resident, standing
from support.supervisor_up import Stream, Up, serving, status_of, wait_for


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


@pytest.mark.slow
def test_more_replicas_stay_within_the_budget(tmp_path: Path, llama: Path) -> None:
    """Another model makes room for them by the rules; more than the budget can hold changes nothing."""
    with serving(tmp_path, models(llama, "a"), timing=RULES) as up:
        need = standing(up)["a"]["need_bytes"]

    def text(replicas: int) -> str:
        return (
            f'[models.a]\npath = "{llama}"\nreplicas = {replicas}\n[models.b]\npath = "{llama}"\n'
            f'[fleet]\nbudget = "{need * 5 // 2}"\n'
        )

    file = tmp_path / "mlxhost.toml"
    file.write_text(text(1))
    with Up(tmp_path, "", timing=RULES) as up:
        up.url()
        wait_for(lambda: standing(up)["b"]["phase"] == "resident", what=str(standing(up)))
        file.write_text(text(3))
        refused = up.ctl("reload", check=False)
        assert refused.returncode == 4
        assert "nothing was changed: 3 replicas of a need" in refused.stderr
        file.write_text(text(2))
        up.ctl("reload")
        wait_for(lambda: resident(up) == "a", 30, "both replicas of a, without b")
        assert [up.replica(slot)["state"] for slot in ("a/0", "a/1", "b/0")] == ["ready", "ready", "absent"]
        told = up.status()["residency"]
        assert told["charged_bytes"] <= told["budget_bytes"]


@pytest.mark.slow
def test_what_is_asked_for_during_the_start_fails_alone(tmp_path: Path, llama: Path) -> None:
    """A model with bad files that somebody wants while the others still load does not end the fleet."""
    script = {"a": {"load_s": 4.0}, "b": {"boot_error": ["bad_model", "its head is missing"]}}
    with Up(tmp_path, models(llama, "ab"), "--preload", "a", script=script, timing=RULES) as up:
        wait_for(lambda: up.ctl("status", check=False).returncode == 0, what="a control socket")
        loading = up.ctl("load", "b", check=False)
        assert (loading.returncode, "its head is missing" in loading.stderr) == (4, True)
        assert up.replica("a/0")["state"] != "ready", "too slow to tell"
        assert status_of(up.url(), "a") == 200


@pytest.mark.slow
def test_an_unload_ends_the_waiting_of_an_earlier_load(tmp_path: Path, llama: Path) -> None:
    """What `ctl load` waited for is not loaded after `ctl unload --until-needed`, which is done at once also
    for a model that failed; the next request loads it."""
    script = {"a": {"length": 100, "step_ms": 30}, "c": {"boot_error": ["bad_model", "its head is missing"]}}
    options = ("--max-resident", "1", "--preload", "a")
    with serving(tmp_path, models(llama, "abc"), *options, script=script, timing=RULES) as up:
        stream = Stream(up.url(), "a", 100).begun()
        up.ctl("load", "b", "--no-wait")
        up.ctl("unload", "b", "--until-needed")
        assert stream.join().finish == "length"
        assert status_of(up.url(), "a") == 200
        assert done(up, "load", "b") == []
        up.ctl("load", "c", check=False)
        assert up.ctl("unload", "c", "--until-needed").stdout.splitlines()[-1] == "c/0 failed"
        assert status_of(up.url(), "b") == 200

"""Models that are loaded by the first request for them: real supervisor and frontend, fake workers."""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from support.frontend_client import call
from support.residency_up import RULES, answer_of, decisions, done, models, resident, standing, together
from support.supervisor_up import Stream, Up, serving, status_of, wait_for


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


def test_fifty_requests_for_an_absent_model_make_one_process(tmp_path: Path, llama: Path) -> None:
    """All are answered, the model is loaded once, and a model that was there makes room."""
    script = {"load_s": 0.5, "max_queued": 64}
    with serving(tmp_path, models(llama, "ab"), "--max-resident", "1", script=script, timing=RULES) as up:
        assert resident(up) == "a"
        statuses = together([partial(status_of, up.url(), "b")] * 50)
        assert statuses == [200] * 50
        assert up.replica("b/0")["epoch"] == 1
        assert done(up, "load", "b") == ["b"]
        assert done(up, "evict") == ["a"]


@pytest.mark.slow
def test_two_models_that_alternate_are_both_served(tmp_path: Path, llama: Path) -> None:
    """Each request finds its model, whichever was there."""
    with serving(tmp_path, models(llama, "ab"), "--max-resident", "1", timing=RULES) as up:
        for name in "abababab":
            assert status_of(up.url(), name) == 200
            assert resident(up) == name


def test_a_busy_model_is_held_not_cut_off(tmp_path: Path, llama: Path) -> None:
    """A stream runs to its end while another model waits; new requests for it wait for its return."""
    script = {"a": {"length": 60, "step_ms": 50}}
    with serving(tmp_path, models(llama, "ab"), "--max-resident", "1", script=script, timing=RULES) as up:
        stream = Stream(up.url(), "a", 60).begun()
        time.sleep(RULES["min_resident_s"])
        assert together([partial(status_of, up.url(), "b")]) == [200]
        assert stream.join().finish == "length"
        assert done(up, "hold") == ["a"]
        assert status_of(up.url(), "a", 1) == 200


def test_what_is_pinned_stays_and_the_refusal_tells_why(tmp_path: Path, llama: Path) -> None:
    """503 at once, not to be tried again, with the way out; after unpin the same request is served."""
    with serving(tmp_path, models(llama, "ab"), "--max-resident", "1", timing=RULES) as up:
        assert up.ctl("pin", "a").stdout == "a pinned\n"
        began = time.monotonic()
        status, body, _ = answer_of(up, "b")
        assert time.monotonic() - began < 5
        assert (status, body["error"]["code"], body["error"]["why"]) == (503, "model_does_not_fit", "pinned")
        assert "unpin" in body["error"]["message"]
        loading = up.ctl("load", "b", check=False)
        assert loading.returncode == 4
        assert "a (pinned or drained)" in loading.stderr
        assert done(up, "evict") == []
        assert up.ctl("unpin", "a").stdout == "a not pinned\n"
        assert answer_of(up, "b")[0] == 200


@pytest.mark.slow
def test_what_is_larger_than_the_budget_evicts_nobody(tmp_path: Path, llama: Path) -> None:
    """Row 12: fails fast with what it needs and what there is; the model that is there stays."""
    with Up(tmp_path, models(llama, "a")) as up:
        up.url()
        need = standing(up)["a"]["need_bytes"]
        up.signal(signal.SIGTERM)
        assert up.exit_code() == 0
    # The second model has two replicas, and the budget is for one and a half.
    budget = ("--budget", str(int(need * 3)))
    spec = f"a={llama},b={llama}:64"
    with serving(tmp_path, spec, *budget, "--preload", "a", timing=RULES) as up:
        status, body, retry_after = answer_of(up, "b")
        assert (status, retry_after) == (503, "")
        assert body["error"]["why"] == "too_large"
        assert "needs" in body["error"]["message"]
        assert "--budget" in body["error"]["message"]
        assert done(up, "evict") == []
        assert status_of(up.url(), "a") == 200


@pytest.mark.slow
def test_a_named_preload_that_does_not_fit_ends_the_start(tmp_path: Path, llama: Path) -> None:
    """Exit 1 with the numbers, before anything is served; an unknown name is a usage error."""
    with Up(tmp_path, models(llama, "ab"), "--max-resident", "1", "--preload", "a,b") as up:
        assert up.exit_code() == 1
        assert "--preload b: needs" in up.output
    with Up(tmp_path, models(llama, "ab"), "--preload", "c") as up:
        assert up.exit_code() == 2
        assert "no such model (a, b)" in up.output


@pytest.mark.slow
def test_a_model_that_fails_to_load_fails_its_requests_with_the_reason(tmp_path: Path, llama: Path) -> None:
    """Row 4, on demand: no loop, the others serve, and `ctl load` tries again."""
    script = {"b": {"boot_error": ["bad_model", "config.json: no such architecture"]}}
    with serving(tmp_path, models(llama, "ab"), "--preload", "a", script=script, timing=RULES) as up:
        status, body, _ = answer_of(up, "b")
        assert status == 503
        assert "config.json: no such architecture" in body["error"]["message"]
        assert up.replica("b/0")["state"] == "failed"
        assert answer_of(up, "b")[0] == 503
        assert up.replica("b/0")["epoch"] == 2
        assert up.ctl("load", "b", check=False).returncode == 4
        assert up.replica("b/0")["epoch"] == 3
        assert status_of(up.url(), "a") == 200


@pytest.mark.slow
def test_a_worker_killed_while_it_loads_on_demand_is_tried_again(tmp_path: Path, llama: Path) -> None:
    """Row 1, mid-load: the request that waits is served by the next process."""
    script = {"b": {"load_s": 2.0}}
    with serving(tmp_path, models(llama, "ab"), "--preload", "a", script=script, timing=RULES) as up:
        stream = Stream(up.url(), "b", 2)
        pid = wait_for(lambda: up.replica("b/0")["pid"], what="a process of b")
        os.kill(pid, signal.SIGKILL)
        assert stream.join().status == 200
        assert up.replica("b/0")["epoch"] == 2


def test_idle_models_are_unloaded_and_come_back(tmp_path: Path, llama: Path) -> None:
    """--idle-ttl frees the memory; a pinned model stays; /v1/models and /ready tell what is absent."""
    options = ("--preload", "a", "--idle-ttl", "0.5")
    with serving(tmp_path, models(llama, "ab"), *options, timing=RULES) as up:
        up.ctl("pin", "b")
        assert status_of(up.url(), "b") == 200
        wait_for(lambda: up.replica("a/0")["state"] == "absent", what="a unloaded")
        assert up.replica("b/0")["state"] == "ready"
        listed = {m["id"]: m["state"] for m in call(up.url(), "/v1/models").json["data"]}
        assert listed == {"a": "absent", "b": "ready"}
        assert call(up.url(), "/ready").json["models"]["a"]["ready"] is True
        assert status_of(up.url(), "a") == 200


@pytest.mark.slow
def test_unload_until_needed_frees_it_and_plain_unload_keeps_it_away(tmp_path: Path, llama: Path) -> None:
    """The first is loaded again by a request, the second only by `ctl load`."""
    with serving(tmp_path, models(llama, "a"), timing=RULES) as up:
        assert up.ctl("unload", "a", "--until-needed").stdout.splitlines()[-1] == "a/0 absent"
        assert status_of(up.url(), "a") == 200
        up.ctl("unload", "a")
        assert status_of(up.url(), "a") == 503
        up.ctl("load", "a")
        assert status_of(up.url(), "a") == 200


def test_a_request_that_meets_a_model_on_its_way_out_is_served_after_reload(
    tmp_path: Path, llama: Path
) -> None:
    """Row 11: its worker takes a second to flush; another model loads meanwhile."""
    script = {"a": {"answers": {"flush": {"delay_s": 1.0}}}}
    with serving(tmp_path, models(llama, "ab"), "--preload", "a", script=script, timing=RULES) as up:
        up.ctl("unload", "a", "--until-needed", "--no-wait")
        wait_for(lambda: up.replica("a/0")["state"] != "ready", what="a closed")
        meets, other = together([partial(status_of, up.url(), "a"), partial(status_of, up.url(), "b")])
        assert (meets, other) == (200, 200)
        assert up.replica("a/0")["epoch"] == 2


@pytest.mark.slow
def test_sigterm_while_a_request_waits_answers_it_at_once(tmp_path: Path, llama: Path) -> None:
    """Row 8: 503 with Retry-After, and the fleet ends well though a load was under way."""
    script = {"b": {"load_s": 60.0}}
    with serving(tmp_path, models(llama, "ab"), "--preload", "a", script=script, timing=RULES) as up:
        stream = Stream(up.url(), "b", 2)
        wait_for(lambda: up.replica("b/0")["pid"], what="a process of b")
        up.signal(signal.SIGTERM)
        assert up.exit_code(30) == 0
        assert stream.join().status == 503


def test_the_log_replays_to_the_same_decisions(tmp_path: Path, llama: Path) -> None:
    """`ctl explain --log` makes every decision again; a decision that this planner would not take is told."""
    with serving(tmp_path, models(llama, "ab"), "--max-resident", "1", timing=RULES) as up:
        for name in "ba":
            assert status_of(up.url(), name) == 200
        log = Path(json.loads(up.ctl("explain", "--json").stdout)["log"])
        told = up.ctl("explain", "b").stdout
        assert "evict a for b: idle for" in told
        assert "load b: needs" in told
        replayed = up.ctl("explain", "--log", str(log)).stdout
        assert replayed.splitlines()[-1].endswith("decisions replayed: all the same")
        lines = log.read_text().splitlines()
        changed = [line.replace('"pinned":false', '"pinned":true') for line in lines]
        log.write_text("\n".join(changed) + "\n")
        differs = up.ctl("explain", "--log", str(log), check=False)
        assert differs.returncode == 4
        assert "of them differ" in differs.stdout
        log.write_text("{}\n")
        broken = up.ctl("explain", "--log", str(log), check=False)
        assert broken.returncode == 1
        assert f"{log}:1 is not a decision" in broken.stderr


@pytest.mark.slow
def test_decisions_hold_no_busy_or_pinned_victim(tmp_path: Path, llama: Path) -> None:
    """Under requests for three models at once with room for one, every victim in the log was idle."""
    with serving(tmp_path, models(llama, "abc"), "--max-resident", "1", timing=RULES) as up:
        calls = [partial(status_of, up.url(), name) for name in "abcabcabc"]
        assert set(together(calls, 120.0)) == {200}
        told = json.loads(up.ctl("explain", "--json").stdout)["decisions"]
        evicted = 0
        for decision in told:
            units = {u["name"]: u for u in decision["units"]}
            for action in decision["actions"]:
                if action["do"] == "evict":
                    evicted += 1
                    assert not units[action["model"]]["busy"]
                    assert not units[action["model"]]["pinned"]
        assert evicted >= 2
        assert len(decisions(up)) >= 4


def test_a_worker_killed_while_it_flushes_frees_its_room(tmp_path: Path, llama: Path) -> None:
    """Row 1, mid-flush: the model that waits for the room is loaded, and the killed one comes back when it is
    asked for."""
    script = {"a": {"answers": {"flush": {"delay_s": 30.0}}, "only_epoch": 1}}
    more = {"script": script, "timing": {**RULES, "flush_s": 60.0}}
    with serving(tmp_path, models(llama, "ab"), "--max-resident", "1", **more) as up:
        pid = up.replica("a/0")["pid"]
        stream = Stream(up.url(), "b", 2)
        up.line("a/0: drained")
        os.kill(pid, signal.SIGKILL)
        assert stream.join(60).status == 200
        assert up.replica("a/0")["state"] == "absent"
        assert done(up, "load", "a") == ["a"]


@pytest.mark.slow
def test_real_models_that_cannot_both_fit_are_both_served(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    """Real workers: every swap ends with an answer, and from then on what was measured is charged."""
    spec = f"a={tiny_models['llama']},b={tiny_models['qwen3']}"
    command = [sys.executable, "-I", "-m", "mlxhost.worker"]
    with Up(tmp_path, spec, "--max-resident", "1", worker_command=command, timing=RULES) as up:
        up.url(60)
        for name in "abab":
            status, body, _ = answer_of(up, name, 8)
            assert (status, body["usage"]["completion_tokens"]) == (200, 8)
            assert resident(up) == name
            assert standing(up)[name]["measured"]
        assert done(up, "evict") == ["a", "b", "a"]

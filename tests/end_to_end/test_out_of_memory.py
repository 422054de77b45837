"""A worker that the system gives no more memory: one model's trouble, and not for long."""

import resource
from pathlib import Path

import pytest
from openai import APIError
from support.real_fleet import client, fleet
from support.supervisor_up import Stream, wait_for

pytestmark = pytest.mark.slow


def test_a_worker_out_of_memory_comes_back_and_others_are_untouched(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    """Its request fails, or is started anew once the worker is back; the other model's stream goes on to its
    end, and the model serves again."""
    models = f"{tiny_models['llama']},small={tiny_models['qwen3']}"
    with fleet(tmp_path, models) as up:
        openai = client(up)
        kept = Stream(up.url(), "tiny-llama", 1500).begun()
        pid = up.replica("small/0")["pid"]
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
        prompt = [3 + i % 400 for i in range(3500)]
        error = None
        try:
            openai.completions.create(model="small", prompt=prompt, max_tokens=50)
        except APIError as caught:  # else it was started anew on the worker that came after
            error = caught
        assert error is not None or up.replica("small/0")["pid"] != pid
        assert kept.join(120).error is None
        assert kept.finish == "length"
        wait_for(lambda: up.replica("small/0")["state"] == "ready", 60, "the worker to come back")
        if up.replica("small/0")["pid"] == pid:
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        done = openai.completions.create(
            model="small", prompt="The", max_tokens=5, extra_body={"ignore_eos": True}
        )
        assert done.usage is not None
        assert done.usage.completion_tokens == 5

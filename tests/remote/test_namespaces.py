"""Two network namespaces with a cable between them: real workers there, the fleet and its clients here."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.netns import Elsewhere, elsewhere
from support.real_fleet import WORKER
from support.remote import Fleet, Join, new_bundle
from support.supervisor_up import Stream, posted, status_of, wait_for

# A mount namespace, too: the model is where the machine says it is there, and nowhere here.
SH_MOUNT = 'mount --bind "$0" "$1" && shift && exec "$@"'


@pytest.fixture
def there() -> Iterator[Elsewhere]:
    with elsewhere() as place:
        yield place


@pytest.fixture
def model(tmp_path: Path, tiny_models: dict[str, Path]) -> Path:
    """An empty directory here, in which the other machine sees the tiny llama."""
    path = tmp_path / "only-there"
    path.mkdir()
    return path


def join(there: Elsewhere, tmp_path: Path, fleet: Fleet, bundle: Path, real: Path, model: Path) -> Join:
    wrapped = [*there.prefix, "sh", "-c", SH_MOUNT, str(real), str(model)]
    return Join(
        tmp_path / "there", fleet.endpoint, bundle, f"m={model}", wrapped=wrapped, worker_command=WORKER
    )


@pytest.mark.slow
def test_a_model_on_another_machine_serves_and_survives_a_pulled_cable(
    there: Elsewhere, tmp_path: Path, model: Path, tiny_models: dict[str, Path]
) -> None:
    """Its tokenizer and template travel here; a stream ends with worker_lost soon after the cable is pulled;
    plugged in again, the same process answers the same request with the same text."""
    real = tiny_models["llama"]
    bundle = new_bundle(tmp_path / "here")
    listen = f"tcp://{there.here}:0"
    with (
        Fleet(tmp_path / "here", listen=listen) as fleet,
        join(there, tmp_path, fleet, bundle, real, model) as machine,
    ):
        fleet.wait_ready("studio:m/0", 60)
        with posted(fleet.url(), "m", 16) as response:
            first = json.load(response)
        assert response.status == 200
        assert first["usage"]["completion_tokens"] == 16
        assert not list(model.iterdir())
        fetched = {f.stat().st_size for f in (tmp_path / "here" / "cache" / "cards").iterdir()}
        assert (real / "tokenizer.json").stat().st_size in fetched
        pid = machine.replica("studio:m/0")["pid"]

        running = Stream(fleet.url(), "m", 4000).begun()
        there.pull_cable()
        pulled_at = time.monotonic()
        running.join()
        assert time.monotonic() - pulled_at < 6.0
        assert running.error is not None
        assert running.error["code"] == "worker_lost"
        wait_for(lambda: fleet.state_of("studio:m/0") == "backoff")

        time.sleep(6.0)  # until both ends have given the connections up
        there.plug_in()
        fleet.wait_ready("studio:m/0", 30)
        wait_for(lambda: status_of(fleet.url(), "m") == 200, 30)
        assert machine.replica("studio:m/0")["pid"] == pid


def test_the_listener_is_not_reachable_without_keys(there: Elsewhere, tmp_path: Path) -> None:
    """A plain zmq client from there gets nothing from a fleet that listens here, and is counted."""
    new_bundle(tmp_path / "here")
    with Fleet(tmp_path / "here", listen=f"tcp://{there.here}:0") as fleet:
        fleet.url()
        code = (
            "import sys, zmq; s = zmq.Context().socket(zmq.DEALER); s.linger = 0;"
            f"s.connect({fleet.endpoint!r}); s.send(b'x'); sys.exit(bool(s.poll(2000)))"
        )
        done = subprocess.run([*there.prefix, sys.executable, "-c", code], timeout=20, check=False)
        assert done.returncode == 0
        wait_for(lambda: fleet.refused("server_key") > 0)

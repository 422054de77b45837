"""Who is not let in, what they are told, and that the fleet counts it."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support.remote import Fleet, Join, changed_bundle, new_bundle
from support.supervisor_up import mlxhost, status_of, wait_for

from mlxhost.supervisor.remote.keyring import Keyring, read_bundle
from mlxhost.wire import control, data, sockets, version
from mlxhost.wire.codec import decode, encode
from mlxhost.wire.curve import dial_curve, new_keys

DEADLINE_S = 12.0


@pytest.fixture
def llama(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["llama"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def fleet(here: Path) -> Iterator[Fleet]:
    """A fleet that `studio` may join."""
    new_bundle(here)
    with Fleet(here) as up:
        up.url()
        yield up


def bundle(here: Path) -> Path:
    return here / "keys" / "bundles" / "studio"


def refused_join(tmp_path: Path, endpoint: str, bundle: Path, llama: Path) -> tuple[str, float]:
    """What a machine is told that is not let in, and after how long."""
    began = time.monotonic()
    with Join(tmp_path / "there", endpoint, bundle, f"m={llama}") as join:
        return join.refusal(DEADLINE_S), time.monotonic() - began


def test_unknown_key(tmp_path: Path, here: Path, fleet: Fleet, llama: Path) -> None:
    """A client key that was never made here is refused in the handshake, said, and counted."""
    keys = new_keys()
    stranger = changed_bundle(bundle(here), public_key=keys.public, secret_key=keys.secret)
    message, seconds = refused_join(tmp_path, fleet.endpoint, stranger, llama)
    assert "does not let this machine's key in" in message
    assert seconds < DEADLINE_S
    assert fleet.refused("key") >= 1


def test_revoked_key(tmp_path: Path, here: Path, fleet: Fleet, llama: Path) -> None:
    """A key that was withdrawn is like one that never was."""
    kept = changed_bundle(bundle(here))
    assert mlxhost(here, "keys", "revoke", "studio").returncode == 0
    time.sleep(1.0)
    message, _ = refused_join(tmp_path, fleet.endpoint, kept, llama)
    assert "revoked" in message
    assert fleet.refused("key") >= 1


def test_wrong_server_key(tmp_path: Path, here: Path, fleet: Fleet, llama: Path) -> None:
    """A bundle of another fleet: the machine says so instead of waiting for ever, the fleet counts it."""
    foreign = changed_bundle(bundle(here), server_key=new_keys().public)
    message, seconds = refused_join(tmp_path, fleet.endpoint, foreign, llama)
    assert "not with the key that this bundle names" in message
    assert seconds < DEADLINE_S
    assert fleet.refused("server_key") >= 1


def test_wrong_token(tmp_path: Path, here: Path, fleet: Fleet, llama: Path) -> None:
    """The right key with another join token is turned away by name."""
    forged = changed_bundle(bundle(here), token="0" * 48)
    message, _ = refused_join(tmp_path, fleet.endpoint, forged, llama)
    assert "wrong join token" in message
    assert fleet.refused("token") == 1
    assert fleet.state_of("studio:m/0") == ""


@pytest.mark.slow
def test_nobody_there(tmp_path: Path, here: Path, llama: Path) -> None:
    """A port that nobody listens on is an error within the connect deadline."""
    new_bundle(here)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    message, seconds = refused_join(tmp_path, f"tcp://127.0.0.1:{port}", bundle(here), llama)
    assert f"nothing answers at tcp://127.0.0.1:{port}" in message
    assert seconds < DEADLINE_S


@pytest.mark.slow
def test_a_listener_that_says_nothing(tmp_path: Path, here: Path, llama: Path) -> None:
    """Something that accepts and is silent is an error within the connect deadline."""
    new_bundle(here)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        message, seconds = refused_join(tmp_path, endpoint, bundle(here), llama)
    assert "cannot join" in message
    assert seconds < DEADLINE_S + 2


def test_revoking_takes_effect_on_a_joined_machine(
    tmp_path: Path, here: Path, fleet: Fleet, llama: Path
) -> None:
    """Its model is gone within seconds, and its supervisor ends and says why."""
    with Join(tmp_path / "there", fleet.endpoint, bundle(here), f"m={llama}") as join:
        fleet.wait_ready("studio:m/0")
        assert status_of(fleet.url(), "m") == 200
        mlxhost(here, "keys", "revoke", "studio")
        assert "revoked" in join.refusal()
        wait_for(lambda: status_of(fleet.url(), "m") == 404)


def test_a_second_process_with_the_same_bundle_takes_over(
    tmp_path: Path, here: Path, fleet: Fleet, llama: Path
) -> None:
    """The newer one serves; the older one is told that each machine needs a bundle of its own."""
    with Join(tmp_path / "there", fleet.endpoint, bundle(here), f"m={llama}") as older:
        fleet.wait_ready("studio:m/0")
        with Join(tmp_path / "elsewhere", fleet.endpoint, bundle(here), f"m={llama}"):
            assert "a bundle of its own" in older.refusal()
            wait_for(lambda: status_of(fleet.url(), "m") == 200, 15)


class Guest:
    """A raw connection with the keys of `studio`."""

    def __init__(self, here: Path, endpoint: str, identity: bytes) -> None:
        bundle_ = read_bundle(str(bundle(here)))
        self.token = bundle_.token
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        sockets.configure(self.socket)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        dial_curve(self.socket, bundle_.keys, bundle_.server_key)
        self.socket.connect(endpoint)

    def __enter__(self) -> "Guest":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def hello(self, **fields: object) -> object:
        """The answer to a HELLO."""
        known = {
            "protocol": (version.PROTOCOL_MAJOR, version.PROTOCOL_MINOR),
            "schema": version.SCHEMA,
            "role": "host",
            "slot": "host/studio",
            "epoch": 7,
            "pid": 1,
            "token": self.token,
        }
        self.socket.send_multipart(encode(control.Hello(**(known | fields))))
        assert self.socket.poll(5000), "no answer to HELLO"
        return decode(self.socket.recv_multipart())[0]


def test_protocol_of_another_major_is_refused_and_of_another_minor_is_not(here: Path, fleet: Fleet) -> None:
    """Refusals name both versions; a minor difference is no reason to refuse."""
    with Guest(here, fleet.endpoint, sockets.identity("host/studio", 7)) as guest:
        major = (version.PROTOCOL_MAJOR + 1, 0)
        refused = guest.hello(protocol=major)
        assert isinstance(refused, control.Refused)
        assert refused.code == "protocol"
        assert f"speaks {major[0]}" in refused.message
        other_schema = guest.hello(schema="0" * 16)
        assert isinstance(other_schema, control.Refused)
        assert other_schema.code == "schema"
        assert isinstance(
            guest.hello(protocol=(version.PROTOCOL_MAJOR, version.PROTOCOL_MINOR + 1)), control.Init
        )
        assert (fleet.refused("protocol"), fleet.refused("schema")) == (1, 1)


def test_a_machine_cannot_speak_for_another(here: Path, fleet: Fleet) -> None:
    """Identities of other machines and of local processes are dropped and counted, on both sockets."""
    new_bundle(here, "other")
    data_endpoint = fleet.status()["frontends"][0]["remote_endpoint"]
    for n, slot in enumerate(("host/other", "other:m/0", "frontend/0"), start=1):
        with Guest(here, fleet.endpoint, sockets.identity(slot, 7)) as guest:
            guest.socket.send_multipart(encode(control.HostReport([])))
            wait_for(lambda n=n: fleet.refused("slot") == n)
    with Guest(here, data_endpoint, sockets.identity("other:m/0", 7)) as guest:
        out = data.Out(7, 0, data.Load(), [], [], [], [])
        guest.socket.send_multipart(encode(out))
        fleet.line("remote_refused")


def test_listening_needs_keys(here: Path, llama: Path) -> None:
    """`up --listen` without any key refuses to start and names the command that makes them."""
    with Fleet(here, f"m={llama}") as up:
        assert up.exit_code() == 1
        assert "mlxhost keys new NAME" in up.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--listen", "192.0.2.1:80"], "tcp://HOST:PORT"),
        (["--listen", "tcp://0.0.0.0:0"], "--advertise"),
        (["--advertise", "fleet.example"], "--listen"),
        ([], "--models"),
    ],
)
def test_options_that_make_no_sense(here: Path, llama: Path, options: list[str], says: str) -> None:
    """A wrong address, a wildcard without a name to dial, a name without an address: usage errors."""
    models = ["--models", str(llama)] if options else []
    done = mlxhost(here, "up", *models, "--port", "0", *options)
    assert done.returncode == 2
    assert says in done.stderr


def test_an_address_of_another_machine(here: Path) -> None:
    """Binding what is not ours is one clear message."""
    new_bundle(here)
    done = mlxhost(here, "up", "--port", "0", "--listen", "tcp://192.0.2.1:0")
    assert done.returncode == 1
    assert "numeric address of this machine" in done.stderr


def test_keys_are_private_and_a_bundle_must_be(here: Path, tmp_path: Path, llama: Path) -> None:
    """Directories are 0700 and files 0600; a bundle that others can read is not used."""
    path = new_bundle(here)
    for file in (here / "keys").rglob("*"):
        assert file.stat().st_mode & 0o077 == 0, file
    path.chmod(0o644)
    done = mlxhost(
        tmp_path / "there", "join", "tcp://127.0.0.1:9", "--bundle", str(path), "--models", str(llama)
    )
    assert done.returncode == 1
    assert "chmod 600" in done.stderr


def test_bundle_from_the_environment(
    here: Path, tmp_path: Path, fleet: Fleet, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """$MLXHOST_BUNDLE holds the content, and is not handed down to workers."""
    monkeypatch.setenv("MLXHOST_BUNDLE", bundle(here).read_text())
    with Join(tmp_path / "there", fleet.endpoint, None, f"m={llama}") as join:
        fleet.wait_ready("studio:m/0")
        pid = join.replica("studio:m/0")["pid"]
        environment = Path(f"/proc/{pid}/environ")
        if environment.exists():
            assert b"MLXHOST_BUNDLE" not in environment.read_bytes()


def test_keys_list_shows_who_may_join(here: Path) -> None:
    """new, list, revoke and a second new under the same name; a name twice is refused."""
    new_bundle(here)
    assert mlxhost(here, "keys", "new", "studio").returncode == 1
    assert mlxhost(here, "keys", "new", "no spaces").returncode == 1
    assert "may join" in mlxhost(here, "keys", "list").stdout
    mlxhost(here, "keys", "revoke", "studio")
    assert "revoked" in mlxhost(here, "keys", "list").stdout
    assert mlxhost(here, "keys", "revoke", "studio").returncode == 1
    new_bundle(here)
    assert "may join    studio" in mlxhost(here, "keys", "show").stdout


def test_keyring_of_an_empty_home_has_no_keys(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is created by looking."""
    monkeypatch.setenv("MLXHOST_HOME", str(here))
    assert Keyring().server_keys() is None
    assert Keyring().allowed() == []

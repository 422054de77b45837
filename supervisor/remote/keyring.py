"""Keys under `$MLXHOST_HOME/keys` (0700, files 0600).

server.json       the fleet's own CURVE key pair
hosts.json        which machines may join: name, public key, hash of the join token
bundles/NAME      what is carried to the machine NAME; not needed here afterwards
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from mlxhost.supervisor.errors import UserError
from mlxhost.supervisor.home import home, make_private
from mlxhost.wire.control import AllowedPeer
from mlxhost.wire.curve import KEY, NAME, KeyPair, new_keys

T = TypeVar("T")

BUNDLE_VARIABLE = "MLXHOST_BUNDLE"
_MAX_BUNDLE_BYTES = 4096


class Host(msgspec.Struct, frozen=True):
    """A machine that was given a bundle. `created` and `revoked` are unix times; 0: not revoked."""

    name: str
    public_key: str
    token_hash: str
    created: float
    revoked: float = 0.0


class Bundle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a machine needs to join: as good as a password."""

    name: str
    server_key: str
    public_key: str
    secret_key: str
    token: str

    @property
    def keys(self) -> KeyPair:
        return KeyPair(self.public_key, self.secret_key)


def token_hash(token: str) -> str:
    """What is kept of a join token (random, so a plain hash will do)."""
    return hashlib.sha256(token.encode()).hexdigest()


class Keyring:
    def __init__(self) -> None:
        self.directory = home() / "keys"

    def server_keys(self) -> KeyPair | None:
        """The fleet's key pair, None before the first `keys new`."""
        return _read(self.directory / "server.json", KeyPair)

    def hosts(self) -> list[Host]:
        """Everyone who was ever given a bundle and not replaced since, oldest first."""
        return _read(self.directory / "hosts.json", list[Host]) or []

    def allowed(self) -> list[AllowedPeer]:
        return [AllowedPeer(h.name, h.public_key) for h in self.hosts() if not h.revoked]

    def stamp(self) -> int:
        """Changes whenever `hosts` does."""
        try:
            return os.stat(self.directory / "hosts.json").st_mtime_ns
        except OSError:
            return 0

    def bundle_path(self, name: str) -> Path:
        return self.directory / "bundles" / name

    def new(self, name: str) -> Path:
        """Make keys for the machine `name`; the path of its bundle. Raises UserError."""
        if not NAME.fullmatch(name):
            raise UserError(
                f"{name!r} cannot be a machine's name: 1 to 20 letters, digits, dots, dashes or underscores, "
                "beginning with a letter or digit"
            )
        with self._locked():
            others = self.hosts()
            if any(h.name == name and not h.revoked for h in others):
                raise UserError(
                    f"{name} has keys already ({self.bundle_path(name)}); "
                    f"`mlxhost keys revoke {name}` first, to make new ones"
                )
            server = self.server_keys()
            if server is None:
                server = new_keys()
                _write(self.directory / "server.json", server)
            keys, token = new_keys(), secrets.token_hex(24)
            bundle = Bundle(name, server.public, keys.public, keys.secret, token)
            path = self.bundle_path(name)
            make_private(path.parent)
            _write(path, bundle)
            entry = Host(name, keys.public, token_hash(token), time.time())
            _write(self.directory / "hosts.json", [*(h for h in others if h.name != name), entry])
        return path

    def revoke(self, name: str) -> None:
        """Let `name` in no longer. Raises UserError when it is not in."""
        with self._locked():
            hosts = self.hosts()
            if not any(h.name == name and not h.revoked for h in hosts):
                known = ", ".join(h.name for h in hosts if not h.revoked) or "none"
                raise UserError(f"no machine {name!r} may join this fleet; those that may: {known}")
            now = time.time()
            changed = [msgspec.structs.replace(h, revoked=now) if h.name == name else h for h in hosts]
            _write(self.directory / "hosts.json", changed)
            with contextlib.suppress(OSError):
                self.bundle_path(name).unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        make_private(self.directory)
        fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def read_bundle(path: str) -> Bundle:
    """The bundle in the file `path`, or without one in $MLXHOST_BUNDLE, which is then removed so that no
    child process inherits it. Raises UserError."""
    from_variable = os.environ.pop(BUNDLE_VARIABLE, "")
    if not path and not from_variable:
        raise UserError(
            "no bundle: give --bundle FILE (made on the fleet's machine by `mlxhost keys new NAME`), or its "
            f"content in ${BUNDLE_VARIABLE}"
        )
    where, raw = (path, _private_content(path)) if path else (f"${BUNDLE_VARIABLE}", from_variable.encode())
    try:
        bundle = msgspec.json.decode(raw, type=Bundle)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise UserError(f"{where} is not a bundle; `mlxhost keys new NAME` makes one") from None
    keys = (bundle.server_key, bundle.public_key, bundle.secret_key)
    if not NAME.fullmatch(bundle.name) or not all(map(KEY.fullmatch, keys)):
        raise UserError(f"{where} is damaged: a name or a key in it is not one; carry it over again")
    return bundle


def _private_content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & 0o077:
                raise UserError(f"{path} can be read by other users; `chmod 600 {path}`")
            return file.read(_MAX_BUNDLE_BYTES)
    except OSError as error:
        raise UserError(f"--bundle {path}: {error.strerror}") from None


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is damaged ({error}); restore it, or remove it and make new keys") from None


def _write(path: Path, value: object) -> None:
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
    fresh.replace(path)

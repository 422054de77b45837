"""Who may call what: API keys, and the routes of operators.

On the unix socket, which only this user can open, everything is allowed. On TCP: `/health` and `/ready` are
always open; `/admin` needs an admin key; everything else needs a key as soon as there is one.
"""

import hashlib
import hmac
import socket
from collections.abc import Sequence

from aiohttp import web

from mlxhost.frontend.errors import Forbidden, InvalidKey
from mlxhost.wire.control import ApiKey, Keys

OPEN = frozenset({"/health", "/ready"})
ADMIN = "/admin"
_BEARER = "bearer "

holder_key: web.RequestKey[str] = web.RequestKey("holder", str)  # the name of the key that was shown


class Access:
    """The keys of the fleet."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self.keys = tuple(keys)

    def replace(self, message: Keys) -> None:
        """The keys from now on."""
        self.keys = tuple(message.keys)

    def check(self, http: web.Request) -> None:
        """Raises InvalidKey (401) or Forbidden (403); notes whose key was shown."""
        shown = _shown(http)
        key = self.holder(shown) if shown else None
        if key is not None:
            http[holder_key] = key.name
        path = http.path
        if path in OPEN or is_local(http):
            return
        admin = path == ADMIN or path.startswith(ADMIN + "/")
        if admin and not any(k.admin for k in self.keys):
            raise Forbidden("/admin answers on the fleet's unix socket; over TCP only with an admin key")
        if key is None and (admin or self.keys):
            raise InvalidKey(given=bool(shown))
        if admin and key is not None and not key.admin:
            raise Forbidden(f"the key {key.name!r} does not open /admin")

    def holder(self, shown: str) -> ApiKey | None:
        """Compares with every key, each in constant time, so that timing tells nothing."""
        digest = hashlib.sha256(shown.encode("utf-8", "surrogateescape")).hexdigest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.sha256):
                found = key
        return found


def client_of(http: web.Request, user: str | None) -> str:
    """Who shares a turn with whom in a worker's queue: the key, else the user that the request names, else
    the address it came from."""
    return http.get(holder_key) or user or http.remote or ""


def is_local(http: web.Request) -> bool:
    """Whether the request came over the unix socket."""
    connection = http.transport.get_extra_info("socket") if http.transport else None
    return connection is not None and connection.family == socket.AF_UNIX


def _shown(http: web.Request) -> str:
    """The key that the client shows, in OpenAI's or in Anthropic's way."""
    header = http.headers.get("Authorization", "")
    if header[: len(_BEARER)].lower() == _BEARER:
        return header[len(_BEARER) :].strip()
    return http.headers.get("X-Api-Key", "").strip()

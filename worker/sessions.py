"""The sessions that requests belong to, and what each has used. Bounded; no I/O, no MLX."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from mlxhost.worker.errors import CallError

MAX_SESSIONS = 4096
MAX_ID_BYTES = 256


class Session(Struct):
    """One client's conversation. Times are unix seconds; tokens are those of ended requests."""

    id: str
    opened: bool  # by open_session; else seen in a request
    created: float
    last_used: float
    requests: int = 0
    running: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Sessions:
    """By id, the least recently used first. Beyond MAX_SESSIONS the first that runs no request goes."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Session] = OrderedDict()
        self.forgotten = 0  # sessions that made room for others
        self.on_gone: Callable[[str], None] = lambda session_id: None  # closed, or forgotten

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._by_id

    def open(self, session_id: str = "") -> Session:
        """A new session; the id is chosen when none is given. Raises CallError when it exists."""
        session_id = session_id or secrets.token_hex(8)
        known = self._by_id.get(session_id)
        if known is not None and known.opened:
            raise CallError("invalid", f"session {session_id!r} is open already")
        session = self._touch(session_id)
        session.opened = True
        return session

    def close(self, session_id: str) -> Session:
        """Forget a session; its last figures. Raises CallError when there is none."""
        session = self._by_id.pop(session_id, None)
        if session is None:
            raise CallError("not_found", f"no session {session_id!r} here; {len(self)} are known")
        self.on_gone(session_id)
        return session

    def started(self, session_id: str) -> None:
        """A request of the session arrived."""
        session = self._touch(session_id)
        session.requests += 1
        session.running += 1

    def ended(self, session_id: str, prompt_tokens: int, completion_tokens: int) -> None:
        """A request of the session ended (the session may have been closed meanwhile)."""
        if session := self._by_id.get(session_id):
            session.running = max(0, session.running - 1)
            session.prompt_tokens += prompt_tokens
            session.completion_tokens += completion_tokens
            session.last_used = time.time()

    def listed(self, limit: int) -> list[dict[str, Any]]:
        """The `limit` most recently used, newest first."""
        newest = list(reversed(self._by_id.values()))[:limit]
        return [structs.asdict(session) for session in newest]

    def _touch(self, session_id: str) -> Session:
        if len(session_id.encode()) > MAX_ID_BYTES:
            raise CallError("invalid", f"a session id has at most {MAX_ID_BYTES} bytes")
        now = time.time()
        session = self._by_id.get(session_id)
        if session is None:
            self._make_room()
            session = self._by_id[session_id] = Session(session_id, False, now, now)
        session.last_used = now
        self._by_id.move_to_end(session_id)
        return session

    def _make_room(self) -> None:
        if len(self._by_id) >= MAX_SESSIONS:
            idle = next((s.id for s in self._by_id.values() if not s.running), next(iter(self._by_id)))
            del self._by_id[idle]
            self.forgotten += 1
            self.on_gone(idle)

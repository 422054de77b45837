"""Control calls to workers: each gets exactly one answer, from the worker, its death or the deadline."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from mlxhost.wire.control import Ctl, News, Reply

Peer = tuple[str, int]  # slot, epoch
OnNews = Callable[[News], None]


class Calls:
    """The calls in flight. `send` says whether a CTL could be queued for a peer."""

    def __init__(self, send: Callable[[Peer, Ctl], bool]) -> None:
        self._send = send
        self._pending: dict[str, tuple[Peer, asyncio.Future[Reply], OnNews]] = {}
        self.late = 0  # answers that nobody waited for any more

    async def call(
        self,
        peer: Peer,
        op: str,
        args: dict[str, Any],
        deadline_s: float,
        on_news: OnNews = lambda _: None,
    ) -> Reply:
        """The one answer to `op`. NEWS on the way goes to `on_news`."""
        call_id = secrets.token_hex(8)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = peer, answer, on_news
        try:
            if not self._send(peer, Ctl(call_id, op, peer[0], args, deadline_s)):
                return Reply(call_id, "lost", f"{peer[0]} does not take messages")
            return await asyncio.wait_for(answer, deadline_s)
        except TimeoutError:
            return Reply(call_id, "timeout", f"{peer[0]} did not answer {op} within {deadline_s:.0f} s")
        finally:
            del self._pending[call_id]

    def on_reply(self, peer: Peer, reply: Reply) -> None:
        """Settle the call; an answer that is late or from another process than was asked is dropped."""
        asked, answer, _ = self._pending.get(reply.call_id, (None, None, None))
        if answer is not None and asked == peer and not answer.done():
            answer.set_result(reply)
        else:
            self.late += 1

    def on_news(self, peer: Peer, news: News) -> None:
        """Pass news of a call on to whoever waits for it."""
        asked, answer, tell = self._pending.get(news.call_id, (None, None, None))
        if tell is not None and answer is not None and asked == peer and not answer.done():
            tell(news)

    def fail(self, peer: Peer) -> None:
        """The process is gone: so are its answers."""
        for call_id, (asked, answer, _) in self._pending.items():
            if asked == peer and not answer.done():
                answer.set_result(Reply(call_id, "lost", f"{peer[0]} died before it answered"))

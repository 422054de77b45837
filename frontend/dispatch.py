"""The one owner of the data ROUTER: rows out to the workers, tokens back to the rows.

Guarantees to the HTTP side: every row ends exactly once (finished, rejected, or lost), whatever workers
send or fail to send; late, duplicate and foreign messages change nothing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import zmq

from mlxhost.frontend import logs
from mlxhost.frontend.errors import Aborted, ApiError, InternalError, ModelNotReady, Unavailable, WorkerLost
from mlxhost.frontend.hints import Hints
from mlxhost.frontend.models import ModelTable, replica_key
from mlxhost.frontend.rejects import reject_error
from mlxhost.frontend.remote import Route
from mlxhost.frontend.replay import Replays
from mlxhost.frontend.replica import Replica
from mlxhost.frontend.router import Router
from mlxhost.frontend.routing import ReplicaKey
from mlxhost.frontend.rows import Call, Row, RowSpec
from mlxhost.frontend.zmqloop import LoopSocket
from mlxhost.wire import data, sockets
from mlxhost.wire.codec import Buffer, decode, encode
from mlxhost.wire.control import Fleet
from mlxhost.wire.errors import DecodeError

# A replica may be ready a moment before its data link is up.
CONNECT_WAIT_S = 2.0
# The supervisor finds a stuck worker within seconds; this is for a worker that it believes healthy.
SILENCE_S = 600.0
# A worker on another machine reports its load each second, also while it is busy.
REMOTE_SILENCE_S = 8.0
# How many seconds running a worker must report that it has no rows before ours are given up.
IDLE_TICKS = 3
MAX_UNKNOWN_PEERS = 1024
_HANDLES = 1 << 32


class Dispatcher:
    """Rows by (replica, handle), replicas by (slot, epoch). `ordinal` is this frontend's number."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        table: ModelTable,
        *,
        ordinal: int = 0,
    ) -> None:
        self._table = table
        self._replicas: dict[ReplicaKey, Replica] = {}
        self.router = Router(ordinal)
        self._replays = Replays(self._resend)
        self._next_handle = 0
        self._changed = asyncio.Event()
        # Told of a model that a lost row waits for; raises ApiError when it will not come.
        self.on_absent: Callable[[str], None] = lambda _: None
        self.dropped: Counter[str] = Counter()  # messages that were ignored, by reason
        socket = context.socket(zmq.ROUTER)
        sockets.configure(socket)
        socket.setsockopt(zmq.RCVHWM, sockets.OUT_HIGH_WATER_MARK)
        if endpoint.startswith("ipc://"):
            sockets.bind_ipc(socket, endpoint)
        self._socket = LoopSocket(socket, lambda frames: self.on_message(frames, self._socket))
        self._socket.start()

    def close(self) -> None:
        self._socket.close()

    # --- requests -------------------------------------------------------------------------------------

    async def start(self, name: str, specs: Sequence[RowSpec]) -> Call:
        """Route and send one ADD for each spec; all have the same hints.

        Raises ModelNotReady, ShuttingDown, ReplicaNotReady or BadRequest; then no row is left running.
        """
        await self._connected(name, specs[0].hints)
        call = Call()
        try:
            for index, spec in enumerate(specs):
                row = Row(0, index, name, ("", 0), 0, spec, call)
                call.rows.append(row)
                if not self._send_add(row):
                    self._replays.lost(row, WorkerLost(name, "it could not be reached"))
        except ApiError:
            self.abort(call, "another choice of the request could not be sent")
            raise
        return call

    def abort(self, call: Call, reason: str) -> None:
        """Forget the call's rows and stop those that still run; harmless on finished ones."""
        for row in call.rows:
            self.abort_row(row, reason)

    def abort_row(self, row: Row, reason: str) -> None:
        """Stop one row, if it runs. Whatever its worker still sends for it is ignored."""
        self._replays.cancel(row)
        replica = self._replicas.get(row.replica)
        if replica is not None and self._forget(replica, row):
            replica.unsent_aborts.append((row.handle, reason))
            self._flush_aborts(replica)

    def replay_for(self, seconds: float) -> None:
        """How long a request whose worker was lost may wait for another one."""
        self._replays.wait_s = seconds

    async def _connected(self, name: str, hints: Hints) -> None:
        """Return once a ready replica that the request may use has its data link up."""
        deadline = time.monotonic() + CONNECT_WAIT_S
        while not self.router.can_route(model := self._table.current(name), hints):
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unavailable(
                    f"The model {model.name!r} is ready but its workers are not connected to this frontend",
                    "worker_not_connected",
                )
            waiter = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait((waiter,), timeout=left)
            waiter.cancel()

    def _send_add(self, row: Row) -> bool:
        """Route the row and send its ADD; False when no replica can be reached now.

        Raises what says that the model cannot serve the request.
        """
        spec, model = row.spec, self._table.current(row.model)
        while replica := self.router.choose(model, spec.hints, spec.prompt):
            handle, seq = self._new_handle(replica), replica.seq + 1
            add = data.Add(
                handle=handle,
                seq=seq,
                request_id=spec.request_id,
                sampling=spec.sampling,
                limits=spec.limits,
                priority=spec.priority,
                client=spec.client,
                cache_salt=spec.cache_salt,
                session_id=spec.session_id,
                grammar=spec.grammar,
                trace=spec.trace,
            )
            if not self._try_send(replica, encode(add, spec.prompt)):
                continue
            replica.seq = seq
            replica.add_pending(seq, spec.prompt_tokens + (spec.limits.max_tokens or 0))
            row.handle, row.replica, row.seq = handle, replica.key, seq
            replica.rows[handle] = row
            self.router.sent(model, replica, spec.hints, spec.prompt)
            return True
        return False

    def _resend(self, row: Row) -> bool:
        """Start a row anew. Raises like `_send_add`."""
        try:
            sent = self._send_add(row)
        except ModelNotReady:
            self.on_absent(row.model)
            raise
        if sent:
            logs.info("replayed", id=row.spec.request_id, slot=row.replica[0], epoch=row.replica[1])
        return sent

    def _try_send(self, replica: Replica, frames: Sequence[bytes | memoryview]) -> bool:
        """Send an ADD; when the peer is gone or takes nothing, it counts as not connected."""
        try:
            self._send(replica, frames)
        except zmq.ZMQError as error:
            logs.warning("unreachable", slot=replica.key[0], epoch=replica.key[1], reason=error)
            replica.set_state(connected=False)
            if error.errno != zmq.EAGAIN:
                self._lose(replica, "its data link broke")
            return False
        return True

    def _send(self, replica: Replica, frames: Sequence[Buffer]) -> None:
        if replica.route is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        replica.route.send(frames)

    def _flush_aborts(self, replica: Replica) -> None:
        if not replica.unsent_aborts:
            return
        try:
            self._send(replica, encode(data.Abort(list(replica.unsent_aborts))))
        except zmq.Again:
            return  # its queue is full; `tick` tries again
        except zmq.ZMQError:
            pass  # the peer is gone, and its rows with it
        replica.unsent_aborts.clear()

    def _new_handle(self, replica: Replica) -> int:
        taken = True
        while taken:
            self._next_handle = (self._next_handle + 1) % _HANDLES
            taken = self._next_handle in replica.rows
        return self._next_handle

    # --- the fleet ------------------------------------------------------------------------------------

    def on_fleet(self, fleet: Fleet) -> None:
        """Take over the fleet's new state: rows of replicas that are gone are started anew, or end with
        WorkerLost."""
        self._table.update(fleet)
        live = {}
        for model, listed in self._table.live_replicas():
            key = replica_key(listed)
            live[key] = self._replicas.setdefault(key, Replica(key))
            live[key].model = model.name
        self.router.update(fleet, live)
        newest = dict(sorted(live))
        for key, replica in list(self._replicas.items()):
            superseded = key[1] < newest.get(key[0], 0)
            if key not in live and (replica.model or superseded):
                del self._replicas[key]
                self._lose(replica, "its process ended")
        self._wake()

    def tick(self) -> None:
        """Call each second: the last resorts against a worker that lost a row or says nothing."""
        now = time.monotonic()
        for replica in self._replicas.values():
            self._flush_aborts(replica)
            if not replica.rows:
                replica.idle_ticks = 0
                continue
            idle = not replica.load.running and not replica.load.waiting and not replica.pending
            replica.idle_ticks = replica.idle_ticks + 1 if idle else 0
            if replica.idle_ticks > IDLE_TICKS:
                self._lose(replica, "it no longer knows the request")
            elif now - replica.heard > (silence := self._silence_s(replica)):
                replica.set_state(connected=False)  # until it says something
                self._lose(replica, f"it has said nothing for {silence:g} s")

        self._replays.go_on()

    def _silence_s(self, replica: Replica) -> float:
        here = replica.route is None or replica.route.socket is self._socket
        return SILENCE_S if here else REMOTE_SILENCE_S

    def _lose(self, replica: Replica, why: str) -> None:
        """Start all rows of a replica anew, or end them."""
        for row in list(replica.rows.values()):
            self._forget(replica, row)
            self._replays.lost(row, WorkerLost(row.model, why))
        self._wake()

    def _wake(self) -> None:
        """Something changed that requests may wait for."""
        self._changed.set()
        self._changed = asyncio.Event()
        asyncio.get_running_loop().call_soon(self._replays.go_on)

    # --- messages from workers ------------------------------------------------------------------------

    def on_message(self, frames: list[bytes], source: LoopSocket) -> None:
        """Take in what a worker sent to `source`, [identity, frame...]."""
        key = sockets.parse_identity(frames[0])
        if key is None:
            self._drop(("?", 0), "identity", repr(frames[0]))
            return
        try:
            message, _ = decode(frames[1:])
        except DecodeError as error:
            self._drop(key, "undecodable", str(error))
            return
        replica = self._replicas.get(key) or self._unknown_peer(key)
        if replica is None:
            self._drop(key, "unknown_peer", "too many peers that no fleet lists")
            return
        replica.heard = time.monotonic()
        if replica.route is None or replica.route.identity != frames[0]:
            self._on_connection(replica, Route(source, frames[0]))
        match message:
            case data.Out():
                self._on_out(replica, message)
            case data.Accepted():
                self._on_accepted(replica, message)
            case data.Reject():
                if row := replica.rows.get(message.handle):
                    self._on_reject(replica, row, message)
            case _:
                self._drop(key, "unexpected", type(message).__name__)

    def _on_connection(self, replica: Replica, route: Route) -> None:
        """The replica speaks from a new connection; what the one before had in flight is lost with it."""
        if replica.route is not None:
            replica.set_state(connected=False)
            self._lose(replica, "its connection was cut")
        replica.route = route

    def _unknown_peer(self, key: ReplicaKey) -> Replica | None:
        """A worker may dial before the FLEET that lists it gets here."""
        if sum(not r.model for r in self._replicas.values()) >= MAX_UNKNOWN_PEERS:
            return None
        return self._replicas.setdefault(key, Replica(key))

    def _on_out(self, replica: Replica, out: data.Out) -> None:
        if out.epoch != replica.key[1]:
            self._drop(replica.key, "epoch", f"OUT of epoch {out.epoch}")
            return
        if not _well_formed(out):
            self._drop(replica.key, "columns", "OUT whose columns do not agree")
            return
        replica.take_load(out.load)
        if not replica.connected:
            replica.set_state(connected=True)
            self._wake()
        start = 0
        for i, (handle, count) in enumerate(zip(out.handles, out.counts, strict=True)):
            end = start + count
            row = replica.rows.get(handle)
            if row is not None:
                ids = out.tokens[start:end]
                row.received += count
                if out.finish[i]:
                    row.tokens += ids
                    self._on_finish(replica, row, out, i)
                    row.call.touch(row)
                elif not self._push(row, ids):
                    row.tokens += ids
                    row.call.touch(row)
            start = end

    def _push(self, row: Row, ids: list[int]) -> bool:
        """Give a row's ids to its stream; an error there ends that row, and only that."""
        try:
            return row.call.push(row, ids)
        except Exception:
            logs.exception("stream_failed", handle=row.handle)
            self.abort_row(row, "the answer failed")
            row.error = InternalError("the answer failed")
            return False

    def _on_finish(self, replica: Replica, row: Row, out: data.Out, i: int) -> None:
        row.cached_tokens = _cell(out.cached_tokens, i, row.cached_tokens)
        row.completion_tokens = _cell(out.completion_tokens, i, row.received)
        detail = out.detail[i] if out.detail else ""
        finish = data.Finish(out.finish[i])
        if finish is data.Finish.ERROR:
            self._end(replica, row, error=InternalError(detail or "generation failed", "generation_failed"))
        elif finish is data.Finish.ABORT:  # not by us: rows that we abort are forgotten at once
            why = detail or "it stopped before the answer was complete"
            self._end(replica, row, error=WorkerLost(row.model, why))
        elif finish is data.Finish.CANCELLED:
            self._end(replica, row, error=Aborted(row.model, detail or "by an operator"))
        else:
            self._end(replica, row, finish=finish)

    def _on_accepted(self, replica: Replica, accepted: data.Accepted) -> None:
        if row := replica.rows.get(accepted.handle):
            row.accepted = True
            row.cached_tokens = accepted.cached_tokens
            row.warning = accepted.warning
            row.call.touch(row)

    def _on_reject(self, replica: Replica, row: Row, reject: data.Reject) -> None:
        """A worker that is about to end never ran the row: it is started where the model runs next."""
        if reject.code == data.REJECT_DRAINING and row.attempt == 1:
            if self._forget(replica, row):
                self._replays.lost(row, WorkerLost(row.model, "it was being unloaded"))
                self._wake()
        else:
            self._end(replica, row, error=reject_error(row.model, reject))

    def _end(
        self,
        replica: Replica,
        row: Row,
        *,
        finish: data.Finish = data.Finish.RUNNING,
        error: ApiError | None = None,
    ) -> None:
        if self._forget(replica, row):
            row.finish, row.error = finish, error
            row.call.touch(row)

    def _forget(self, replica: Replica, row: Row) -> bool:
        """Take a row off the books; False when it was not on them, so that nothing ends twice."""
        replica.settle(row.seq)
        return replica.rows.pop(row.handle, None) is not None

    def _drop(self, key: ReplicaKey, reason: str, detail: str) -> None:
        self.dropped[reason] += 1
        count = self.dropped[reason]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th...: a flood of them must not flood the log
            logs.warning(
                "message_dropped", slot=key[0], epoch=key[1], reason=reason, count=count, detail=detail
            )


def data_endpoint(runtime_dir: str, slot: str, epoch: int) -> str:
    """Where a frontend binds its data ROUTER."""
    return sockets.ipc_endpoint(Path(runtime_dir), f"data-{slot}-{epoch}")


def _well_formed(out: data.Out) -> bool:
    rows = len(out.handles)
    columns: Iterable[Sequence[object]] = (out.detail, out.completion_tokens, out.cached_tokens)
    return (
        len(out.counts) == len(out.finish) == rows
        and all(len(c) in (0, rows) for c in columns)
        and sum(out.counts) == len(out.tokens)
        and min(out.counts, default=0) >= 0
        and min(out.finish, default=0) >= 0
        and max(out.finish, default=0) <= data.Finish.CANCELLED
    )


def _cell(column: Sequence[int], i: int, default: int) -> int:
    return column[i] if column else default

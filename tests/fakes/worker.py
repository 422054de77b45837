"""A worker without MLX that speaks the whole wire and misbehaves on request.

Started like the real one (Boot line on stdin) as `python -I tests/fakes/worker.py`. Without a script it
serves its model directory's card and answers each request with the request's own prompt ids, one a step,
then Finish.STOP (or LENGTH when max_tokens comes first).

The script is JSON in $MLXHOST_FAKE: an object of the fields of `Script`, or a map from model name (or
slot) to such an object. `only_epoch` limits the faults to one spawn, so that the next one is healthy.
`answers` scripts control operations; other operations are `unsupported`, except flush and health.
"""

import faulthandler
import os
import signal
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from mlxhost.wire import control, data, sockets, version
from mlxhost.wire.boot import Boot, read_boot
from mlxhost.wire.codec import decode, encode
from mlxhost.wire.curve import KeyPair
from mlxhost.wire.dial import Change, Dialer
from mlxhost.wire.errors import DecodeError
from mlxhost.worker.card import model_card

sys.path.insert(0, str(Path(__file__).parent))  # -I leaves it out
from script import Answer, Script, load_script


class Row(msgspec.Struct):
    add: data.Add
    answer: list[int]
    limit: int
    prompt: int
    sent: int = 0
    ready_at: float = 0.0
    aborted: bool = False


class FakeWorker:
    """One thread, one poller: control DEALER, a data DEALER for each frontend, and the lifeline."""

    def __init__(self, boot: Boot, script: Script) -> None:
        self.boot, self.script = boot, script
        self.faulty = script.only_epoch in (None, boot.epoch)
        self.context = zmq.Context()
        self.control = self.dealer(boot.control)
        self.data: dict[str, zmq.Socket[bytes]] = {}  # by endpoint
        self.dialers: dict[str, Dialer] = {}  # of frontends on another machine, by endpoint
        self.rows: dict[tuple[str, int], Row] = {}
        self.queue: deque[tuple[str, int]] = deque()
        self.emitted = self.step = self.tick = self.last_seq = 0
        self.replies: list[tuple[float, control.Reply]] = []
        self.heartbeat_s, self.next_beat, self.was_busy = 1.0, 0.0, False
        self.stopping: float | None = None
        self.malformed = False
        self.mode = self.was_mode = "running"
        self.hung_up = False
        self.prefilled_at = 0.0

    def dealer(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self.context.socket(zmq.DEALER)
        sockets.configure(socket)
        socket.setsockopt(zmq.IDENTITY, sockets.identity(self.boot.slot, self.boot.epoch))
        socket.connect(endpoint)
        return socket

    def due(self, count: int | None) -> bool:
        return self.faulty and count is not None and self.emitted >= count

    def handshake(self) -> None:
        script, boot = self.script, self.boot
        protocol = (version.PROTOCOL_MAJOR, version.PROTOCOL_MINOR)
        if script.hello_protocol and self.faulty:
            protocol = (script.hello_protocol[0], script.hello_protocol[1])
        token = script.hello_token if script.hello_token and self.faulty else boot.token
        self.control.send_multipart(
            encode(
                control.Hello(
                    protocol=protocol,
                    schema=version.SCHEMA,
                    role="worker",
                    slot=boot.slot,
                    epoch=boot.epoch,
                    pid=os.getpid(),
                    token=token,
                    build="fake",
                    model=boot.model,
                )
            )
        )
        init = self.await_init()
        if isinstance(init, control.Refused):
            sys.exit(f"refused: {init.code}: {init.message}")
        if not isinstance(init, control.Init) or init.worker is None:
            sys.exit(f"expected INIT, got {init!r}")
        self.heartbeat_s = init.heartbeat_s
        end = time.monotonic() + script.load_s
        while (left := end - time.monotonic()) > 0:
            if not script.silent_load:
                done = int(1000 * (1 - left / script.load_s))
                self.control.send_multipart(encode(control.Progress("loading", done, 1000)))
            time.sleep(min(left, 0.05))
        if script.boot_exit is not None and self.faulty:
            sys.exit(script.boot_exit)
        if script.boot_error and self.faulty:
            self.control.send_multipart(encode(control.Dead(*script.boot_error)))
            self.control.close(linger=1000)
            self.context.term()
            sys.exit(1)
        self.control.send_multipart(
            encode(
                control.Ready(
                    max_model_len=script.max_model_len,
                    kv_capacity_tokens=script.kv_capacity,
                    kv_bytes_per_token=1024,
                    block_tokens=256,
                    dtype="float32",
                    weights_bytes=1_000_000,
                    resident_bytes=script.resident_bytes,
                    device_working_set=0,
                    max_rows=script.max_rows,
                    max_queued=script.max_queued,
                    operations=["flush", "health", *script.answers],
                    tasks=["generate"],
                    card=model_card(Path(init.worker.path)),
                    backend="fake",
                )
            )
        )

    def await_init(self) -> Any:
        """The answer to HELLO; ends the process when the supervisor goes first."""
        poller = zmq.Poller()
        poller.register(0, zmq.POLLIN)
        poller.register(self.control, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(10_000))
            if 0 in ready and not os.read(0, 4096):
                os._exit(0)
            if self.control in ready:
                return decode(self.control.recv_multipart())[0]

    def load(self) -> data.Load:
        running = len(self.rows) - len(self.queue)
        used = sum(r.prompt + r.limit for key, r in self.rows.items() if key not in self.queue)
        return data.Load(
            running=running,
            waiting=len(self.queue),
            kv_tokens=used,
            kv_capacity=self.script.kv_capacity,
            last_seq=self.last_seq,
            tick=self.tick,
        )

    def send_out(self, endpoint: str, out: data.Out) -> None:
        if self.script.wrong_epoch and self.faulty:
            out = msgspec.structs.replace(out, epoch=out.epoch + 1000)
        self.data[endpoint].send_multipart(encode(out))

    def out(
        self, handles: list[int], counts: list[int], tokens: list[int], finish: list[int], **more: Any
    ) -> data.Out:
        return data.Out(self.boot.epoch, self.step, self.load(), handles, counts, tokens, finish, **more)

    def on_add(self, endpoint: str, add: data.Add, prompt: bytes) -> None:
        self.last_seq = add.seq
        key = (endpoint, add.handle)
        ids = memoryview(prompt).cast("I").tolist()
        reject = self.script.reject if self.faulty else None
        if reject is None and key in self.rows:
            reject = [data.REJECT_DUPLICATE, f"handle {add.handle} is in use", None]
        if reject is None and len(self.queue) >= self.script.max_queued:
            reject = [data.REJECT_QUEUE_FULL, f"{len(self.queue)} requests wait already", 1.0]
        if add.grammar is not None and self.script.grammar_error:
            reject = [data.REJECT_GRAMMAR, self.script.grammar_error, None]
        if add.grammar is not None and add.grammar.strict and self.script.grammar_warning:
            reject = [data.REJECT_GRAMMAR, self.script.grammar_warning, None]
        if reject is not None:
            self.data[endpoint].send_multipart(encode(data.Reject(add.handle, *reject)))
            return
        answer = self.script.answer or ids or [0]
        room = self.script.max_model_len - len(ids)
        limit = min(add.limits.max_tokens or room, room)
        ready = time.monotonic() + self.script.accept_ms / 1000
        self.prefilled_at = time.monotonic() + self.script.prefill_s
        self.rows[key] = Row(add, answer, limit, len(ids), ready_at=ready)
        self.queue.append(key)

    def admit(self) -> None:
        while self.queue and len(self.rows) - len(self.queue) < self.script.max_rows:
            key = self.queue[0]
            row = self.rows[key]
            if row.ready_at > time.monotonic() and not row.aborted:
                return
            self.queue.popleft()
            warning = self.script.grammar_warning if row.add.grammar is not None else ""
            self.data[key[0]].send_multipart(encode(data.Accepted(key[1], 0, row.limit, warning)))

    def run_step(self) -> None:
        """One token for every admitted row, one OUT for each frontend."""
        if self.due(self.script.silent_after):
            return
        self.step += 1
        self.tick += 1
        if time.monotonic() < self.prefilled_at:
            return
        for endpoint in self.data:
            keys = [k for k in self.rows if k[0] == endpoint and k not in self.queue]
            if not keys:
                continue
            counts, tokens, finish, detail = [], [], [], []
            for key in keys:
                row = self.rows[key]
                length = min(self.script.length or len(row.answer), row.limit)
                new = [] if row.aborted else [row.answer[row.sent % len(row.answer)]]
                row.sent += len(new)
                self.emitted += len(new)
                ended = data.Finish.RUNNING
                if row.aborted:
                    ended = data.Finish.ABORT
                elif self.script.row_error and self.faulty:
                    ended = data.Finish.ERROR
                elif row.sent >= length:
                    ended = data.Finish.LENGTH if row.sent >= row.limit else data.Finish.STOP
                counts.append(len(new))
                tokens += new
                finish.append(int(ended))
                detail.append((self.script.row_error or "") if ended == data.Finish.ERROR else "")
            rows = [self.rows[k] for k in keys]
            ended_keys = [k for k, f in zip(keys, finish, strict=True) if f]
            for key in ended_keys:
                del self.rows[key]
            out = self.out(
                [k[1] for k in keys],
                counts,
                tokens,
                finish,
                detail=detail if any(detail) else [],
                prompt_tokens=[r.prompt for r in rows] if ended_keys else [],
                completion_tokens=[r.sent for r in rows] if ended_keys else [],
                cached_tokens=[0] * len(rows) if ended_keys else [],
            )
            if self.due(self.script.malformed_after) and not self.malformed:
                self.malformed = True
                self.data[endpoint].send_multipart([encode(out)[0], b"\xc1 not msgpack"])
            self.send_out(endpoint, out)
            if self.faulty:
                self.flood(endpoint, self.script.flood)
            if self.script.duplicate_terminal and self.faulty and ended_keys:
                self.send_out(endpoint, out)

    def flood(self, endpoint: str, count: int) -> None:
        foreign = self.out([1 << 31] * 50, [20] * 50, [7] * 1000, [0] * 50)
        lopsided = self.out([1, 2, 3], [9], [1], [])
        unasked = data.Reject(1 << 30, data.REJECT_INTERNAL, "nobody asked")
        kinds = [encode(foreign), encode(lopsided), encode(unasked), [b"\xc1", b"\xc1"]]
        for i in range(count):
            self.data[endpoint].send_multipart(kinds[i % len(kinds)])

    def apply_faults(self) -> None:
        if self.due(self.script.die_after):
            time.sleep(0.05)  # let zmq's own thread send what was queued
            os.kill(os.getpid(), signal.SIGKILL)
        if self.due(self.script.abort_after):
            self.control.send_multipart(encode(control.Dead("engine", "scripted engine failure")))
            time.sleep(0.05)
            os._exit(1)
        if self.due(self.script.hang_up_after) and not self.hung_up:
            self.hung_up = True
            self.control.close(linger=0)
        while self.due(self.script.freeze_after):
            time.sleep(1)

    def on_fleet(self, fleet: control.Fleet) -> None:
        live = {f.endpoint for f in fleet.frontends}
        for frontend in fleet.frontends:
            endpoint = frontend.endpoint
            if frontend.public_key and endpoint not in self.dialers:
                self.dialers[endpoint] = self.dialer(frontend)
            elif not frontend.public_key and endpoint not in self.data:
                self.data[endpoint] = self.dealer(endpoint)
                self.send_out(endpoint, self.out([], [], [], []))
        for endpoint in self.dialers.keys() - live:
            self.dialers.pop(endpoint).close()
            self.drop(endpoint)
        for endpoint in self.data.keys() - live:
            self.drop(endpoint)

    def dialer(self, frontend: control.FleetFrontend) -> Dialer:
        boot = self.boot
        keys = KeyPair(boot.curve_public, boot.curve_secret)
        name = partial(sockets.identity, boot.slot, boot.epoch)
        return Dialer(self.context, frontend.endpoint, keys, frontend.public_key, name)

    def pump_dialers(self) -> None:
        """Follow the connections to frontends on another machine."""
        for endpoint, dialer in self.dialers.items():
            while (change := dialer.pump()) is not Change.NOTHING:
                if change is Change.UP:
                    self.data[endpoint] = dialer.socket
                    self.send_out(endpoint, self.out([], [], [], []))
                elif change is Change.DOWN:
                    self.drop(endpoint)

    def drop(self, endpoint: str) -> None:
        """Nobody reads this frontend's rows any more."""
        if socket := self.data.pop(endpoint, None):
            socket.close(linger=0)
        for key in [k for k in self.rows if k[0] == endpoint]:
            del self.rows[key]
        self.queue = deque(k for k in self.queue if k in self.rows)

    def on_control(self, message: Any) -> None:
        match message:
            case control.Fleet():
                self.on_fleet(message)
            case control.Stop():
                self.stopping = time.monotonic() + message.deadline_s
            case control.Ctl():
                self.on_call(message)

    def on_call(self, ctl: control.Ctl) -> None:
        own = {
            "flush": Answer(self.script.flush_result),
            "health": Answer({"emitted": self.emitted}),
        }
        answer = self.script.answers.get(ctl.op) or own.get(ctl.op)
        if answer is None:
            answer = Answer(code="unsupported", message=f"fake worker: {ctl.op}")
        for line in answer.news:
            self.control.send_multipart(encode(control.News(ctl.call_id, line, {"line": line})))
        if ctl.op == "health":
            self.next_beat = 0.0
        if answer.mode:
            self.mode = answer.mode
            self.beat()
        reply = control.Reply(ctl.call_id, answer.code, answer.message, answer.result or {"args": ctl.args})
        self.replies.append((time.monotonic() + self.script.late_reply_s + answer.delay_s, reply))

    def on_data(self, endpoint: str, frames: list[bytes]) -> None:
        try:
            message, binary = decode(frames)
        except DecodeError as error:
            if error.tag == "add":
                reject = data.Reject(error.handle, data.REJECT_BAD_MESSAGE, str(error))
                self.data[endpoint].send_multipart(encode(reject))
            return
        if isinstance(message, data.Add):
            self.on_add(endpoint, message, bytes(binary[0]))
        elif isinstance(message, data.Abort):
            for handle, _ in message.rows:
                if row := self.rows.get((endpoint, handle)):
                    row.aborted = True

    def beat(self) -> None:
        if self.hung_up:
            return
        now, busy, mode = time.monotonic(), bool(self.rows) and self.mode == "running", self.mode
        if now < self.next_beat and (busy, mode) == (self.was_busy, self.was_mode):
            return
        self.next_beat, self.was_busy, self.was_mode = now + self.heartbeat_s, busy, mode
        beat = control.Heartbeat(busy, self.load(), 20_000_000, len(self.rows), mode)
        self.control.send_multipart(encode(beat))
        for endpoint in self.data:
            here = any(key[0] == endpoint for key in self.rows)
            if not busy or not here or endpoint in self.dialers:
                self.send_out(endpoint, self.out([], [], [], []))

    def drain_sockets(self, timeout_ms: float) -> None:
        poller = zmq.Poller()
        poller.register(0, zmq.POLLIN)
        if not self.hung_up:
            poller.register(self.control, zmq.POLLIN)
        for socket in self.data.values():
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(timeout_ms))
        if 0 in ready and not os.read(0, 4096):
            os._exit(0)
        if self.control in ready:
            self.on_control(decode(self.control.recv_multipart())[0])
        for endpoint, socket in list(self.data.items()):
            while socket in ready and not socket.closed and socket.poll(0):
                self.on_data(endpoint, socket.recv_multipart())

    def run(self) -> None:
        self.handshake()
        next_step = 0.0
        while self.stopping is None or (self.rows and time.monotonic() < self.stopping):
            wait = max(0.0, next_step - time.monotonic()) if self.rows else 0.05
            self.drain_sockets(min(wait, 0.05) * 1000)
            self.pump_dialers()
            self.admit()
            if self.rows and self.mode == "running" and time.monotonic() >= next_step:
                next_step = time.monotonic() + self.script.step_ms / 1000
                self.run_step()
                self.apply_faults()
            for due, reply in [r for r in self.replies if r[0] <= time.monotonic()]:
                self.control.send_multipart(encode(reply))
                self.replies.remove((due, reply))
            self.beat()
        self.context.destroy(linger=500)


def main() -> None:
    faulthandler.enable()
    boot = read_boot()
    sockets.process_dies_with_parent(boot.parent)
    FakeWorker(boot, load_script(boot)).run()


if __name__ == "__main__":
    main()

"""The machines that serve for this fleet: who is connected, what they say, and when they are given up.

A machine is heard each heartbeat and whenever something changes there. Its connection ending is seen at
once; it then has a moment to dial again, as a router's restart should cost no stream. After that, or when
it falls silent, its replicas are lost: their streams end and nothing new is sent there. They stay listed for
a while, so that requests are asked to retry rather than told that there is no such model.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from mlxhost.supervisor.clock import PAUSE_SECONDS
from mlxhost.supervisor.core import Core
from mlxhost.supervisor.errors import UserError
from mlxhost.supervisor.handshake import Expected, refuse
from mlxhost.supervisor.remote import mirror
from mlxhost.supervisor.remote.keyring import Host as HostKey
from mlxhost.supervisor.remote.keyring import Keyring, token_hash
from mlxhost.supervisor.remote.listener import RemoteListener
from mlxhost.supervisor.state import WAS_READY, Frontend, Goal, Replica, State
from mlxhost.wire import control
from mlxhost.wire.curve import KeyPair, belongs_to, parse_endpoint, supervisor_slot, tcp_endpoint
from mlxhost.wire.errors import DecodeError
from mlxhost.wire.sockets import parse_identity

CUT_GRACE_SECONDS = 2.0  # from a cut connection to giving its machine up
FORGET_SECONDS = 600.0  # from there to taking its replicas off the list
ALLOWLIST_SECONDS = 0.5  # how often the keyring is looked at
# Orders are answered as soon as they are understood; what comes of them shows in the reports.
ORDER_SECONDS = 10.0


@dataclass(slots=True)
class Host:
    """One machine and its present connection. Times are time.monotonic(); 0: not."""

    name: str
    peer: bytes
    epoch: int
    heard_at: float
    cut_at: float = 0.0
    lost_at: float = 0.0
    leaving: bool = False


class Hosts:
    """The fleet's side of every joined machine."""

    def __init__(self, core: Core, keyring: Keyring, keys: KeyPair, listener: RemoteListener) -> None:
        self._core, self._keyring, self._keys, self._listener = core, keyring, keys, listener
        self._hosts: dict[str, Host] = {}
        self._keyed: dict[str, HostKey] = {}
        self._calls: dict[str, tuple[str, int]] = {}  # call id -> (slot, epoch) that was asked
        self._stamp = -1
        self._reload()

    def run(self) -> None:
        """Start everything that goes on beside the rest."""
        for work in (
            self._listener.answer_zap(),
            self._listener.watch(self._on_cut),
            self._receive(),
            self._keep_time(),
        ):
            self._core.background(work)

    @property
    def endpoint(self) -> str:
        """What other machines dial."""
        return self._listener.endpoint

    def status(self) -> dict[str, Any]:
        """For `ctl status`."""
        now = time.monotonic()
        return {
            "endpoint": self.endpoint,
            "refused": dict(self._listener.allowlist.refused),
            "hosts": [
                {"name": h.name, "connected": not h.lost_at, "heard_s": round(now - h.heard_at, 1)}
                for h in self._hosts.values()
            ],
        }

    def close(self) -> None:
        self._listener.close()

    # --- to frontends ---------------------------------------------------------------------------------

    def frontend_config(self) -> control.RemoteListen:
        host = parse_endpoint(self._core.settings.listen)[0]
        advertise = self._core.settings.advertise or host
        return control.RemoteListen(tcp_endpoint(host, 0), advertise, self._keys.public, self._keys.secret)

    def allow_on(self, frontend: Frontend) -> None:
        """Tell a frontend which machines may connect to it."""
        allowed = control.Allowed(self._keyring.allowed())
        self._core.send((frontend.slot, frontend.epoch), allowed)

    def _reload(self) -> None:
        """Take over the keyring: who lost their keys is out at once."""
        if (stamp := self._keyring.stamp()) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keyed = {h.name: h for h in self._keyring.hosts() if not h.revoked}
        except UserError as error:
            self._core.events.event("", str(error))
            return
        allowed = self._keyring.allowed()
        self._listener.allowlist.replace(allowed)
        for frontend in self._core.state.frontends:
            if frontend.greeted:
                self.allow_on(frontend)
        for host in [h for h in self._hosts.values() if h.name not in self._keyed]:
            refused = control.Refused("key", f"the keys of {host.name} were revoked")
            self._listener.send(host.peer, refused)
            self._core.events.event("", f"{host.name}: its keys were revoked")
            self._forget(host)

    # --- to the machines ------------------------------------------------------------------------------

    def publish(self) -> None:
        """Tell every machine where the frontends are."""
        for host in self._hosts.values():
            self._listener.send(host.peer, self._fleet())

    def _fleet(self) -> control.Fleet:
        state = self._core.state
        frontends = [
            control.FleetFrontend(f.slot, f.epoch, f.remote_endpoint, self._keys.public)
            for f in state.frontends
            if f.remote_endpoint
        ]
        return control.Fleet(state.version, frontends, [], state.accepting)

    def send(self, replica: Replica, ctl: control.Ctl) -> bool:
        """Pass a call on to the machine of `replica`."""
        host = self._hosts.get(replica.host)
        if host is None or host.lost_at or not self._listener.send(host.peer, ctl):
            return False
        self._calls[ctl.call_id] = replica.slot, replica.epoch
        return True

    def order(self, replica: Replica, op: str) -> None:
        """Have the machine of `replica` load or unload it."""
        self.send(replica, control.Ctl(secrets.token_hex(8), op, replica.slot, deadline_s=ORDER_SECONDS))

    async def answer_card_file(self, client: bytes, ctl: control.Ctl) -> None:
        """A frontend lacks a card's file: have it from a machine that serves the model."""
        wanted = ctl.args.get("sha256")
        reply = control.Reply(ctl.call_id, "not_found", f"no machine serves a model with the file {wanted!r}")
        for replica in list(self._core.state.replicas()):
            ready = replica.ready
            if replica.host and ready and any(f.sha256 == wanted for f in ready.card.files):
                key = (replica.slot, replica.epoch)
                answer = await self._core.calls.call(key, ctl.op, ctl.args, ctl.deadline_s)
                reply = msgspec.structs.replace(answer, call_id=ctl.call_id)
                if reply.code == "ok":
                    break
        self._core.control.send(client, reply)

    # --- from the machines ----------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            try:
                name, peer, message = await self._listener.receive()
            except DecodeError:
                self._core.state.bad_messages += 1
                continue
            sender = parse_identity(peer)
            if sender is None or not belongs_to(sender[0], name) or name not in self._keyed:
                self._listener.allowlist.refused["slot"] += 1
            elif isinstance(message, control.Hello):
                self._on_hello(name, peer, sender, message)
            elif (host := self._hosts.get(name)) and host.peer == peer:
                host.heard_at, host.cut_at = time.monotonic(), 0.0
                self._on_message(host, message)
            else:
                self._core.state.bad_messages += 1

    def _on_hello(self, name: str, peer: bytes, sender: tuple[str, int], hello: control.Hello) -> None:
        old, slot = self._hosts.get(name), supervisor_slot(name)
        newest = max(hello.epoch, old.epoch if old else 0)
        expected = Expected("host", slot, newest, self._keyed[name].token_hash, False)
        shown = msgspec.structs.replace(hello, token=token_hash(hello.token))
        if refused := refuse(shown, sender, expected):
            self._listener.allowlist.refused[refused.code] += 1
            self._listener.send(peer, refused)
            self._core.events.event("", f"{name} was turned away: {refused.message}")
            return
        if old is None or old.lost_at:
            self._core.events.event("", f"{name} joined")
        elif old.peer != peer:
            message = f"another process joined as {name}; each machine needs a bundle of its own"
            self._listener.send(old.peer, control.Refused("slot", message))
        self._hosts[name] = Host(name, peer, hello.epoch, time.monotonic())
        self._listener.send(peer, control.Init(heartbeat_s=self._core.timing.heartbeat_s))
        self._listener.send(peer, self._fleet())

    def _on_message(self, host: Host, message: Any) -> None:
        match message:
            case control.HostReport():
                self._on_report(host, message)
            case control.News():
                if asked := self._calls.get(message.call_id):
                    self._core.calls.on_news(asked, message)
            case control.Reply():
                if asked := self._calls.pop(message.call_id, None):
                    self._core.calls.on_reply(asked, message)
            case _:
                self._core.state.bad_messages += 1

    def _on_report(self, host: Host, report: control.HostReport) -> None:
        core, state = self._core, self._core.state
        if report.leaving and not host.leaving:
            host.leaving = True
            core.events.event("", f"{host.name} is leaving")
            for replica in self._replicas(host):
                replica.quiet_after = time.monotonic() + core.timing.settle_s
        before = self._seen(host)
        for line in mirror.apply(state, host.name, report.replicas, leaving=host.leaving):
            core.events.event("", line)
        after = self._seen(host)
        for slot, (epoch, _, _) in before.items():
            if slot not in after or after[slot][0] != epoch:
                core.calls.fail((slot, epoch))
        for replica in self._replicas(host):
            # A process that has something to finish is drained first.
            if replica.model.goal is Goal.UNLOAD and replica.state not in (State.UNLOADED, State.DRAINING):
                self.order(replica, "unload")
        if before != after:
            core.changed()
        if host.leaving and not report.replicas:
            self._forget(host)
            core.events.event("", f"{host.name} left")
        core.changes.notify()

    def _replicas(self, host: Host) -> list[Replica]:
        return [r for r in self._core.state.replicas() if r.host == host.name]

    def _seen(self, host: Host) -> dict[str, tuple[int, State, str]]:
        """What the rest of the fleet must hear of when it changes."""
        return {r.slot: (r.epoch, r.state, r.beat.mode if r.beat else "") for r in self._replicas(host)}

    # --- time -----------------------------------------------------------------------------------------

    def _on_cut(self, peer: bytes) -> None:
        for host in self._hosts.values():
            if host.peer == peer and not host.lost_at:
                host.cut_at = time.monotonic()

    async def _keep_time(self) -> None:
        checked, last = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(self._core.timing.tick_s)
            now = time.monotonic()
            if now - last > self._core.timing.tick_s + PAUSE_SECONDS:
                # This process was stopped and heard no one: blame no one for that.
                for host in self._hosts.values():
                    host.heard_at += now - last
            last = now
            if now - checked >= ALLOWLIST_SECONDS:
                checked = now
                self._reload()
            for host in list(self._hosts.values()):
                self._check(host, now)

    def _check(self, host: Host, now: float) -> None:
        stale_s = self._core.timing.stale_s
        if host.lost_at:
            if now - host.lost_at > FORGET_SECONDS:
                self._forget(host)
        elif host.cut_at and now - host.cut_at > CUT_GRACE_SECONDS:
            self._lose(host, f"the connection to {host.name} was cut")
        elif now - host.heard_at > stale_s:
            self._lose(host, f"{host.name} has not been heard for {stale_s:.0f} s")

    def _lose(self, host: Host, reason: str) -> None:
        host.lost_at = time.monotonic()
        self._core.events.event("", f"{reason}; its streams end, and it may come back")
        self._fail_calls(host)
        for replica in self._replicas(host):
            if replica.state in WAS_READY or replica.state in (State.STARTING, State.LOADING):
                mirror.lose(replica, reason)
        self._core.changed()

    def _fail_calls(self, host: Host) -> None:
        """No answer will come to what its replicas were asked."""
        lost = {(replica.slot, replica.epoch) for replica in self._replicas(host)}
        for peer in lost:
            self._core.calls.fail(peer)
        self._calls = {call: peer for call, peer in self._calls.items() if peer not in lost}

    def _forget(self, host: Host) -> None:
        del self._hosts[host.name]
        self._fail_calls(host)
        mirror.forget(self._core.state, self._replicas(host))
        self._core.changed()


def open_hosts(core: Core) -> Hosts:
    """Listen for other machines as the settings say. Raises UserError when that is not possible."""
    keyring = Keyring()
    keys = keyring.server_keys()
    if keys is None or not keyring.allowed():
        raise UserError(
            f"--listen {core.settings.listen}: no machine has keys to join with; make some first with "
            "`mlxhost keys new NAME`"
        )
    settings = core.settings
    return Hosts(core, keyring, keys, RemoteListener(settings.listen, settings.advertise, keys))

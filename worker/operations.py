"""Control operations of the engine: each CTL gets one REPLY, between two ticks. Engine thread only.

Calls that must not wait for the engine are answered by linkcalls.py. Arguments are checked against the
structs of callargs.py; what has to wait until nothing runs is put off and done in `settle`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mlxhost.wire.control import Ctl, News, Reply
from mlxhost.wire.data import Finish
from mlxhost.worker import callargs, linkcalls, memorycalls, unsupported
from mlxhost.worker.backend import resident_bytes
from mlxhost.worker.cache.report import Flushes, figures
from mlxhost.worker.engine import Engine, Outlet
from mlxhost.worker.errors import CallError, ModelError
from mlxhost.worker.modes import Hold, Mode
from mlxhost.worker.parameters import describe
from mlxhost.worker.profile import Profile
from mlxhost.worker.residence import Residence
from mlxhost.worker.row import Row

log = logging.getLogger(__name__)

Result = dict[str, Any]

# A call that waits gives up this long before its deadline, so that the answer is in time.
_MARGIN_S = 0.5


@dataclass(slots=True)
class Deferred:
    """A call that waits until nothing runs, or until `end` (monotonic), when its caller gives up; `told` is
    the count that the caller heard of last."""

    ctl: Ctl
    act: Callable[[], Result]
    end: float
    told: int = -1


class Operations:
    """Answers calls for one engine. `label` names the worker in files, `directory` is where they go."""

    def __init__(
        self,
        engine: Engine,
        residence: Residence,
        outlet: Outlet,
        *,
        max_queued: int,
        open_for: Callable[[int], None],
        directory: Path,
        label: str,
    ) -> None:
        self._engine, self._residence, self._outlet = engine, residence, outlet
        self._max_queued, self._open_for = max_queued, open_for
        self._directory, self._label = directory, label
        self._deferred: list[Deferred] = []
        self._ending = False
        self._table: dict[str, Callable[[Ctl], Result | None]] = {
            "flush": self._flush,
            "pause": self._pause,
            "resume": self._resume,
            "abort": self._abort,
            "get_state": self._get_state,
            "set_state": self._set_state,
            "sleep": self._sleep,
            "wake": self._wake,
            "reload_weights": self._reload_weights,
            "profile": self._profile,
            "open_session": self._open_session,
            "close_session": self._close_session,
            "list_sessions": self._list_sessions,
            "get_weights_by_name": self._get_weights_by_name,
        }
        self._flushes = Flushes(lambda: engine.stepper.prefix, engine.rows)
        engine.sessions.on_gone = lambda session_id: engine.stepper.prefix.unpin_session(session_id)
        engine.calls = self

    @property
    def names(self) -> list[str]:
        """Every operation of this worker."""
        return sorted((*self._table, *linkcalls.OPERATIONS))

    # For the engine

    def call(self, ctl: Ctl) -> None:
        """Answer `ctl`, now or once nothing runs."""
        operation = self._table.get(ctl.op)
        if operation is None:
            self._reply(ctl, CallError("unsupported", unsupported.reason(ctl.op, self.names)))
        elif self._ending:
            self._reply(ctl, CallError("failed", "the worker is shutting down"))
        else:
            self._run(ctl, lambda: operation(ctl))

    def settle(self) -> None:
        """Do what was put off until nothing runs; else tell its callers how much still does."""
        self._flushes.settle()
        running = self._engine.admission.running
        for deferred in list(self._deferred):
            if running == 0:
                self._forget(deferred)
                self._run(deferred.ctl, deferred.act)
            elif time.monotonic() > deferred.end:
                # Done later it would be a surprise: nobody waits for it, nor hears of it.
                over = "new ones wait until `resume`" if deferred.ctl.op == "pause" else "nothing was changed"
                why = f"{running} requests still run after {deferred.ctl.deadline_s:g} s; {over}"
                self._forget(deferred)
                self._reply(deferred.ctl, CallError("failed", why))
            elif deferred.told != running:
                deferred.told = running
                news = News(deferred.ctl.call_id, f"waiting for {running} running", {"running": running})
                self._outlet.send(None, news)

    def end(self) -> None:
        """The worker shuts down: nothing that was put off will be done."""
        self._ending = True
        self._flushes.end()
        self._cancel(self._deferred, "the worker is shutting down")

    def _run(self, ctl: Ctl, act: Callable[[], Result | None]) -> None:
        try:
            result: Result | CallError | None = act()
        except CallError as error:
            result = error
        except ModelError as error:
            result = CallError("failed", str(error))
        except (msgspec.ValidationError, ValueError) as error:
            result = CallError("invalid", f"{ctl.op}: {error}")
        except Exception as error:  # whatever an operation runs into, the streams go on
            log.error("operation %s failed: %s", ctl.op, error, exc_info=error)
            result = CallError("failed", f"{ctl.op} failed: {type(error).__name__}: {error}")
        if result is not None:
            self._reply(ctl, result)

    def _reply(self, ctl: Ctl, result: Result | CallError) -> None:
        self._engine.publish()  # whoever reads the answer finds the figures to match it
        if isinstance(result, CallError):
            reply = Reply(ctl.call_id, result.code, str(result))
        else:
            reply = Reply(ctl.call_id, result=result)
        self._outlet.send(None, reply)

    def _when_quiet(self, ctl: Ctl, act: Callable[[], Result]) -> Result | None:
        """`act` now if nothing runs, else once nothing does."""
        if self._engine.admission.running == 0:
            return act()
        wait_s = max(ctl.deadline_s - _MARGIN_S, ctl.deadline_s / 2)
        self._deferred.append(Deferred(ctl, act, time.monotonic() + wait_s))
        self._engine.holds.awaiting_quiet += 1
        return None

    def _forget(self, deferred: Deferred) -> None:
        self._deferred.remove(deferred)
        self._engine.holds.awaiting_quiet -= 1

    def _cancel(self, calls: list[Deferred], why: str) -> None:
        for deferred in list(calls):
            self._forget(deferred)
            self._reply(deferred.ctl, CallError("failed", why))

    # Running, pausing

    def _flush(self, ctl: Ctl) -> None:
        def done(report: Result) -> None:
            self._engine.publish()
            if report["durable"]:
                self._outlet.send(None, Reply(ctl.call_id, result=report))
            else:
                message = f"{report['missing']} of {report['entries']} records are not on disk"
                self._outlet.send(None, Reply(ctl.call_id, "failed", message, report))

        self._flushes.begin(ctl.deadline_s, done)

    def _pause(self, ctl: Ctl) -> Result | None:
        args = callargs.parse(ctl, callargs.Pause)
        engine = self._engine
        if engine.holds.asleep:
            raise CallError("invalid", "the model sleeps: there is nothing to pause; `wake` it first")
        if args.mode == "keep":
            engine.hold(Hold.FREEZE)
            return {
                "mode": engine.mode,
                "frozen": engine.admission.running,
                "waiting": engine.admission.queued,
            }
        aborted = self._abort_running("the model was paused") if args.mode == "abort" else 0
        engine.hold(Hold.QUIET)
        return self._when_quiet(
            ctl,
            lambda: {
                "mode": engine.mode,
                "aborted": aborted,
                "waiting": engine.admission.queued,
            },
        )

    def _resume(self, ctl: Ctl) -> Result:
        callargs.parse(ctl, callargs.Nothing)
        engine = self._engine
        if engine.holds.asleep:
            raise CallError("invalid", "the model sleeps; `wake` brings it back")
        was = engine.mode
        pauses = [d for d in self._deferred if d.ctl.op == "pause"]
        engine.hold(Hold.NONE)
        self._cancel(pauses, "resumed before everything had finished")
        return {"was": was, "mode": engine.mode, "running": engine.admission.running}

    def _abort(self, ctl: Ctl) -> Result:
        args = callargs.parse(ctl, callargs.Abort)
        if not args.all and not args.requests:
            raise CallError("invalid", "abort needs `requests` (their ids) or `all`")
        wanted = set(args.requests)
        rows = self._engine.rows(lambda row: args.all or not wanted.isdisjoint(_names(row)))
        self._engine.end(rows, Finish.CANCELLED, "aborted by the operator")
        found = {name for row in rows for name in _names(row)}
        return {"aborted": [row.request_id for row in rows], "not_found": sorted(wanted - found)}

    def _abort_running(self, why: str) -> int:
        rows = self._engine.rows(lambda row: row.begun)
        self._engine.end(rows, Finish.CANCELLED, why)
        return len(rows)

    # State

    def _get_state(self, ctl: Ctl) -> Result:
        callargs.parse(ctl, callargs.Nothing)
        engine, capacity = self._engine, self._engine.admission.capacity
        return {
            "max_rows": capacity.max_rows,
            "max_queued": self._max_queued,
            "max_gap_ms": engine.prefill.chunk_size.max_gap_s * 1000,
            "settable": list(callargs.Settings.__struct_fields__),
            "mode": engine.mode,
            "paused": engine.mode in (Mode.PAUSED, Mode.PAUSING),
            "sleeping": engine.holds.asleep,
            "running": engine.admission.running,
            "waiting": engine.admission.queued,
            "tick": engine.stepper.ticks,
            "generated": engine.stepper.generated,
            "step_ms": round(engine.batch.step_s * 1000, 3),
            "threads": engine.threads.threads,
            "kv_tokens": engine.admission.reserved_tokens,
            "kv_capacity_tokens": capacity.kv_tokens,
            "kv_bytes_per_token": self._residence.cost.per_token,
            "max_model_len": capacity.longest,
            "dtype": self._residence.dtype,
            "path": str(self._residence.path),
            "weights_bytes": self._residence.weights_bytes,
            "resident_bytes": resident_bytes(),
            "device_turns": msgspec.to_builtins(engine.stepper.device.counts),
            "memory": msgspec.to_builtins(engine.memory.use()) if engine.memory else {},
            "sessions": len(engine.sessions),
            "prefix_cache": figures(engine.stepper.prefix),
            "profiling": engine.profile is not None,
        }

    def _set_state(self, ctl: Ctl) -> Result:
        settings = callargs.parse(ctl, callargs.Settings)
        engine = self._engine
        if settings.max_rows is not None:
            if settings.max_rows > 1 and self._residence.one_at_a_time:
                raise CallError("invalid", "max_rows: this model does not batch; its rows run one at a time")
            engine.admission.capacity = self._residence.capacity(settings.max_rows)
        if settings.max_queued is not None:
            self._max_queued = settings.max_queued
        if settings.max_gap_ms is not None:
            engine.prefill.chunk_size.max_gap_s = settings.max_gap_ms / 1000
        self._open_for(engine.admission.capacity.max_rows + self._max_queued)
        return {
            "max_rows": engine.admission.capacity.max_rows,
            "max_queued": self._max_queued,
            "max_gap_ms": engine.prefill.chunk_size.max_gap_s * 1000,
            "kv_capacity_tokens": engine.admission.capacity.kv_tokens,
        }

    # Memory

    def _sleep(self, ctl: Ctl) -> Result | None:
        args = callargs.parse(ctl, callargs.Sleep)
        if self._engine.holds.asleep:
            raise CallError("invalid", "the model sleeps already; `wake` brings it back")
        if args.mode == "abort":
            self._abort_running("the model was put to sleep")
        return self._when_quiet(ctl, lambda: memorycalls.sleep(self._engine, self._residence, args.level))

    def _wake(self, ctl: Ctl) -> Result:
        callargs.parse(ctl, callargs.Nothing)
        return memorycalls.wake(self._engine, self._residence)

    def _reload_weights(self, ctl: Ctl) -> Result | None:
        args = callargs.parse(ctl, callargs.Reload)
        path = Path(args.path) if args.path else self._residence.path
        memorycalls.check(self._engine, self._residence, path)
        if args.mode == "abort":
            self._abort_running("the weights were replaced")
        return self._when_quiet(ctl, lambda: memorycalls.reload(self._engine, self._residence, path))

    # A look inside

    def _profile(self, ctl: Ctl) -> Result:
        args = callargs.parse(ctl, callargs.ProfileArgs)
        profile = self._engine.profile
        if args.action == "start":
            if profile is not None:
                raise CallError("invalid", "a profile is being recorded already; stop it first")
            self._engine.set_profile(Profile(args.max_events))
            return {"recording": True, "max_events": args.max_events}
        if profile is None:
            raise CallError("invalid", "no profile is being recorded; start one first")
        self._engine.set_profile(None)
        try:
            path = str(profile.write(self._directory, self._label))
        except OSError as error:
            raise CallError("failed", f"{self._directory}: {error.strerror}") from None
        return {
            "seconds": round(time.perf_counter() - profile.started, 3),
            "events": len(profile),
            "dropped": profile.recorded - len(profile),
            "path": path,
            "laps": profile.summary(),
        }

    def _open_session(self, ctl: Ctl) -> Result:
        return msgspec.structs.asdict(self._engine.sessions.open(callargs.parse(ctl, callargs.Session).id))

    def _close_session(self, ctl: Ctl) -> Result:
        args = callargs.parse(ctl, callargs.Session)
        if not args.id:
            raise CallError("invalid", "close_session needs the `id` of the session")
        return msgspec.structs.asdict(self._engine.sessions.close(args.id))

    def _list_sessions(self, ctl: Ctl) -> Result:
        args = callargs.parse(ctl, callargs.Listing)
        sessions = self._engine.sessions
        return {
            "sessions": sessions.listed(args.limit),
            "known": len(sessions),
            "forgotten": sessions.forgotten,
        }

    def _get_weights_by_name(self, ctl: Ctl) -> Result:
        args = callargs.parse(ctl, callargs.Weight)
        if self._engine.model is None:
            raise CallError("invalid", "the model sleeps and has no weights in memory; `wake` it first")
        return describe(self._engine.model, args.name, args.count)


def _names(row: Row) -> tuple[str, str]:
    """What a row is called: its own id, and that of the request whose choice it is (`id-0`, `id-1`...)."""
    return row.request_id, row.request_id.rpartition("-")[0]

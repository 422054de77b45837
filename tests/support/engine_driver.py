"""Drives a real Engine in this thread: requests in, tokens out, no process and no sockets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from msgspec import Struct

from mlxhost.wire import data
from mlxhost.worker.admission import Capacity
from mlxhost.worker.backend import detect
from mlxhost.worker.card import model_card
from mlxhost.worker.engine import Engine
from mlxhost.worker.events import Aborted, Arrived, Event, Shutdown, Status
from mlxhost.worker.grammar.waiting import Grammars
from mlxhost.worker.kv import StepShape
from mlxhost.worker.kvcost import KVCost
from mlxhost.worker.threads import CpuThreads

FRONTEND = "frontend"


@dataclass
class Result:
    """All that came back for one handle."""

    tokens: list[int] = field(default_factory=list)
    finish: data.Finish = data.Finish.RUNNING
    detail: str = ""
    accepted: data.Accepted | None = None
    reject: data.Reject | None = None
    terminals: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)


class Driver:
    """An engine and what it said, by handle."""

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        eos_ids: Sequence[int] = (),
        *,
        grammars_of: Path | None = None,
        shape: StepShape | None = None,
        **capacity: int,
    ) -> None:
        """With `grammars_of`, a model directory, outputs can be constrained; vocabularies are kept there."""
        limits = {"max_model_len": 4096, "max_rows": 16, **capacity}
        kv_tokens = limits.pop("kv_tokens", 100_000)  # at one byte a token
        self.inbox: SimpleQueue[Event] = SimpleQueue()
        self.results: dict[int, Result] = {}
        self.status = Status()
        self.messages: list[Struct] = []
        self.grammars = Grammars(self.inbox.put, grammars_of or Path())
        if grammars_of is not None:
            self.grammars.use(model_card(grammars_of), vocab_size)
        self.engine = Engine(
            model,
            vocab_size=vocab_size,
            eos_ids=eos_ids,
            capacity=Capacity(kv_tokens, cost=KVCost(1, step=1), **limits),
            max_gap_s=0.25,
            epoch=1,
            threads=CpuThreads(detect().blas, 2),
            inbox=self.inbox,
            outlet=self,
            grammars=self.grammars,
            shape=shape,
        )

    def send(self, frontend: str | None, message: Struct) -> None:
        self.messages.append(message)
        match message:
            case data.Accepted():
                self.results[message.handle].accepted = message
            case data.Reject():
                result = self.results[message.handle]
                result.reject, result.terminals = message, result.terminals + 1
            case data.Out():
                at = 0
                for i, (handle, count) in enumerate(zip(message.handles, message.counts, strict=True)):
                    result = self.results[handle]
                    result.tokens += message.tokens[at : at + count]
                    at += count
                    for column in ("logprobs", "top_logprobs", "prompt_logprobs"):
                        if values := getattr(message, column):
                            getattr(result, column).extend(values[i])
                    if message.finish[i]:
                        result.finish = data.Finish(message.finish[i])
                        result.terminals += 1
                        result.detail = message.detail[i] if message.detail else ""
                        result.completion_tokens = message.completion_tokens[i]
                        result.cached_tokens = message.cached_tokens[i]

    def publish(self, status: Status) -> None:
        self.status = status

    def add(self, handle: int, prompt: Sequence[int], max_tokens: int | None = 16, **fields: Any) -> None:
        """Queue a request; greedy unless `sampling` says otherwise."""
        sampling = fields.pop("sampling", data.Sampling(temperature=0.0))
        limits = data.Limits(max_tokens=max_tokens, **fields.pop("limits", {}))
        add = data.Add(handle, handle, f"r{handle}", sampling=sampling, limits=limits, **fields)
        self.results[handle] = Result()
        self.inbox.put(Arrived(FRONTEND, add, list(prompt)))

    def abort(self, *handles: int) -> None:
        self.inbox.put(Aborted(FRONTEND, [(h, "test") for h in handles]))

    def tick(self, times: int = 1) -> None:
        """Take in what was queued and tick, as the engine's own loop does while it has rows."""
        for _ in range(times):
            self.engine.step()

    def run(self) -> None:
        """Until every request has ended."""
        self.inbox.put(Shutdown(60.0))
        self.engine.run()

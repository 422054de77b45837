"""One request as the engine sees it, from ADD to its terminal message."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxhost.wire.data import Add, Finish, Grammar
from mlxhost.worker.kv import RowKV
from mlxhost.worker.logprobs import TopEntries
from mlxhost.worker.sampling import RowSampling

if TYPE_CHECKING:  # loads numpy
    from mlxhost.worker.grammar.constraint import Constraint

Key = tuple[str, int]  # (frontend's endpoint, handle)


@dataclass(slots=True, eq=False)
class Row:
    """A request and how far it is. `prompt` holds its token ids (at least one)."""

    key: Key
    request_id: str
    prompt: Sequence[int]
    sampling: RowSampling
    max_tokens: int
    min_tokens: int
    stop_ids: frozenset[int]
    priority: int
    arrived: float  # monotonic seconds
    deadline: float | None  # monotonic seconds
    kv: RowKV | None = None
    prefilled: int = 0  # tokens of its context in the caches, before it joins the batch
    launched: int = 0  # steps launched for it
    produced: int = 0  # tokens sampled and read, a final stop id included
    finish: Finish = Finish.RUNNING
    cached_tokens: int = 0
    detail: str = field(default="")
    session_id: str = ""
    cache_salt: str = ""
    output: list[int] = field(default_factory=list)  # tokens read, a final stop id included
    prompt_top: int | None = None  # prompt log-probabilities: how many beside the real token
    prompt_logprobs: list[TopEntries] = field(default_factory=list)  # not sent yet
    client: str = ""  # whose it is, for fairness
    accepted: bool = False  # its frontend was told that it runs
    begun: bool = False  # it was admitted; it may wait again after that
    preemptions: int = 0  # times it left for want of memory
    yields: int = 0  # times it left to make way for another
    suspect: bool = False  # a step with it failed: it has to run alone once
    grammar: Grammar | None = None
    constraint: "Constraint | None" = None  # where its output stands in the grammar, once that is compiled
    warning: str = ""  # what of the grammar cannot be enforced
    leader: "Row | None" = None  # the choice whose prefill it shares, until that has ended

    @classmethod
    def of(
        cls,
        frontend: str,
        add: Add,
        prompt: Sequence[int],
        eos_ids: Sequence[int],
        max_tokens: int,
        now: float,
    ) -> "Row":
        limits = add.limits
        return cls(
            key=(frontend, add.handle),
            request_id=add.request_id,
            prompt=prompt,
            sampling=RowSampling.of(add.sampling),
            max_tokens=max_tokens,
            min_tokens=limits.min_tokens,
            # A grammar ends by an end-of-sequence id, which then must end the row.
            stop_ids=frozenset(limits.stop_ids)
            | frozenset(() if limits.ignore_eos and add.grammar is None else eos_ids),
            priority=add.priority,
            arrived=now,
            deadline=None if limits.deadline_s is None else now + limits.deadline_s,
            session_id=add.session_id,
            cache_salt=add.cache_salt,
            prompt_top=add.sampling.prompt_logprobs,
            client=add.client,
            grammar=add.grammar,
        )

    @property
    def context(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output."""
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(0, start - split) : max(0, end - split)]]

    @property
    def next_input(self) -> int:
        """The newest token: what the row feeds the batch when it joins."""
        return int(self.output[-1] if self.output else self.prompt[-1])

    @property
    def to_prefill(self) -> int:
        """Tokens still to be run before the row can join the batch. The newest one is not among them: it is
        the row's first input in the batch, which gives its next token."""
        return self.context - 1 - self.prefilled

    def held(self, ahead: int) -> int:
        """KV tokens the row holds once it has come `ahead` tokens further, or has ended."""
        return len(self.prompt) + min(self.launched + ahead, self.max_tokens)

    def rewind(self) -> None:
        """Its caches are gone: begin again with what it has produced. The next draws are the same, because
        they depend on seed and position only."""
        self.kv, self.prefilled, self.launched = None, 0, self.produced
        if self.prompt_top is not None:
            self.prompt_logprobs.clear()

    def take_prompt_logprobs(self) -> list[TopEntries]:
        """What of them has not been sent, which now has."""
        entries, self.prompt_logprobs = self.prompt_logprobs, []
        return entries

    def take(self, token: int) -> bool:
        """Count a sampled token, ending the row where it must; whether the token belongs to the output."""
        self.produced += 1
        self.output.append(token)
        if token in self.stop_ids and self.produced > self.min_tokens:
            self.finish = Finish.STOP
            return False
        if self.constraint is not None and self.constraint.failure:
            self.finish, self.detail = Finish.ERROR, self.constraint.failure
            return False
        if self.produced >= self.max_tokens:
            self.finish = Finish.LENGTH
        return True

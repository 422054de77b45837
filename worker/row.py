"""One request as the engine sees it, from ADD to its terminal message."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxhost.wire.data import Add, Finish
from mlxhost.worker.kv import RowKV
from mlxhost.worker.logprobs import TopEntries
from mlxhost.worker.sampling import RowSampling

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
    prefilled: int = 0  # prompt tokens in the caches
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
            stop_ids=frozenset(limits.stop_ids) | frozenset(() if limits.ignore_eos else eos_ids),
            priority=add.priority,
            arrived=now,
            deadline=None if limits.deadline_s is None else now + limits.deadline_s,
            session_id=add.session_id,
            cache_salt=add.cache_salt,
            prompt_top=add.sampling.prompt_logprobs,
        )

    @property
    def to_prefill(self) -> int:
        """Prompt tokens still to be run before the row can join the batch. The last one is not among
        them: it is the row's first input in the batch, which gives its first token."""
        return len(self.prompt) - 1 - self.prefilled

    @property
    def reserved(self) -> int:
        """KV tokens this row may come to hold."""
        return len(self.prompt) + self.max_tokens

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
        if self.produced >= self.max_tokens:
            self.finish = Finish.LENGTH
        return True

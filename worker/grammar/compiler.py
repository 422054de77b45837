"""Grammars compiled beside the engine: a bounded pool of compiler processes and a cache of what they made.

The engine thread asks and withdraws; pool threads wait for the processes and announce what is done. Each
grammar is compiled once however many rows want it, and no longer than any of them does.
"""

import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mlxhost.wire.control import ModelCard
from mlxhost.wire.data import Grammar
from mlxhost.worker.grammar.helper import Cancelled, CompilerFailed, Helper, Tokenizer
from mlxhost.worker.grammar.xgr import Compiled, GrammarError, Vocabulary, compile_grammar

log = logging.getLogger(__name__)

MAX_VALUE_BYTES = 1024 * 1024
LIMIT_S = 20.0  # for one grammar
IDLE_S = 30.0  # after which a compiler process ends and gives its memory back
CACHE_BYTES = 64 * 1024 * 1024
_CACHE_ENTRIES = 256
_PROCESSES = 2
_CLOSE_S = 2.0  # for all pool threads to end; one that is compiling here cannot be interrupted
_STACK_BYTES = 32 * 1024 * 1024  # of a pool thread: more than a compiler process has, whatever the platform

TOKENIZER_FILE = "tokenizer.json"

Key = tuple[str, str]  # kind, value


@dataclass(frozen=True)
class Outcome:
    """A grammar ready to use, with what of it cannot be enforced, or why there is none. `lasting`: it would
    be the same another time."""

    compiled: Compiled | None = None
    notes: tuple[str, ...] = ()
    error: str = ""
    lasting: bool = True

    @property
    def nbytes(self) -> int:
        text = len(self.error) + sum(map(len, self.notes))
        return text + (self.compiled.nbytes if self.compiled is not None else 0)


@dataclass(eq=False)
class _Job:
    key: Key
    wanted: int = 1  # rows that wait for it
    helper: Helper | None = None  # that is at it


@dataclass
class _Shared:
    """What the engine thread and the pool have in common; under `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    queue: deque[_Job] = field(default_factory=deque)
    jobs: dict[Key, _Job] = field(default_factory=dict)  # queued or at work
    closed: bool = False


class Compiler:
    """For one tokenizer. `on_done` is called, in a pool thread, with each key whose outcome is there."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        on_done: Callable[[Key, Outcome], None],
        *,
        limit_s: float = LIMIT_S,
        idle_s: float = IDLE_S,
        processes: int = _PROCESSES,
    ) -> None:
        self._tokenizer, self._on_done = tokenizer, on_done
        self._limit_s, self._idle_s, self._most = limit_s, idle_s, processes
        self._shared = _Shared()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._cache: OrderedDict[Key, Outcome] = OrderedDict()
        self._cached_bytes = 0

    def ask(self, key: Key) -> Outcome | None:
        """The outcome where it is known; else None, it is compiled, and `on_done` will tell."""
        shared = self._shared
        with shared.changed:
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return known
            if (job := shared.jobs.get(key)) is not None:
                job.wanted += 1
                return None
            job = shared.jobs[key] = _Job(key)
            shared.queue.append(job)
            # The first process builds the vocabulary; a second would only build it as well.
            most = self._most if self._tokenizer.cache.is_file() else 1
            if len(shared.queue) > self._idle and len(self._threads) < most:
                thread = threading.Thread(target=self._work, name="grammar", daemon=True)
                self._threads.append(thread)
                before = threading.stack_size(_STACK_BYTES)
                thread.start()
                threading.stack_size(before)
            shared.changed.notify()
        return None

    def withdraw(self, key: Key) -> None:
        """One row fewer waits for `key`; without any its compilation is stopped."""
        shared = self._shared
        with shared.changed:
            if (job := shared.jobs.get(key)) is None:
                return
            job.wanted -= 1
            if job.wanted:
                return
            del shared.jobs[key]
            if job.helper is not None:
                job.helper.cancel()
            else:
                shared.queue.remove(job)

    def close(self) -> None:
        """End all processes. Nothing is announced afterwards."""
        shared = self._shared
        with shared.changed:
            shared.closed = True
            for job in shared.jobs.values():
                if job.helper is not None:
                    job.helper.cancel()
            shared.jobs.clear()
            shared.queue.clear()
            shared.changed.notify_all()
            threads = list(self._threads)
        end = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    # Pool threads

    def _work(self) -> None:
        helper = Helper(self._tokenizer)
        try:
            while (job := self._next(helper)) is not None:
                try:
                    outcome = self._compile(helper, job.key)
                except Cancelled:
                    continue
                self._done(job, outcome)
        finally:
            helper.close()

    def _next(self, helper: Helper) -> _Job | None:
        """The next job; None when the pool closes or there was none for a while."""
        shared = self._shared
        end = time.monotonic() + self._idle_s
        with shared.changed:
            self._idle += 1
            while not shared.queue and not shared.closed and time.monotonic() < end:
                shared.changed.wait(max(0.0, end - time.monotonic()))
            self._idle -= 1
            if shared.closed or not shared.queue:
                self._threads.remove(threading.current_thread())
                return None
            job = shared.queue.popleft()
            job.helper = helper
            helper.begin()
            return job

    def _compile(self, helper: Helper, key: Key) -> Outcome:
        try:
            result = helper.compile(*key, limit_s=self._limit_s)
            compiled = compile_grammar(self._vocabulary_here(), key[0], result.value)
            return Outcome(compiled, tuple(result.notes))
        except CompilerFailed as error:
            return Outcome(error=str(error), lasting=False)
        except GrammarError as error:
            return Outcome(error=str(error))
        except Exception as error:  # whatever it is, the rows that wait must hear of it
            log.error("the grammar compiler failed: %s", error, exc_info=error)
            helper.close()
            return Outcome(error=f"the grammar compiler failed: {error}", lasting=False)

    def _vocabulary_here(self) -> Vocabulary:
        """The vocabulary in this process, from the file that the compiler process left."""
        with self._loading:
            if self._vocabulary is None:
                text = self._tokenizer.cache.read_text()
                try:
                    self._vocabulary = Vocabulary.load(text)
                except GrammarError as error:
                    raise CompilerFailed(f"{self._tokenizer.cache}: {error}") from None
            return self._vocabulary

    def _done(self, job: _Job, outcome: Outcome) -> None:
        shared = self._shared
        with shared.changed:
            if shared.closed or shared.jobs.get(job.key) is not job:
                return  # withdrawn meanwhile, and perhaps asked for again
            del shared.jobs[job.key]
            if outcome.lasting:
                self._remember(job.key, outcome)
        self._on_done(job.key, outcome)

    def _remember(self, key: Key, outcome: Outcome) -> None:
        self._cache[key] = outcome
        self._cached_bytes += _size(key, outcome)
        while self._cached_bytes > CACHE_BYTES or len(self._cache) > _CACHE_ENTRIES:
            old = self._cache.popitem(last=False)
            self._cached_bytes -= _size(*old)


def _size(key: Key, outcome: Outcome) -> int:
    """Bytes that an entry of the cache takes, roughly; a large grammar's text may well be most of it."""
    return len(key[1]) + outcome.nbytes


def key_of(grammar: Grammar) -> Key:
    """What of a grammar decides how it compiles. Raises GrammarError for one that is too large."""
    if (size := len(grammar.value.encode())) > MAX_VALUE_BYTES:
        raise GrammarError(f"it has {size} bytes; {MAX_VALUE_BYTES} are allowed")
    return grammar.kind, grammar.value


def tokenizer_of(card: ModelCard, cache_dir: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model, whose vocabulary is kept in `cache_dir` under a hash of all that it depends
    on."""
    sha256 = next(file.sha256 for file in card.files if file.name == TOKENIZER_FILE)
    stop_ids = tuple(sorted(card.eos_ids))
    name = hashlib.sha256(f"{sha256} {vocab_size} {stop_ids}".encode()).hexdigest()[:24]
    cache = cache_dir / "grammar" / f"{name}.json"
    return Tokenizer(Path(card.directory) / TOKENIZER_FILE, cache, vocab_size, stop_ids)

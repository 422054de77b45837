"""Rows that wait for their grammar. Nothing is reserved for a row before it leaves here, and it leaves once.

Engine thread only; the compiler's threads reach it by an event in the engine's queue.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlxhost.wire import data
from mlxhost.wire.control import ModelCard
from mlxhost.worker.errors import RowError
from mlxhost.worker.events import GrammarDone
from mlxhost.worker.row import Row

if TYPE_CHECKING:  # loads numpy and xgrammar, which a worker without constrained requests need not have
    from mlxhost.worker.grammar.compiler import Compiler, Key, Outcome


class Grammars:
    """Compiles for one model. `announce` puts an event into the engine's queue, from any thread."""

    def __init__(self, announce: Callable[[GrammarDone], None], cache_dir: Path) -> None:
        self._announce, self._cache_dir = announce, cache_dir
        self._card: ModelCard | None = None
        self._vocab_size = 0
        self._compiler: Compiler | None = None
        self._waiting: dict[Key, list[Row]] = {}

    def __len__(self) -> int:
        """Rows that wait."""
        return sum(map(len, self._waiting.values()))

    def use(self, card: ModelCard, vocab_size: int) -> None:
        """Compile for this model from now on, also what rows wait for."""
        if (card, vocab_size) == (self._card, self._vocab_size):
            return
        self.close()
        self._card, self._vocab_size = card, vocab_size
        for key, rows in self._waiting.items():
            for _ in rows:
                self._ask_again(key)

    def close(self) -> None:
        """End the compiler's processes; the next constrained row starts them again."""
        if self._compiler is not None:
            self._compiler.close()
            self._compiler = None

    def hold(self, row: Row) -> bool:
        """Whether `row` has to wait for its grammar. Raises RowError when it cannot be had."""
        if row.grammar is None:
            return False
        from mlxhost.worker.grammar.compiler import key_of
        from mlxhost.worker.grammar.xgr import GrammarError

        try:
            key = key_of(row.grammar)
            outcome = self._ready().ask(key)
        except GrammarError as error:
            raise RowError(data.REJECT_GRAMMAR, f"the {row.grammar.kind} cannot be used: {error}") from None
        if outcome is None:
            self._waiting.setdefault(key, []).append(row)
            return True
        self._give(row, outcome)
        return False

    def take(self, done: GrammarDone) -> list[tuple[Row, RowError | None]]:
        """The rows that an outcome frees: ready to be admitted, or with the reason for refusing them."""
        freed: list[tuple[Row, RowError | None]] = []
        for row in self._waiting.pop(done.key, []):
            try:
                self._give(row, done.outcome)
                freed.append((row, None))
            except RowError as error:
                freed.append((row, error))
        return freed

    def drop(self, row: Row) -> bool:
        """Forget a row that ended; False when it does not wait here."""
        for key, rows in self._waiting.items():
            if row in rows:
                rows.remove(row)
                if not rows:
                    del self._waiting[key]
                if self._compiler is not None:
                    self._compiler.withdraw(key)
                return True
        return False

    def rows(self) -> list[Row]:
        """Those that wait."""
        return [row for rows in self._waiting.values() for row in rows]

    def _ask_again(self, key: "Key") -> None:
        from mlxhost.worker.grammar.compiler import Outcome
        from mlxhost.worker.grammar.xgr import GrammarError

        try:
            self._ready().ask(key)
        except GrammarError as error:
            self._announce(GrammarDone(key, Outcome(error=str(error))))

    def _give(self, row: Row, outcome: "Outcome") -> None:
        from mlxhost.worker.grammar.constraint import Constraint

        grammar = row.grammar
        assert grammar is not None
        kind = grammar.kind.replace("_", " ")
        if outcome.compiled is None:
            raise RowError(data.REJECT_GRAMMAR, f"the {kind} cannot be used: {outcome.error}")
        notes = "; ".join(outcome.notes)
        if grammar.strict and notes:
            raise RowError(data.REJECT_GRAMMAR, f"the {kind} cannot be enforced whole: {notes}")
        assert self._card is not None
        row.constraint, row.warning = Constraint(outcome.compiled, self._card.eos_ids), notes

    def _ready(self) -> "Compiler":
        from mlxhost.worker.grammar.compiler import Compiler, tokenizer_of
        from mlxhost.worker.grammar.xgr import GrammarError

        if self._compiler is None:
            if self._card is None or not self._card.eos_ids:
                raise GrammarError("the model names no end-of-sequence id, by which constrained output ends")
            tokenizer = tokenizer_of(self._card, self._cache_dir, self._vocab_size)
            self._compiler = Compiler(tokenizer, lambda key, out: self._announce(GrammarDone(key, out)))
        return self._compiler

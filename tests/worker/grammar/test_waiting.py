"""Rows that wait for grammars: whatever happens, each ends once and nothing stays reserved."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_driver import FRONTEND, Driver

from mlxhost.wire import data
from mlxhost.worker.card import model_card
from mlxhost.worker.events import FrontendGone, GrammarDone, Shutdown
from mlxhost.worker.grammar import xgr
from mlxhost.worker.grammar.compiler import Compiler, Key, Outcome
from mlxhost.worker.grammar.vocabulary import read_pieces
from mlxhost.worker.models.load import LoadedModel, load_model

PROMPT = [5, 6, 7]
GRAMMARS = [data.Grammar("regex", "a"), data.Grammar("regex", "b"), None]
WARNS = data.Grammar("regex", "c", True)


@pytest.fixture(scope="module")
def loaded(tiny_models: dict[str, Path]) -> LoadedModel:
    return load_model(tiny_models["llama"], "float32", expand_quantised=True, on_progress=lambda *_: None)


@cache
def compiled_for(directory: Path, vocab_size: int) -> xgr.Compiled:
    """`a` or `b`, many times, over the model's own vocabulary."""
    pieces = read_pieces(directory / "tokenizer.json", vocab_size)
    vocabulary = xgr.Vocabulary.build(pieces, model_card(directory).eos_ids)
    return xgr.compile_grammar(vocabulary, "regex", "[ab]{0,20}")


class Manual(Compiler):
    """A compiler whose outcomes the test decides; asked and withdrawn are counted."""

    def __init__(self) -> None:
        self.wanted: dict[Key, int] = {}
        self.closed = False

    def ask(self, key: Key) -> Outcome | None:
        self.wanted[key] = self.wanted.get(key, 0) + 1
        return None

    def withdraw(self, key: Key) -> None:
        self.wanted[key] -= 1

    def close(self) -> None:
        self.closed = True


def start(loaded: LoadedModel, directory: Path) -> tuple[Driver, Manual]:
    driver = Driver(
        loaded.model, loaded.vocab_size, model_card(directory).eos_ids, grammars_of=directory, max_rows=2
    )
    manual = Manual()
    driver.grammars._compiler = manual
    return driver, manual


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2)),
        st.tuples(st.just("abort"), st.integers(1, 12)),
        st.tuples(st.just("done"), st.integers(0, 1)),
        st.tuples(st.just("failed"), st.integers(0, 1)),
        st.tuples(st.just("gone"), st.just(0)),
        st.tuples(st.just("sleep"), st.just(0)),
        st.tuples(st.just("tick"), st.integers(1, 3)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(events=EVENTS, ending=st.sampled_from(["shutdown", "drain"]))
def test_every_row_ends_once_and_nothing_stays_reserved(
    loaded: LoadedModel, tiny_models: dict[str, Path], events: list[tuple[str, int]], ending: str
) -> None:
    """Arrivals, aborts while compiling, outcomes good and bad, a frontend that goes, sleep and shutdown, in
    any order."""
    driver, _ = start(loaded, tiny_models["llama"])
    good = compiled_for(tiny_models["llama"], loaded.vocab_size)
    handle = 0
    for event, number in events:
        match event:
            case "add":
                handle += 1
                driver.add(handle, PROMPT, 4, grammar=GRAMMARS[number])
            case "abort":
                driver.abort(number)
            case "done" | "failed":
                grammar = GRAMMARS[number]
                assert grammar is not None
                outcome = Outcome(good) if event == "done" else Outcome(error="no")
                driver.inbox.put(GrammarDone((grammar.kind, grammar.value), outcome))
            case "gone":
                driver.inbox.put(FrontendGone(FRONTEND))
            case "sleep":
                driver.tick()
                if driver.engine.admission.running == 0:
                    driver.engine.let_go()
            case "tick":
                driver.tick(number)
    if ending == "drain":
        for grammar in GRAMMARS:
            if grammar is not None:
                driver.inbox.put(GrammarDone((grammar.kind, grammar.value), Outcome(good)))
    driver.inbox.put(Shutdown(5.0 if ending == "drain" else 0.0))
    driver.engine.run()
    assert {h: r.terminals for h, r in driver.results.items()} == dict.fromkeys(driver.results, 1)
    assert all(r.finish is not data.Finish.ERROR for r in driver.results.values())
    admission = driver.engine.admission
    assert (admission.running, admission.queued, len(driver.grammars)) == (0, 0, 0)
    assert admission.reserved == 0


@pytest.fixture
def pair(loaded: LoadedModel, tiny_models: dict[str, Path]) -> tuple[Driver, Manual]:
    return start(loaded, tiny_models["llama"])


def test_an_abort_while_compiling_ends_the_row_at_once(pair: tuple[Driver, Manual]) -> None:
    """It is not ACCEPTED before, and its compilation is withdrawn."""
    driver, manual = pair
    driver.add(1, PROMPT, 4, grammar=GRAMMARS[0])
    driver.tick()
    assert driver.results[1].accepted is None
    assert driver.status.busy is False, "a row that compiles must not look like a hung engine"
    assert driver.status.load().waiting == 1
    driver.abort(1)
    driver.tick()
    assert driver.results[1].finish is data.Finish.ABORT
    assert manual.wanted[("regex", "a")] == 0


def test_a_deadline_holds_while_compiling(pair: tuple[Driver, Manual]) -> None:
    """The row ends by it, though nothing computes."""
    driver, _ = pair
    driver.add(1, PROMPT, 4, grammar=GRAMMARS[0], limits={"deadline_s": 0.0})
    driver.tick(2)
    assert (driver.results[1].finish, driver.results[1].detail) == (data.Finish.ABORT, "the deadline passed")


def test_a_strict_grammar_with_notes_is_refused(
    pair: tuple[Driver, Manual], tiny_models: dict[str, Path]
) -> None:
    """What is not strict goes on with a warning."""
    driver, _ = pair
    driver.add(1, PROMPT, 4, grammar=WARNS)
    driver.add(2, PROMPT, 4, grammar=data.Grammar("regex", "c"))
    driver.tick()
    good = compiled_for(tiny_models["llama"], driver.engine.batch._vocab_size)
    driver.inbox.put(GrammarDone(("regex", "c"), Outcome(good, ("a note",))))
    driver.tick()
    reject, accepted = driver.results[1].reject, driver.results[2].accepted
    assert reject is not None
    assert reject.message == "the regex cannot be enforced whole: a note"
    assert accepted is not None
    assert accepted.warning == "a note"


def test_a_reload_with_another_tokenizer_asks_again(
    pair: tuple[Driver, Manual], tiny_models: dict[str, Path]
) -> None:
    """Rows that wait are not forgotten with the compiler they waited for."""
    driver, manual = pair
    driver.add(1, PROMPT, 4, grammar=GRAMMARS[0])
    driver.tick()
    card = model_card(tiny_models["llama"])
    card.eos_ids.clear()
    driver.grammars.use(card, 999)
    assert manual.closed
    driver.tick()
    reject = driver.results[1].reject
    assert reject is not None
    assert "end-of-sequence" in reject.message

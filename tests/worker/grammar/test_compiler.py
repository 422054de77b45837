"""The pool of compiler processes: bounded, cached, abortable, and unharmed by what it is given."""

import json
import queue
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxhost.wire.data import Grammar
from mlxhost.worker.card import model_card
from mlxhost.worker.grammar import compiler as pool_module
from mlxhost.worker.grammar.compiler import MAX_VALUE_BYTES, Compiler, Key, Outcome, key_of, tokenizer_of
from mlxhost.worker.grammar.helper import Cancelled, Helper, Tokenizer
from mlxhost.worker.grammar.xgr import GrammarError

Done = queue.SimpleQueue[tuple[Key, Outcome]]

# Five of these take more than the time limit or the memory allowed, and the others fail at once.
HOSTILE: dict[str, Key] = {
    "enum of 50,000": ("json_schema", json.dumps({"enum": [f"v{i}" for i in range(50_000)]})),
    "300 nested arrays": ("json_schema", '{"type":"array","items":' * 300 + "{}" + "}" * 300),
    "3,000 nested arrays": ("json_schema", '{"type":"array","items":' * 3000 + "{}" + "}" * 3000),
    "20,000 brackets": ("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "20,000 groups": ("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "a billion repeats": ("regex", "(((a{1000}){1000}){1000})"),
    "nested quantifiers": ("regex", "((a+)+)+b" * 500),
    "left recursion": ("ebnf", "root ::= root"),
    "a reference to itself": ("json_schema", '{"$ref": "#"}'),
    "many properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}),
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    card = model_card(tiny_models["llama"])
    return tokenizer_of(card, tmp_path_factory.mktemp("vocabularies"), card.vocab_size)


@pytest.fixture(scope="module")
def pool(tokenizer: Tokenizer) -> Iterator[tuple[Compiler, Done]]:
    done: Done = queue.SimpleQueue()
    made = Compiler(tokenizer, lambda key, outcome: done.put((key, outcome)), limit_s=3.0)
    yield made, done
    made.close()


def outcome_of(pool: tuple[Compiler, Done], key: Key) -> Outcome:
    compiler, done = pool
    if (known := compiler.ask(key)) is not None:
        return known
    answered, outcome = done.get(timeout=60)
    assert answered == key
    return outcome


def helpers() -> list[psutil.Process]:
    """Compiler processes of this process."""
    found = []
    for child in psutil.Process().children():
        try:
            if "mlxhost.worker.grammar" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


def test_a_grammar_is_compiled_once(pool: tuple[Compiler, Done]) -> None:
    """The second time its outcome is there at once, also when it is a failure."""
    key = ("regex", "[xyz]+")
    assert outcome_of(pool, key).compiled is not None
    assert pool[0].ask(key) is not None
    bad = ("regex", "[")
    assert outcome_of(pool, bad).error
    assert pool[0].ask(bad) is not None


def test_rows_that_want_the_same_share_the_work(pool: tuple[Compiler, Done]) -> None:
    """Three ask, one outcome is announced."""
    compiler, done = pool
    key = ("regex", "[pqr]+")
    asked = [compiler.ask(key) for _ in range(3)]
    assert asked[0] is None
    assert done.get(timeout=60)[0] == key
    with pytest.raises(queue.Empty):
        done.get(timeout=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_within_the_limit(pool: tuple[Compiler, Done], name: str) -> None:
    """By compiling, by failing or by the limit; and a good one compiles afterwards."""
    started = time.monotonic()
    outcome = outcome_of(pool, HOSTILE[name])
    assert time.monotonic() - started < 20, "3 s of limit, and time to start a process"
    assert (outcome.compiled is None) == bool(outcome.error)
    assert outcome_of(pool, ("regex", f"after {len(name)}")).compiled is not None


def test_nobody_waiting_stops_the_work(tokenizer: Tokenizer) -> None:
    """The last row that withdraws ends the compilation in its middle, and the pool goes on."""
    done: Done = queue.SimpleQueue()
    compiler = Compiler(tokenizer, lambda key, outcome: done.put((key, outcome)), limit_s=60, processes=1)
    slow = ("json_schema", json.dumps({"enum": [f"w{i}" for i in range(40_000)]}))
    try:
        assert outcome_of((compiler, done), ("regex", "a")).compiled is not None
        assert compiler.ask(slow) is None
        assert compiler.ask(slow) is None
        time.sleep(0.2)
        compiler.withdraw(slow)
        compiler.withdraw(slow)
        assert compiler.ask(("regex", "b")) is None
        key, outcome = done.get(timeout=30)
        assert (key, outcome.error) == (("regex", "b"), "")
    finally:
        compiler.close()


def test_processes_end_when_idle_and_with_the_pool(tokenizer: Tokenizer) -> None:
    """They are started again when wanted, and none outlives the pool."""
    before = {p.pid for p in helpers()}
    done: Done = queue.SimpleQueue()
    compiler = Compiler(tokenizer, lambda key, outcome: done.put((key, outcome)), idle_s=0.2)
    outcome_of((compiler, done), ("regex", "a"))
    end = time.monotonic() + 20
    while {p.pid for p in helpers()} - before and time.monotonic() < end:
        time.sleep(0.02)
    assert {p.pid for p in helpers()} - before == set()
    assert outcome_of((compiler, done), ("regex", "c")).compiled is not None
    compiler.close()
    assert {p.pid for p in helpers()} - before == set()


def test_a_vocabulary_is_built_once(tokenizer: Tokenizer) -> None:
    """The file is there after the first grammar; one that is broken is replaced."""
    done: Done = queue.SimpleQueue()
    for text in (None, "{broken"):
        if text is not None:
            tokenizer.cache.write_text(text)
        compiler = Compiler(tokenizer, lambda key, outcome: done.put((key, outcome)))
        assert outcome_of((compiler, done), ("regex", "a")).error == ""
        compiler.close()
    assert tokenizer.cache.stat().st_size > 1000


def test_a_tokenizer_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """No tokenizer, no grammar: the reason names the file."""
    broken = Tokenizer(tmp_path / "tokenizer.json", tmp_path / "x.json", 10, (1,))
    done: Done = queue.SimpleQueue()
    compiler = Compiler(broken, lambda key, outcome: done.put((key, outcome)))
    assert "tokenizer.json: No such file" in outcome_of((compiler, done), ("regex", "a")).error
    compiler.close()


def test_what_had_no_verdict_is_tried_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A grammar is not held to be wrong for ever because the compiler could not start once."""
    later = Tokenizer(tmp_path / "tokenizer.json", tmp_path / "x.json", tokenizer.vocab_size, (1,))
    done: Done = queue.SimpleQueue()
    compiler = Compiler(later, lambda key, outcome: done.put((key, outcome)))
    try:
        assert outcome_of((compiler, done), ("regex", "a")).error
        shutil.copy(tokenizer.path, later.path)
        assert outcome_of((compiler, done), ("regex", "a")).error == ""
    finally:
        compiler.close()


@pytest.mark.slow
def test_a_cancel_hits_the_job_that_it_is_for(tokenizer: Tokenizer) -> None:
    """One that comes when its job is over does not fail the next; one that comes early is not forgotten."""
    helper = Helper(tokenizer)
    try:
        for start in (False, True):
            helper.begin()
            if start:
                helper.compile("regex", "a", 30)
                helper.begin()
            helper.cancel()
            with pytest.raises(Cancelled):
                helper.compile("regex", "b", 30)
        for _ in range(2):
            helper.begin()
            helper.compile("regex", "c", 30)
            helper.cancel()
    finally:
        helper.close()


def test_the_cache_counts_the_text_of_grammars(
    pool: tuple[Compiler, Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong ones, too, make room for others; and what is told of one is short."""
    monkeypatch.setattr(pool_module, "CACHE_BYTES", 100_000)
    large: Key = ("regex", "[" + "a" * 80_000)
    assert len(outcome_of(pool, large).error) < 1000
    assert pool[0].ask(large) is not None
    assert outcome_of(pool, ("regex", "(" + "b" * 80_000)).error
    assert outcome_of(pool, ("regex", "c")).error == ""
    assert pool[0].ask(large) is None
    assert pool[1].get(timeout=60)[0] == large


def test_notes_are_few(pool: tuple[Compiler, Done]) -> None:
    """A thousand keywords that cannot be enforced are not all listed."""
    schema = {"type": "array", "prefixItems": [{"type": "string", "not": {}}] * 1000}
    notes = outcome_of(pool, ("json_schema", json.dumps(schema))).notes
    assert (len(notes), notes[-1]) == (21, "and 980 more")


def test_a_large_grammar_is_refused_before_it_is_sent() -> None:
    """Its size is compared first."""
    with pytest.raises(GrammarError, match="1048577 bytes"):
        key_of(Grammar("regex", "a" * (MAX_VALUE_BYTES + 1)))

"""A row's place in its grammar: forward, back and out of it."""

import time
from pathlib import Path

import numpy as np
import pytest
from support.engine_driver import Driver
from support.grammars import STOP, compiled

from mlxhost.wire import data
from mlxhost.worker.card import model_card
from mlxhost.worker.grammar import constraint as constraint_module
from mlxhost.worker.grammar.constraint import Constraint
from mlxhost.worker.grammar.xgr import Matcher, new_masks
from mlxhost.worker.models.load import load_model


def following(constraint: Constraint) -> set[int]:
    filled = new_masks(1, 258)
    constraint.fill(filled, 0)
    return set(np.flatnonzero(np.unpackbits(filled[0].view(np.uint8), bitorder="little")[:258]).tolist())


def test_it_is_where_the_output_leads() -> None:
    """One token on at a time, several at once, or back after a step that was thrown away."""
    constraint = Constraint(compiled("regex", "abc(d|e)f"), [STOP])
    constraint.follow([], ord("a"))
    assert following(constraint) == {ord("b")}
    constraint.follow([ord("a")], None)
    assert following(constraint) == {ord("b")}
    constraint.follow(list(b"ab"), ord("c"))
    assert following(constraint) == set(b"de")
    constraint.follow(list(b"abc"), ord("d"))
    constraint.follow(list(b"abc"))
    assert following(constraint) == set(b"de")
    constraint.follow(list(b"abc"), ord("e"))
    constraint.follow(list(b"abce"), ord("f"))
    assert following(constraint) == {STOP}
    constraint.follow(list(b"abcef"), STOP)
    assert not constraint.open
    assert len(following(constraint)) == 258, "what is drawn behind the end is not used"
    assert constraint.failure == ""


def test_a_token_outside_the_grammar_is_a_failure() -> None:
    """Which closes it: nothing is forced, and the row must end."""
    constraint = Constraint(compiled("regex", "ab"), [STOP])
    constraint.follow([ord("x")])
    assert "token 120 does not fit the grammar at position 0" in constraint.failure
    assert (constraint.open, constraint.forced()) == (False, [])


def test_masks_along_a_guess_leave_it_where_it_was() -> None:
    """One mask before each guessed token and one behind the last."""
    constraint = Constraint(compiled("regex", "abc"), [STOP])
    filled = new_masks(4, 258)
    constraint.fill_along(list(b"abc"), filled, 0)
    bits = np.unpackbits(filled.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [[97], [98], [99], [STOP]]
    assert constraint.forced() == list(b"abc")


@pytest.mark.parametrize(("agreed", "pays"), [(0, False), (9, False), (10, True), (24, True)])
def test_guessing_stops_where_it_does_not_pay(agreed: int, pays: bool) -> None:
    """After 24 guessed tokens four in ten have to be right."""
    constraint = Constraint(compiled("regex", "abc"), [STOP])
    constraint.learn(23, 0)
    assert constraint.jumps_pay
    constraint.learn(1, agreed)
    assert constraint.jumps_pay is pays


def test_a_step_is_as_long_as_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ambiguity is found wherever a token is followed; a process that stood still meanwhile is no reason."""
    slow = Constraint(compiled("regex", "[ab]*"), [STOP])
    accept = Matcher.accept

    def late(matcher: Matcher, token: int) -> bool:
        time.sleep(0.05)
        return accept(matcher, token)

    monkeypatch.setattr(Matcher, "accept", late)
    monkeypatch.setattr(constraint_module, "MAX_STEP_S", 0.04)
    slow.follow(list(b"a"))
    assert slow.failure == ""
    monkeypatch.setattr(constraint_module, "MAX_STEP_S", -1.0)
    slow.follow(list(b"ab"))
    assert "too ambiguous" in slow.failure


def test_a_grammar_that_is_too_slow_ends_its_row_only(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an error that says so; the free row beside it is served whole."""
    directory = tiny_models["llama"]
    loaded = load_model(directory, "float32", expand_quantised=True, on_progress=lambda *_: None)
    driver = Driver(loaded.model, loaded.vocab_size, model_card(directory).eos_ids, grammars_of=directory)
    monkeypatch.setattr(constraint_module, "MAX_STEP_S", -1.0)
    driver.add(1, [5, 6], 20, grammar=data.Grammar("regex", "[ab]*"))
    driver.add(2, [5, 6], 20, limits={"ignore_eos": True})
    driver.run()
    assert driver.results[1].finish is data.Finish.ERROR
    assert "too ambiguous" in driver.results[1].detail
    assert len(driver.results[2].tokens) == 20

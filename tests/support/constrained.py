"""Outputs of a real engine under many schemas, judged by an independent validator."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema.validators
from referencing.exceptions import Unresolvable
from support.engine_driver import Driver
from tokenizers import Tokenizer

from mlxhost.wire.data import Finish, Grammar, Sampling
from mlxhost.worker.card import model_card
from mlxhost.worker.models.load import LoadedModel

PROMPT = list(range(40, 72))
_AT_ONCE = 64


@dataclass(frozen=True)
class Verdict:
    """What became of one schema. kind: valid, refused (with the reason), cut (max_tokens), unjudged (the
    validator cannot follow the schema), noted (invalid, but for a keyword that had been named), invalid."""

    kind: str
    reason: str = ""
    text: str = ""
    notes: str = ""


def judge_all(
    loaded: LoadedModel, directory: Path, schemas: Mapping[str, Any], *, max_tokens: int, deadline_s: float
) -> dict[str, Verdict]:
    """One seeded output for every schema."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    driver = Driver(
        loaded.model, loaded.vocab_size, model_card(directory).eos_ids, grammars_of=directory, kv_tokens=10**6
    )
    # A small model rarely closes what it opened.
    closers = [tokenizer.token_to_id(c) for c in ('"', "}", "]", '"}', '"]', '",')]
    sampling = Sampling(temperature=1.0, seed=7, logit_bias={i: 4.0 for i in closers if i is not None})
    names = list(schemas)
    end = time.monotonic() + deadline_s
    sent = 0
    try:
        while any(not r.terminals for r in driver.results.values()) or sent < len(names):
            open_rows = sum(not r.terminals for r in driver.results.values())
            while sent < len(names) and open_rows < _AT_ONCE:
                grammar = Grammar("json_schema", json.dumps(schemas[names[sent]]))
                driver.add(sent, PROMPT, max_tokens, grammar=grammar, sampling=sampling)
                sent, open_rows = sent + 1, open_rows + 1
            driver.tick()
            if driver.status.running == 0:
                time.sleep(0.005)  # all of them compile
            if time.monotonic() > end:
                raise TimeoutError(f"{open_rows} of {sent} outputs are not done after {deadline_s} s")
    finally:
        driver.grammars.close()
    verdicts = {}
    for i, name in enumerate(names):
        result = driver.results[i]
        notes = result.accepted.warning if result.accepted is not None else ""
        if result.reject is not None:
            verdicts[name] = Verdict("refused", result.reject.message)
        elif result.finish is Finish.LENGTH:
            verdicts[name] = Verdict("cut", notes=notes)
        elif result.finish is not Finish.STOP:
            verdicts[name] = Verdict("invalid", f"ended by {result.finish.name}: {result.detail}")
        else:
            verdicts[name] = judge(schemas[name], tokenizer.decode(result.tokens), notes)
    return verdicts


def judge(schema: Any, text: str, notes: str) -> Verdict:
    """Whether `text` is JSON that satisfies `schema`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return Verdict("invalid", f"not JSON: {error}", text, notes)
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        error = next(validator(schema).iter_errors(value), None)
    except (Unresolvable, RecursionError) as problem:
        return Verdict("unjudged", f"{type(problem).__name__}: {problem}"[:200], text, notes)
    except Exception as problem:  # the schema itself is broken in ways the validator does not expect
        return Verdict("unjudged", f"{type(problem).__name__}: {problem}"[:200], text, notes)
    if error is None:
        return Verdict("valid", text=text, notes=notes)
    where = "/".join(map(str, error.absolute_schema_path))
    return Verdict("noted" if notes else "invalid", f"{where}: {error.message}"[:200], text, notes)

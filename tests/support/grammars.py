"""Small vocabularies and compiled grammars for tests."""

import json
from functools import cache

from mlxhost.worker.grammar import xgr

STOP = 256


@cache
def byte_vocabulary() -> xgr.Vocabulary:
    """One token for each byte, a stop id, and one token that stands for nothing."""
    return xgr.Vocabulary.build([*(bytes([i]) for i in range(256)), b"", b""], [STOP])


def compiled(kind: str, value: str = "") -> xgr.Compiled:
    """A grammar over bytes, the schema prepared as the compiler process does it."""
    from mlxhost.worker.grammar.schema import prepare

    if kind == "json_schema":
        value = prepare(value)[0]
    return xgr.compile_grammar(byte_vocabulary(), kind, value)


def accepts(grammar: xgr.Compiled, text: str) -> bool:
    """Whether `text` is a whole output of the grammar."""
    matcher = xgr.Matcher(grammar, [STOP])
    return all(matcher.accept(byte) for byte in text.encode("utf-8", "surrogatepass")) and matcher.complete


def schema_accepts(schema: object, value: object) -> bool:
    """Whether JSON `value` may be written under `schema`."""
    return accepts(compiled("json_schema", json.dumps(schema)), json.dumps(value, ensure_ascii=False))

"""The seam to xgrammar: what mlxhost relies on, so that a new release that changes it fails here."""

import json
import subprocess
import sys

import numpy as np
import pytest
from support.grammars import STOP, accepts, byte_vocabulary, compiled

from mlxhost.worker.grammar import xgr


def allowed(matcher: xgr.Matcher) -> set[int]:
    """Ids in the mask of the next token."""
    masks = xgr.new_masks(2, 258)
    masks[0] = 7
    matcher.fill(masks, 1)
    assert masks[0].tolist() == [7] * 9, "only the row asked for is written"
    bits = np.unpackbits(masks[1].view(np.uint8), bitorder="little")[:258]
    return set(np.flatnonzero(bits).tolist())


def test_only_the_native_part_is_loaded() -> None:
    """Neither torch nor transformers nor pydantic comes along."""
    script = (
        "import sys\nfrom mlxhost.worker.grammar import xgr\n"
        "v = xgr.Vocabulary.build([b'a', b''], [1])\nxgr.compile_grammar(v, 'regex', 'a+')\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'tokenizers', 'mlx'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_vocabulary_survives_its_file() -> None:
    """What is loaded masks as what was dumped; a foreign file is a GrammarError."""
    loaded = xgr.Vocabulary.load(byte_vocabulary().dump())
    assert loaded.size == 258
    matcher = xgr.Matcher(xgr.compile_grammar(loaded, "choice", '["ab", "b"]'), [STOP])
    assert allowed(matcher) == set(b"ab")
    with pytest.raises(xgr.GrammarError):
        xgr.Vocabulary.load("{}")


def test_a_matcher_goes_on_ends_and_goes_back() -> None:
    """A token that does not fit changes nothing; at the end only stop ids fit; rewinding undoes tokens."""
    matcher = xgr.Matcher(compiled("regex", "ab?"), [STOP])
    assert not matcher.accept(ord("b"))
    assert matcher.accept(ord("a"))
    assert matcher.complete
    assert allowed(matcher) == {ord("b"), STOP}
    assert matcher.accept(ord("b"))
    assert allowed(matcher) == {STOP}
    assert matcher.accept(STOP)
    assert matcher.ended
    matcher.rewind(2)
    assert not matcher.ended
    assert allowed(matcher) == {ord("b"), STOP}


def test_forced_tokens_are_named() -> None:
    """Where only one text can follow, its tokens are given, and nothing is given where two can."""
    matcher = xgr.Matcher(compiled("ebnf", 'root ::= "abc" ("d" | "e")'), [STOP])
    assert matcher.forced() == list(b"abc")
    for byte in b"abc":
        assert matcher.accept(byte)
    assert matcher.forced() == []


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        ("json_object", "", ["{}", '{"a": [1, {"b": null}]}', '{"a"\n  :  1}'], ["[]", "1", '{"a":}', "{}x"]),
        ("json_schema", '{"type": "integer"}', ["1", "-20"], ["1.5", '"1"']),
        ("regex", r"\d{3}-[a-c]+", ["123-abc"], ["12-a", "123-d"]),
        ("ebnf", 'root ::= "x" root | "y"', ["y", "xxy"], ["x", ""]),
        (
            "choice",
            json.dumps(['a"b\\', "x\ny\x00", "é東🙂", ""]),
            ['a"b\\', "x\ny\x00", "é東🙂", ""],
            ["a", "x"],
        ),
        (
            "structural_tag",
            json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "a|b"}}),
            ["a", "b"],
            ["c"],
        ),
    ],
)
def test_every_kind_compiles_to_its_language(kind: str, value: str, good: list[str], bad: list[str]) -> None:
    """What it names is accepted and nothing beside it."""
    grammar = compiled(kind, value)
    assert [t for t in good if not accepts(grammar, t)] == []
    assert [t for t in bad if accepts(grammar, t)] == []


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("regex", "[a-", "Unclosed"),
        ("ebnf", "root ::= nothing", "not defined"),
        ("json_schema", '{"type": "whole"}', "whole"),
        ("choice", "[]", "at least one"),
        ("choice", "[1]", "at least one string"),
        ("choice", "x", "not a JSON array"),
        ("structural_tag", "{}", "tag"),
        ("xml", "", "unknown kind"),
    ],
)
def test_a_bad_grammar_says_what_is_wrong(kind: str, value: str, reason: str) -> None:
    """The reason is in words, without time stamps and source lines."""
    with pytest.raises(xgr.GrammarError) as caught:
        compiled(kind, value)
    assert reason in str(caught.value)
    assert ".cc:" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whitespace_is_bounded() -> None:
    """A model cannot write blanks for ever between two tokens of JSON."""
    grammar = compiled("json_object")
    assert accepts(grammar, "{" + " " * xgr.MAX_WHITESPACE + "}")
    assert not accepts(grammar, "{" + " " * (xgr.MAX_WHITESPACE + 1) + "}")


def test_a_token_without_bytes_is_never_allowed() -> None:
    """Special tokens and padding cannot slip into free text."""
    assert 257 not in allowed(xgr.Matcher(compiled("regex", ".*"), [STOP]))

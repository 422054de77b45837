"""xgrammar behind one seam, without torch: its native classes only, loaded when first used.

`import xgrammar` would bring torch, transformers and pydantic along (5.7 GB on disk, 500 MB in memory) for
Python wrappers that are not needed. So an empty package of that name is put in place, as for mlx-lm, and the
generated classes of the native library are imported from it. A contract test holds the signatures used here.
"""

import importlib
import importlib.util
import json
import os
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxhost.worker.errors import WorkerError

# Spaces, tabs and line breaks in a row between two JSON tokens: enough to indent seven levels by two, and a
# bound for models that would write them for ever.
MAX_WHITESPACE = 16

_RAW = 0  # xgrammar's VocabType: tokens are given as the bytes that they stand for
_WHERE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ", re.MULTILINE)  # time and source line before every message

Mask = npt.NDArray[np.int32]


class GrammarError(WorkerError):
    """A grammar cannot be used; the message is for whoever wrote it."""


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits in the mask of one row."""
    return (vocab_size + 31) // 32


def new_masks(rows: int, vocab_size: int) -> Mask:
    """One mask a row, nothing allowed."""
    return np.zeros((rows, mask_words(vocab_size)), dtype=np.int32)


def plain(message: str) -> str:
    """xgrammar's message without time stamps and source lines, in one line."""
    text = _WHERE.sub("", message.strip())
    text = re.sub(r"Check failed: \(.*?\) is false: ", "", text)
    return re.sub(r"\s+", " ", text).strip()


class Vocabulary:
    """The bytes of every token id, as xgrammar indexes them."""

    def __init__(self, info: Any) -> None:
        self.info = info

    @classmethod
    def build(cls, pieces: list[bytes], stop_ids: list[int]) -> "Vocabulary":
        """`pieces[i]` are the bytes of token i; one without any can never be drawn under a grammar."""
        return cls(_core().TokenizerInfo(pieces, _RAW, len(pieces), stop_ids, False))

    @classmethod
    def load(cls, text: str) -> "Vocabulary":
        """What `dump` gave. Raises GrammarError when it came from another version."""
        try:
            return cls(_core().TokenizerInfo.deserialize_json(text))
        except RuntimeError as error:
            raise GrammarError(plain(str(error))) from None

    def dump(self) -> str:
        return str(self.info.serialize_json())

    @property
    def size(self) -> int:
        return int(self.info.vocab_size())


class Compiled:
    """A grammar with its token masks, for one vocabulary. Shared by all rows that use it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @property
    def nbytes(self) -> int:
        return int(self.handle.memory_size_bytes())


def compile_grammar(vocabulary: Vocabulary, kind: str, value: str) -> Compiled:
    """Compile a wire Grammar. Raises GrammarError with the compiler's reason.

    It cannot be interrupted, and a hostile grammar takes any time and memory: in a process that must live,
    only for what has compiled in another one.
    """
    compiler = _core().GrammarCompiler(vocabulary.info, 1, False, -1, False)
    try:
        match kind:
            case "json_object":
                return Compiled(_json_schema(compiler, '{"type": "object"}', strict=False))
            case "json_schema":
                return Compiled(_json_schema(compiler, value, strict=True))
            case "regex":
                return Compiled(compiler.compile_regex(value))
            case "ebnf":
                return Compiled(compiler.compile_grammar_from_strings(value, "root"))
            case "choice":
                return Compiled(compiler.compile_grammar_from_strings(choice_ebnf(value), "root"))
            case "structural_tag":
                return Compiled(compiler.compile_structural_tag(value))
    except RuntimeError as error:
        raise GrammarError(plain(str(error))) from None
    raise GrammarError(f"unknown kind of grammar {kind!r}")


def choice_ebnf(value: str) -> str:
    """Grammar of exactly the strings in the JSON array `value`. Raises GrammarError when it is none."""
    try:
        choices = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the choices are not a JSON array: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise GrammarError("the choices must be a JSON array of at least one string")
    return "root ::= " + " | ".join(f'"{"".join(map(_literal, choice))}"' for choice in choices)


class Matcher:
    """Where one output stands in its grammar. Ends by one of the stop ids."""

    def __init__(self, compiled: Compiled, stop_ids: list[int]) -> None:
        self._handle = _core().GrammarMatcher(compiled.handle, stop_ids, False, -1, None)

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and nothing changed, when the grammar does not allow it."""
        return bool(self._handle.accept_token(token, False))

    def fill(self, masks: Mask, row: int) -> None:
        """Write the mask of the next token, one bit an id, least significant first, into `masks[row]`."""
        self._handle.fill_next_token_bitmask(masks, row, False)

    def forced(self) -> list[int]:
        """Ids of the longest tokens that spell the only text that can follow; empty when several can."""
        return [int(i) for i in self._handle.find_jump_forward_tokens()]

    def rewind(self, tokens: int) -> None:
        """Take back the last `tokens` accepted."""
        self._handle.rollback(tokens)

    @property
    def ended(self) -> bool:
        """A stop id was accepted; nothing can follow."""
        return bool(self._handle.is_terminated())

    @property
    def complete(self) -> bool:
        """What was accepted is a whole output, though it may go on."""
        return bool(self._handle.is_completed())


def _json_schema(compiler: Any, schema: str, *, strict: bool) -> Any:
    """`strict`: objects have no properties but those that their schema names, unless it allows more."""
    any_whitespace, any_order, indent, separators = True, False, None, None
    return compiler.compile_json_schema(
        schema, any_whitespace, indent, separators, strict, MAX_WHITESPACE, any_order
    )


def _literal(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"


_loaded: Any = None


def _core() -> Any:
    """The module with the native classes. Raises GrammarError when xgrammar is not installed."""
    global _loaded
    if _loaded is None:
        _loaded = _load()
    return _loaded


def _load() -> Any:
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise GrammarError("xgrammar is not installed; pip install xgrammar")
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
    had_torch = sys.modules.get("torch")
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi imports it where it is installed
    try:
        importlib.import_module("tvm_ffi")
    finally:
        del sys.modules["torch"]
        if had_torch is not None:
            sys.modules["torch"] = had_torch
    if "xgrammar" not in sys.modules:
        package = ModuleType("xgrammar")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["xgrammar"] = package
    importlib.import_module("xgrammar.load_binding")
    importlib.import_module("xgrammar.exception")
    return importlib.import_module("xgrammar.tvm_ffi_binding._ffi_api")

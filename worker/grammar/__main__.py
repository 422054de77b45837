"""`python -I -m mlxhost.worker.grammar TOKENIZER.json CACHE VOCAB_SIZE STOP_IDS`: the compiler process.

A grammar comes from a stranger, and compiling it takes whatever time, stack and memory it is made to take. So
it is compiled here first, where it can be killed; what compiles within the limits is compiled again in the
worker, because serialising a compiled grammar takes ten times as long as making it.

The vocabulary is read from the file CACHE, which is written first if it is not there. Then requests on stdin
are answered by replies on stdout (`messages`), until stdin ends.
"""

import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import msgspec

from mlxhost.wire.sockets import process_dies_with_parent
from mlxhost.worker.grammar import xgr
from mlxhost.worker.grammar.messages import Failed, Job, Reply, Result, Up, read_frame, write_frame
from mlxhost.worker.grammar.schema import prepare
from mlxhost.worker.grammar.vocabulary import read_pieces

MEMORY_BYTES = 512 * 1024 * 1024  # beyond what the vocabulary takes
_RECURSION = 2000  # levels of nesting that fit on the stack
# What is told of a grammar, whose own text may be in it.
_MAX_NOTES = 20
_MAX_CHARS = 500


def main() -> int:
    tokenizer, cache, vocab_size, stop_ids = sys.argv[1:]
    process_dies_with_parent()
    os.environ["XGRAMMAR_MAX_RECURSION_DEPTH"] = str(_RECURSION)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        stops = [int(i) for i in stop_ids.split(",") if i]
        vocabulary = _vocabulary(Path(tokenizer), Path(cache), int(vocab_size), stops)
    except (xgr.GrammarError, OSError) as error:
        write_frame(replies, msgspec.msgpack.encode(Failed(str(error))))
        return 1
    write_frame(replies, msgspec.msgpack.encode(Up()))
    _limit_memory()
    with tempfile.TemporaryFile(buffering=0) as said:
        os.dup2(said.fileno(), 2)  # the compiler's warnings: what it leaves out
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            write_frame(replies, msgspec.msgpack.encode(_compile(vocabulary, frame, said)))
    return 0


def _vocabulary(tokenizer: Path, cache: Path, vocab_size: int, stop_ids: list[int]) -> xgr.Vocabulary:
    """From the cache, else built and written there. A file of another version of xgrammar is replaced."""
    if cache.is_file():
        try:
            return xgr.Vocabulary.load(cache.read_text())
        except (xgr.GrammarError, UnicodeDecodeError):
            pass
    vocabulary = xgr.Vocabulary.build(read_pieces(tokenizer, vocab_size), stop_ids)
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=cache.parent, prefix=cache.name, delete=False) as file:
        file.write(vocabulary.dump())
    os.replace(file.name, cache)
    return vocabulary


def _compile(vocabulary: xgr.Vocabulary, frame: bytes, said: BinaryIO) -> Reply:
    job = msgspec.msgpack.decode(frame, type=Job)
    said.truncate(0)
    said.seek(0)
    try:
        value = job.value
        notes: list[str] = []
        if job.kind == "json_schema":
            value, notes = prepare(value)
        compiled = xgr.compile_grammar(vocabulary, job.kind, value)
        matcher = xgr.Matcher(compiled, job.stop_ids)
        masks = xgr.new_masks(1, vocabulary.size)
        matcher.fill(masks, 0)
        if not masks.any():
            return Failed("no output can satisfy it")
        said.seek(0)
        notes += [
            xgr.plain(line).removeprefix("Warning: ") for line in said.read().decode().splitlines() if line
        ]
        return Result(value, _told(notes))
    except xgr.GrammarError as error:
        return Failed(_cut(str(error)))
    except MemoryError:
        return Failed("compiling it takes too much memory")
    except RecursionError:
        return Failed("it is nested too deeply")


def _told(notes: list[str]) -> list[str]:
    """Each note once; so many that whoever reads them can."""
    told = list(dict.fromkeys(map(_cut, notes)))
    more = len(told) - _MAX_NOTES
    return told if more <= 0 else [*told[:_MAX_NOTES], f"and {more} more"]


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


def _limit_memory() -> None:
    """A grammar that grows without bound fails here instead of taking the machine along. Linux only: macOS
    does not enforce it, and there the time limit ends it."""
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


if __name__ == "__main__":
    sys.exit(main())

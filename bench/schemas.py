"""Do constrained outputs satisfy their schemas? Two public collections, judged independently.

PYTHONPATH=tests python bench/schemas.py generate MODEL_DIR [--count N] [--max-tokens N] [--json FILE]
PYTHONPATH=tests python bench/schemas.py suite MODEL_DIR DIRECTORY

`generate`: for each schema of SchemaStore one seeded output of a real engine, judged by the `jsonschema`
package. Prints how many were valid, and every other one with its reason.

`suite`: the JSON Schema Test Suite, as the sources of `jsonschema` carry it (pip download --no-deps
--no-binary :all: jsonschema==4.26.0, unpacked in DIRECTORY). Its instances are fed to the grammars. Prints
how many invalid ones are let through, and how many valid ones can be written.

Exit status 1 when something invalid got through although nothing of its schema had been named as not
enforced.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

from support.constrained import judge_all
from support.schemas import corpus
from tokenizers import Tokenizer

from mlxhost.worker.backend import cores, detect
from mlxhost.worker.card import model_card
from mlxhost.worker.grammar.compiler import Compiler, Outcome, tokenizer_of
from mlxhost.worker.grammar.xgr import Matcher
from mlxhost.worker.models.load import load_model


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("generate")
    command.add_argument("model", type=Path)
    command.add_argument("--count", type=int, default=0, help="the first N schemas only (0: all)")
    command.add_argument("--max-tokens", type=int, default=1000)
    command.add_argument("--max-bytes", type=int, default=16_384, help="leave out schemas larger than this")
    command.add_argument("--deadline", type=float, default=3600.0, help="seconds for all of it")
    command.add_argument("--json", type=Path, help="write every verdict there")
    command = commands.add_parser("suite")
    command.add_argument("model", type=Path)
    command.add_argument("directory", type=Path)
    args = parser.parse_args()
    return generate(args) if args.command == "generate" else suite(args.model, args.directory)


def generate(args: argparse.Namespace) -> int:
    """One output a schema."""
    backend = detect()
    if backend.blas is not None:
        backend.blas.set_threads(cores())
    loaded = load_model(args.model, backend.dtype, expand_quantised=True, on_progress=lambda *_: None)
    schemas = corpus(args.max_bytes)
    if args.count:
        schemas = dict(list(schemas.items())[: args.count])
    verdicts = judge_all(loaded, args.model, schemas, max_tokens=args.max_tokens, deadline_s=args.deadline)
    counts = Counter(v.kind for v in verdicts.values())
    sys.stdout.write(f"{len(verdicts)} schemas: {', '.join(f'{n} {k}' for k, n in counts.most_common())}\n")
    for name, verdict in verdicts.items():
        if verdict.kind not in ("valid", "cut"):
            sys.stdout.write(f"{verdict.kind}\t{name}\t{verdict.reason}\t{verdict.notes[:200]}\n")
    if args.json:
        args.json.write_text(json.dumps({k: asdict(v) for k, v in verdicts.items()}, indent=1))
    return 1 if counts["invalid"] else 0


def suite(model: Path, directory: Path) -> int:
    """Every instance of the suite."""
    card = model_card(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    files = sorted(directory.glob("**/tests/draft2020-12/*.json"))
    groups = [group for file in files for group in json.loads(file.read_text())]
    counts: Counter[str] = Counter()
    through = []
    with tempfile.TemporaryDirectory() as scratch:
        done: SimpleQueue[Outcome] = SimpleQueue()
        compiler = Compiler(
            tokenizer_of(card, Path(scratch), card.vocab_size), lambda key, outcome: done.put(outcome)
        )
        for group in groups:
            outcome = compiler.ask(("json_schema", json.dumps(group["schema"]))) or done.get(timeout=90)
            counts["refused" if outcome.error else "named" if outcome.notes else "whole"] += 1
            if outcome.compiled is None or outcome.notes:
                continue
            for test in group["tests"]:
                matcher = Matcher(outcome.compiled, card.eos_ids)
                ids = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False)).ids
                accepted = all(map(matcher.accept, ids)) and matcher.complete
                counts[f"{'valid' if test['valid'] else 'invalid'} {'taken' if accepted else 'not'}"] += 1
                if accepted and not test["valid"]:
                    through.append((group["description"], test["description"]))
        compiler.close()
    invalid = counts["invalid taken"] + counts["invalid not"]
    valid = counts["valid taken"] + counts["valid not"]
    sys.stdout.write(
        f"{len(groups)} schemas: {counts['whole']} enforced whole, {counts['named']} with a part named as "
        f"not enforced, {counts['refused']} refused\n"
        f"under those enforced whole: {counts['invalid taken']} of {invalid} invalid instances let through, "
        f"{counts['valid taken']} of {valid} valid ones can be written\n"
    )
    sys.stdout.writelines(f"let through: {group}: {test}\n" for group, test in through)
    return 1 if through else 0


if __name__ == "__main__":
    sys.exit(main())

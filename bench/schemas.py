"""Do constrained outputs satisfy their schemas? The public schemas of SchemaStore, an independent validator.

PYTHONPATH=tests python bench/schemas.py MODEL_DIR [--count N] [--max-tokens N] [--json FILE]

For each schema one seeded output is generated in a real engine and judged by the `jsonschema` package.
Prints how many were valid, and every other one with its reason. Exit status 1 when an output is invalid
although nothing of its schema had been named as not enforced.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from support.constrained import judge_all
from support.schemas import corpus

from mlxhost.worker.backend import cores, detect
from mlxhost.worker.models.load import load_model


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=0, help="the first N schemas only (0: all)")
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--max-bytes", type=int, default=16_384, help="leave out schemas larger than this")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds for all of it")
    parser.add_argument("--json", type=Path, help="write every verdict there")
    args = parser.parse_args()
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


if __name__ == "__main__":
    sys.exit(main())

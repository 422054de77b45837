"""`mlxhost fit`: does a model fit this machine, before it is loaded."""

import argparse
import json
from typing import Any

DESCRIPTION = """\
Say how much memory a model will take, and whether it fits the budget. Reads its config and headers only;
needs no running fleet, and loads nothing.

  mlxhost fit ./my-model
  mlxhost fit ./my-model --context 32768 --budget 16GiB
  mlxhost fit demo --json

MODEL is what `mlxhost up --models` takes. Exit code 0: it fits; 4: it does not.
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    from mlxhost.supervisor.modelspec import DTYPES

    parser = commands.add_parser(
        "fit",
        help="say whether a model fits, before it is loaded",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a directory, a GGUF file, owner/name, or demo")
    parser.add_argument(
        "--context", type=_tokens, default=0, metavar="TOKENS", help="tokens to serve (default: 8,192)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="compute dtype (default: %(default)s)"
    )
    parser.add_argument(
        "--budget",
        type=_memory,
        default=0.0,
        metavar="BYTES|SHARE",
        help="memory for all models (default: as for `mlxhost up`)",
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the answer. Raises UserError for a model that is not there or cannot be read."""
    from mlxhost.supervisor.console import out, printable_lines
    from mlxhost.supervisor.errors import EXIT_FAILED, EXIT_OK
    from mlxhost.supervisor.estimate.estimate import sizer
    from mlxhost.supervisor.estimate.fit import fit, sentence
    from mlxhost.supervisor.residency.budget import budget_bytes, ram_bytes, working_set

    name, path = _find(args.model)
    budget = budget_bytes(args.budget, working_set([], ram_bytes()))
    found = fit(sizer(path, args.dtype), args.context, budget).as_json()
    if args.json:
        out(json.dumps({"model": name} | found, indent=2))
    else:
        out(printable_lines("\n".join([sentence(name, found), *_table(found)])))
    return EXIT_OK if found["fits"] else EXIT_FAILED


def _find(text: str) -> tuple[str, Any]:
    """Name and path of what the user named. Raises UserError."""
    from mlxhost.supervisor import modelspec, resolve
    from mlxhost.supervisor.embedded import EMBEDDED
    from mlxhost.supervisor.errors import ModelError
    from mlxhost.supervisor.home import cache_dir

    if embedded := EMBEDDED.get(text):
        path = cache_dir() / embedded.filename
        if not path.is_file():
            raise ModelError(f"{text} is not on this machine yet; fetch it with `mlxhost pull {text}`")
        return text, path
    model = resolve.locate([modelspec.parse_one(text)])[0]
    return model.name, model.path


def _table(found: dict[str, Any]) -> list[str]:
    from mlxhost.supervisor.console import size

    rows = [
        (f"weights in {found['dtype']}", size(found["weights_bytes"])),
        (f"KV cache, {size(found['kv_bytes_per_token'])} a token", size(found["kv_bytes"])),
        ("transient of prefill", size(found["transient_bytes"])),
        ("the process itself", size(found["process_bytes"])),
    ]
    width = max(len(label) for label, _ in rows)
    return [f"  {label:<{width}}  {value:>8}" for label, value in rows] + [
        f"  note: {note}" for note in found["notes"]
    ]


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _memory(text: str) -> float:
    from mlxhost.supervisor.config.kinds import Memory

    try:
        return Memory().of_text(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None

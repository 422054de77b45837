"""`mlxhost ctl status` as text. Pure: takes the status that `--json` prints."""

from collections.abc import Sequence
from typing import Any

from mlxhost.supervisor.console import duration, size, width

HEADER = (
    "MODEL",
    "REPLICA",
    "STATE",
    "PID",
    "UPTIME",
    "RESTARTS",
    "IN FLIGHT",
    "QUEUED",
    "KV USED",
    "TOK/S",
    "MEMORY",
    "THREADS",
)
_LEFT_COLUMNS = 3  # words to the left, figures to the right


def status_text(status: dict[str, Any]) -> str:
    accepting = "" if status["accepting"] else ", stopping"
    lines = [f"fleet {status['fleet']} on {status['url']}, up {duration(status['uptime_s'])}{accepting}"]
    lines += [*_residency(status.get("residency")), ""]
    replicas = [(model["name"], r) for model in status["models"] for r in model["replicas"]]
    cells = [HEADER, *(_replica(name, r) for name, r in replicas), *map(_frontend, status["frontends"])]
    lines += table(cells)
    for member in [*(r for _, r in replicas), *status["frontends"]]:
        if member["reason"]:
            lines.append(f"{member['slot']} {member['state']}: {member['reason']}")
    return "\n".join(lines)


def _residency(where: dict[str, Any] | None) -> list[str]:
    """The budget, and who waits for room."""
    if not where:
        return []
    models, most = where["models"], where["max_resident"]
    lines = [
        f"{where['resident']} of {len(models)} models resident{f' (at most {most})' if most else ''}, "
        f"{size(where['charged_bytes'])} of a budget of {size(where['budget_bytes'])}"
    ]
    for name, model in models.items():
        if model["wanted_s"] is not None and model["phase"] != "loading":
            lines.append(f"{name} wanted for {duration(model['wanted_s'])}: {model['waiting']}")
    return lines


def _replica(name: str, replica: dict[str, Any]) -> tuple[str, ...]:
    done, total = replica["progress"]
    percent = f" {100 * done // total} %" if total else ""
    index = replica["slot"].rpartition("/")[2]
    used, capacity = replica["kv_tokens"], replica["kv_capacity"]
    return (
        name,
        f"{replica['host']}:{index}" if replica["host"] else index,
        (replica["phase"] or replica["state"]) + percent,
        *_process(replica),
        str(replica["in_flight"]),
        str(replica["queued"]),
        f"{used:,}/{capacity:,}" if capacity else "-",
        f"{replica['tokens_per_s']:.1f}",
        size(replica["memory_bytes"]) if replica["memory_bytes"] else "-",
        str(replica["cpu_threads"] or "-"),
    )


def _frontend(frontend: dict[str, Any]) -> tuple[str, ...]:
    memory = size(frontend["memory_bytes"]) if frontend["memory_bytes"] else "-"
    index = frontend["slot"].rpartition("/")[2]
    rest = (str(frontend["in_flight"]), "-", "-", "-", memory, "-")
    return ("(frontend)", index, frontend["state"], *_process(frontend), *rest)


def _process(member: dict[str, Any]) -> tuple[str, str, str]:
    alive = member["pid"] is not None
    return (
        str(member["pid"]) if alive else "-",
        duration(member["uptime_s"]) if alive else "-",
        str(member["restarts"]),
    )


def table(cells: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as aligned lines."""
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(_pad(c, w, i) for i, (c, w) in enumerate(zip(row, widths, strict=True))) for row in cells
    ]


def _pad(cell: str, columns: int, index: int) -> str:
    space = " " * (columns - width(cell))
    return cell + space if index < _LEFT_COLUMNS else space + cell

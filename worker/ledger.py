"""Every ADD that has no terminal message yet. The single place that makes it exactly one."""

from collections.abc import Sequence

from mlxhost.wire import data
from mlxhost.worker.errors import RowError


class Ledger:
    """Open rows by frontend. Owned by the I/O thread."""

    def __init__(self) -> None:
        self._open: dict[str, dict[int, str]] = {}  # frontend -> handle -> request id

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._open.values())

    def open(self, frontend: str, add: data.Add, limit: int) -> None:
        """Note a new request's rows. Raises RowError when it is a duplicate or there would be more than
        `limit` rows open."""
        rows = self._open.setdefault(frontend, {})
        handles = {add.handle, *add.siblings}
        if len(handles) <= len(add.siblings):
            raise RowError(data.REJECT_BAD_MESSAGE, f"the handles of {add.request_id!r} are not distinct")
        if not handles.isdisjoint(rows) or (add.request_id and add.request_id in rows.values()):
            raise RowError(data.REJECT_DUPLICATE, f"request {add.request_id!r} is running already")
        if len(self) + len(handles) > limit:
            raise RowError(
                data.REJECT_QUEUE_FULL, f"{len(self)} requests run or wait here already", retry_after_s=1.0
            )
        rows.update(dict.fromkeys(handles, add.request_id))

    def close(self, frontend: str, handle: int) -> bool:
        """Note a terminal message; False when the row has had one, and this one must not be sent."""
        return self._open.get(frontend, {}).pop(handle, None) is not None

    def close_frontend(self, frontend: str) -> None:
        """Nobody is left to tell."""
        self._open.pop(frontend, None)

    def has_rows(self, frontend: str) -> bool:
        return bool(self._open.get(frontend))

    def open_rows(self) -> list[tuple[str, Sequence[int]]]:
        """(frontend, handles) of every open row."""
        return [(frontend, list(rows)) for frontend, rows in self._open.items() if rows]

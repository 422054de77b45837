"""What a mistyped name may have meant."""

import difflib
from collections.abc import Iterable


def nearby(wanted: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """A sentence naming what exists that looks like `wanted`, or an empty string."""
    close = difflib.get_close_matches(wanted, list(known), n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(close)}?" if close else ""

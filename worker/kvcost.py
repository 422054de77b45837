"""What one row's caches take in memory, by kind of layer.

A full-attention layer grows with the row, a sliding-window layer up to its window and one step more, a state
layer (SSM, convolution) is of one size from the start, and a layer that shares another's cache takes nothing.
"""

from dataclasses import dataclass

from mlxhost.worker.kv import RowKV
from mlxhost.worker.kv.kinds import Kind, kind_of

ALLOCATION_STEP = 256  # tokens by which mlx-lm's caches grow (KVCache.step)


@dataclass(frozen=True)
class KVCost:
    """`per_token` bytes in layers that grow without end; `windows` holds (tokens, bytes a token) of layers
    that keep a window; `per_row` bytes in layers of fixed size.

    Growing layers are allocated `step` tokens at a time, counted from wherever the chunk before ended, so up
    to step - 1 tokens more than the row has.
    """

    per_token: int
    per_row: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    step: int = ALLOCATION_STEP

    def bytes(self, tokens: int) -> int:
        """Bytes of a row that holds `tokens`."""
        allocated = tokens + self.step - 1
        windowed = sum(min(allocated, window + self.step) * each for window, each in self.windows)
        return self.per_row + windowed + allocated * self.per_token

    @property
    def fixed(self) -> int:
        """Bytes that a long row takes whatever its length."""
        return self.per_row + sum((window + self.step) * each for window, each in self.windows)

    def tokens(self, available: int) -> int | None:
        """The most tokens a row can hold in `available` bytes; None: no bound."""
        if not self.per_token and self.fixed <= available:
            return None
        low, high = 0, 1
        while self.bytes(high) <= available:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes(middle) <= available else (low, middle)
        return low


def measure(row: RowKV) -> KVCost:
    """The cost of rows like `row`, which holds at least one token."""
    per_token = per_row = 0
    windows: dict[int, int] = {}
    for leaf in row.leaves:
        kind = kind_of(leaf)
        if kind is Kind.STATE:
            per_row += sum(entry.nbytes for entry in leaf.cache if entry is not None)
        elif leaf.keys is not None:  # else the layer uses another one's
            token = (leaf.keys.nbytes + leaf.values.nbytes) // leaf.keys.shape[2]
            if kind is Kind.FULL:
                per_token += token
            else:
                window = int(leaf.max_size if kind is Kind.WINDOW else leaf.chunk_size)
                windows[window] = windows.get(window, 0) + token
    return KVCost(per_token, per_row, tuple(sorted(windows.items())))

"""Messages gone wrong: the golden fixtures, mutated in every way that a broken or hostile peer might send."""

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

Frames = list[bytes]

GOLDEN = Path(__file__).parents[1] / "wire" / "golden"
DEEP = 20_000
# Claims of 4 GiB of array, map, string or bytes, with nothing behind them.
CLAIMS = [bytes([tag, 255, 255, 255, 255]) for tag in (0xDD, 0xDF, 0xDB, 0xC6, 0xC9)]
ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 1 << 31, 1 << 32, (1 << 64) - 1, -(1 << 63), 0.5, float("nan"), float("inf"), "",
    "x" * 1000, "\udcff".encode("utf-8", "surrogatepass"), b"", [], [[]], {}, {"a": 1}, [1] * 1000,
]  # fmt: skip


def golden() -> list[Frames]:
    """Every message of the newest version."""
    newest = max(GOLDEN.glob("*.json"))
    return [[bytes.fromhex(f) for f in frames] for frames in json.loads(newest.read_text()).values()]


class Fuzzer:
    """An endless supply of messages, the same for the same seed. `made` counts them by kind of mutation."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._golden = golden()
        self._kinds: list[Callable[[Frames], Frames]] = [
            self.intact,
            self.flipped_bits,
            self.truncated,
            self.extended,
            self.odd_value,
            self.odd_value,
            self.longer_or_shorter_array,
            self.foreign_header,
            self.bad_tag,
            self.deep_nesting,
            self.pickled,
            self.huge_claim,
            self.noise,
            self.other_frame_count,
        ]
        self.made: dict[str, int] = {}

    def next(self) -> Frames:
        """One message."""
        kind = self._rng.choice(self._kinds)
        self.made[kind.__name__] = self.made.get(kind.__name__, 0) + 1
        return kind(list(self._rng.choice(self._golden)))

    def intact(self, frames: Frames) -> Frames:
        return frames

    def flipped_bits(self, frames: Frames) -> Frames:
        at = self._rng.randrange(len(frames))
        frame = bytearray(frames[at])
        for _ in range(self._rng.randint(1, 4)):
            frame[self._rng.randrange(len(frame))] ^= 1 << self._rng.randrange(8)
        frames[at] = bytes(frame)
        return frames

    def truncated(self, frames: Frames) -> Frames:
        at = self._rng.randrange(len(frames))
        frames[at] = frames[at][: self._rng.randrange(len(frames[at]))]
        return frames

    def extended(self, frames: Frames) -> Frames:
        at = self._rng.randrange(len(frames))
        frames[at] += self._rng.randbytes(self._rng.randint(1, 64))
        return frames

    def odd_value(self, frames: Frames) -> Frames:
        """One value somewhere in the body becomes another, of any type."""
        frames[1] = msgspec.msgpack.encode(self._replaced(msgspec.msgpack.decode(frames[1])))
        return frames

    def _replaced(self, value: Any) -> Any:
        odd = self._rng.choice(ODD_VALUES)
        if isinstance(value, list) and value:
            at = self._rng.randrange(len(value))
            value[at] = self._replaced(value[at]) if self._rng.random() < 0.5 else odd
            return value
        if isinstance(value, dict) and value:
            key = self._rng.choice(list(value))
            value[key] = self._replaced(value[key]) if self._rng.random() < 0.5 else odd
            return value
        return odd

    def longer_or_shorter_array(self, frames: Frames) -> Frames:
        body = msgspec.msgpack.decode(frames[1])
        if isinstance(body, list):
            cut = self._rng.randint(0, len(body))
            more = self._rng.choices(ODD_VALUES, k=self._rng.randint(0, 3))
            frames[1] = msgspec.msgpack.encode(body[:cut] if self._rng.random() < 0.5 else body + more)
        return frames

    def foreign_header(self, frames: Frames) -> Frames:
        return [self._rng.choice(self._golden)[0], *frames[1:]]

    def bad_tag(self, frames: Frames) -> Frames:
        tag = self._rng.choice(["", "ad", "addd", "OUT", "\0", "pickle", "a" * 300])
        return [msgspec.msgpack.encode([tag, self._rng.getrandbits(32), "r"]), *frames[1:]]

    def deep_nesting(self, frames: Frames) -> Frames:
        opening = self._rng.choice([b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"])
        frames[self._rng.randrange(2)] = opening * self._rng.randint(50, DEEP)
        return frames

    def pickled(self, frames: Frames) -> Frames:
        frames[self._rng.randrange(2)] = pickle.dumps({"cmd": ["id"]}, protocol=self._rng.randint(0, 5))
        return frames

    def huge_claim(self, frames: Frames) -> Frames:
        at = self._rng.randrange(2)
        frames[at] = frames[at][: self._rng.randrange(3)] + self._rng.choice(CLAIMS) + frames[at][3:]
        return frames

    def noise(self, frames: Frames) -> Frames:
        return [self._rng.randbytes(self._rng.randint(0, 100)) for _ in range(self._rng.randint(1, 4))]

    def other_frame_count(self, frames: Frames) -> Frames:
        if self._rng.random() < 0.5:
            return frames[: self._rng.randint(1, len(frames))]
        return frames + [self._rng.randbytes(self._rng.randint(0, 9))] * self._rng.randint(1, 5)

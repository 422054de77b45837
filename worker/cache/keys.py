"""What names a piece of KV: a chain of SHA-256 over token blocks, rooted in all that the KV depends on.

Equal keys mean equal KV, whichever process computed it and whenever. Pure but for reading model files.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

BLOCK_TOKENS = 256
TOKEN_BYTES = 4
FORMAT = "mlxhost-kv-1"  # changes when records of the same key would be read differently

_CARD = ("config.json", "tokenizer.json")
_SAMPLES = 64  # places of a weights file whose bytes are hashed
_SAMPLE_BYTES = 4096


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, the form in which they are hashed, compared and stored."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def root_key(
    fingerprint: str, scheme: str, *, salt: str = "", adapters: Sequence[str] = (), media: Sequence[str] = ()
) -> bytes:
    """The key of the empty prefix. Requests share KV only when all of this is equal; `salt` is how a client
    keeps its own apart from everyone else's."""
    digest = hashlib.sha256()
    for part in (FORMAT, fingerprint, scheme, salt, f"{len(adapters)}", *adapters, *media):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def child_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of `parent` followed by `tokens` (see token_bytes)."""
    return hashlib.sha256(parent + tokens).digest()


def model_fingerprint(directory: Path, dtype: str) -> str:
    """What tells the weights and tokenizer in `directory` from any others, computed in `dtype`.

    Hashing gigabytes would double a load's time, so a weights file counts with its size, time of change,
    header and samples of its data. A copy with other times is foreign: a miss, never a wrong hit.
    """
    digest = hashlib.sha256(f"{FORMAT} {version('mlx-lm')} {dtype}".encode())
    for name in _CARD:
        if (path := directory / name).is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    for path in sorted(directory.glob("*.safetensors")):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header, stat.st_size)))
            for i in range(_SAMPLES):
                file.seek(stat.st_size * i // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()

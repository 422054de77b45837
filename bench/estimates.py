"""Estimates of models' memory beside what a real worker takes, as the kernel counts it.

python bench/estimates.py [MODEL_DIR ...] [--context 2048]

Without directories: a wide random model of every tiny family. Each worker loads the model and fills the
context with one request; `taken` is the peak of its resident set less what a process without a model takes.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from mlxhost.supervisor.estimate.estimate import estimate
from mlxhost.worker.models.architecture import install_seam


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args()
    install_seam()
    from support.measured import measure
    from support.tiny_models import build
    from support.wide_models import WIDE, build_wide

    with TemporaryDirectory(prefix="mlxhost-") as directory:
        tiny = build("llama", Path(directory) / "tiny")
        floor = measure(tiny, estimate(tiny, context=256)).floor
        sys.stdout.write(f"a worker without a model: {floor / 1e6:.0f} MB\n")
        sys.stdout.write(f"{'model':20}{'weights':>9}{'ready':>9}{'KV':>8}{'transient':>11}")
        sys.stdout.write(f"{'estimate':>10}{'taken':>8}{'off by':>8}   MB\n")
        paths = args.models or [build_wide(family, Path(directory) / family) for family in WIDE]
        for path in paths:
            expected = estimate(path, context=args.context)
            found = measure(path, expected)
            whole, taken = expected.total_bytes - expected.process_bytes, found.peak - floor
            parts = [expected.weights_bytes, found.ready.weights_bytes, expected.kv_bytes]
            cells = [f"{part / 1e6:.1f}" for part in (*parts, expected.transient_bytes, whole, taken)]
            widths = (9, 9, 8, 11, 10, 8)
            row = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            sys.stdout.write(f"{path.name[:20]:20}{row}{100 * (whole / taken - 1):+7.1f}%\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

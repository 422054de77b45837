"""Estimates beside what real workers take."""

import sys
from pathlib import Path

import pytest
from support.measured import measure
from support.tiny_models import build
from support.wide_models import CONTEXT, WIDE, build_wide

from mlxhost.supervisor.estimate.estimate import estimate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc"),
]


@pytest.fixture(scope="module")
def floor(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What a worker's process takes without weights and context."""
    path = build("llama", tmp_path_factory.mktemp("tiny"))
    return measure(path, estimate(path, context=256)).floor


@pytest.mark.parametrize("family", WIDE)
def test_an_estimate_is_within_15_percent_of_the_worker(family: str, floor: int, tmp_path: Path) -> None:
    """Weights and bytes a token are exact; with the context filled the whole is within 15%."""
    path = build_wide(family, tmp_path)
    expected = estimate(path, context=CONTEXT)
    found = measure(path, expected)
    assert expected.weights_bytes == pytest.approx(found.ready.weights_bytes, rel=0.001)
    assert expected.kv_bytes_per_token == found.ready.kv_bytes_per_token
    assert expected.total_bytes - expected.process_bytes == pytest.approx(found.peak - floor, rel=0.15)

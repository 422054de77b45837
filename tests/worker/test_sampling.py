"""Sampling: filters against a float64 reference, draws against the distribution they claim."""

import math

import mlx.core as mx
import pytest

from mlxhost.worker.sampling import RowSampling, Sampler, gumbel

VOCAB = 64


def logits(seed: int = 0) -> list[float]:
    return mx.random.normal((VOCAB,), key=mx.random.key(seed)).tolist()


def reference(x: list[float], row: RowSampling) -> list[float]:
    """Probabilities after temperature, min_p, top_k and top_p, in float64 and by sorting."""
    scaled = [v / row.temperature for v in x]
    top = max(scaled)
    p = [math.exp(v - top) for v in scaled]
    keep = set(range(len(p)))
    if row.min_p > 0:
        keep &= {i for i in keep if p[i] >= row.min_p}
    if row.top_k > 0:
        keep = set(sorted(keep, key=lambda i: -p[i])[: row.top_k])
    if row.top_p < 1:
        total, mass, nucleus = sum(p[i] for i in keep), 0.0, set()
        for i in sorted(keep, key=lambda i: -p[i]):
            if mass >= row.top_p * total:
                break
            nucleus.add(i)
            mass += p[i]
        keep = nucleus
    total = sum(p[i] for i in keep)
    return [p[i] / total if i in keep else 0.0 for i in range(len(p))]


CASES = [
    RowSampling(1.0, 1.0, 0, 0.0, 1),
    RowSampling(0.5, 1.0, 0, 0.0, 2),
    RowSampling(1.7, 1.0, 5, 0.0, 3),
    RowSampling(1.0, 0.7, 0, 0.0, 4),
    RowSampling(1.0, 1.0, 0, 0.2, 5),
    RowSampling(1.2, 0.8, 12, 0.05, 6),
    RowSampling(1.0, 0.01, 0, 0.0, 7),
    RowSampling(1.0, 1.0, 1, 0.0, 8),
]


@pytest.mark.parametrize("row", CASES)
def test_draws_follow_the_filtered_distribution(row: RowSampling) -> None:
    """8,000 draws: nothing outside the kept set, and a chi-square below its 1e-6 quantile inside."""
    n = 8000
    x = logits()
    expected = reference(x, row)
    sampler = Sampler([row] * n, VOCAB)
    drawn = sampler.draw(mx.array([x] * n), list(range(n))).tolist()
    counts = [drawn.count(i) for i in range(VOCAB)]
    assert all(counts[i] == 0 for i in range(VOCAB) if expected[i] == 0)
    cells = [(counts[i], n * expected[i]) for i in range(VOCAB) if n * expected[i] >= 5]
    chi2 = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = max(len(cells) - 1, 1)
    # Wilson-Hilferty approximation of the chi-square quantile at 1 - 1e-6 (z = 4.75).
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi2 < max(limit, 30)


def test_greedy_rows_take_the_largest_logit_beside_sampled_rows() -> None:
    """Temperature 0 is argmax whatever the other rows do."""
    x = mx.array([logits(i) for i in range(4)])
    rows = [RowSampling(0.0, 0.5, 3, 0.1, 1), CASES[2], RowSampling(0.0, 1.0, 0, 0.0, 1), CASES[5]]
    drawn = Sampler(rows, VOCAB).draw(x, [0, 1, 2, 3]).tolist()
    best = mx.argmax(x, axis=-1).tolist()
    assert drawn[0] == best[0]
    assert drawn[2] == best[2]


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """The same row draws the same token in any place of any batch."""
    x = logits(3)
    row, other = RowSampling(1.0, 0.9, 0, 0.0, 99), RowSampling(1.4, 1.0, 7, 0.0, 5)
    alone = Sampler([row], VOCAB).draw(mx.array([x]), [17]).tolist()[0]
    batch = Sampler([other, row, other], VOCAB).draw(mx.array([logits(1), x, logits(2)]), [3, 17, 4]).tolist()
    assert batch[1] == alone


def test_positions_and_seeds_give_different_noise() -> None:
    """Neighbouring seeds and positions are uncorrelated."""
    rows = [RowSampling(1.0, 1.0, 0, 0.0, seed) for seed in range(50)]
    flat = mx.zeros((50, VOCAB))
    sampler = Sampler(rows, VOCAB)
    drawn = [tuple(sampler.draw(flat, [p] * 50).tolist()) for p in range(20)]
    assert len(set(drawn)) == 20
    assert len(set(zip(*drawn, strict=True))) == 50


def test_noise_has_the_moments_of_a_gumbel_variable() -> None:
    """Mean 0.5772 and variance pi^2 / 6 over a million values."""
    keys = mx.array([[i * 2654435761 % 2**32, i * 40503 + 7] for i in range(20)], dtype=mx.uint32)
    noise = gumbel(keys, mx.arange(50_000, dtype=mx.uint32)[None])
    assert mx.mean(noise).item() == pytest.approx(0.57722, abs=0.01)
    assert mx.var(noise).item() == pytest.approx(math.pi**2 / 6, abs=0.02)

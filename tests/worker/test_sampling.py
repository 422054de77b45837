"""Sampling: filters against a float64 reference, draws against the distribution they claim."""

import math

import mlx.core as mx
import pytest

from mlxhost.worker import narrow, sampling
from mlxhost.worker.penalties import History, Penalty
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
    drawn = sampler.draw(mx.array([x] * n), list(range(n))).tokens.tolist()
    counts = [drawn.count(i) for i in range(VOCAB)]
    assert all(counts[i] == 0 for i in range(VOCAB) if expected[i] == 0)
    cells = [(counts[i], n * expected[i]) for i in range(VOCAB) if n * expected[i] >= 5]
    chi2 = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = max(len(cells) - 1, 1)
    # Wilson-Hilferty approximation of the chi-square quantile at 1 - 1e-6 (z = 4.75).
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi2 < max(limit, 30)


@pytest.mark.parametrize("width", [8, 32, 1024])
def test_a_short_list_gives_the_same_draws_or_says_that_it_lacks_something(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with filters, beside a greedy one, drawn in a list of the likeliest tokens: where `lacking` is
    false the token is the whole vocabulary's; it is true wherever more is kept than the list holds."""
    monkeypatch.setattr(narrow, "WIDTH", width)
    monkeypatch.setattr(sampling, "WIDTH", width)
    xtc = RowSampling(1.5, 1.0, 0, 0.1, 9, xtc_probability=0.5, xtc_threshold=0.1)
    rows = [*(row for row in CASES if row.narrow), xtc, RowSampling(0.0, 0.5, 3, 0.1, 1)]
    lists, whole = Sampler(rows, VOCAB, narrow=True), Sampler(rows, VOCAB)
    stood = 0
    for step in range(40):
        x = [logits(50 + step) for _ in rows]
        short, full = (s.draw(mx.array(x), [step] * len(rows)) for s in (lists, whole))
        assert short.lacking is not None
        lacking = short.lacking.tolist()
        for i, row in enumerate(rows):
            if not lacking[i]:
                stood += 1
                assert short.tokens[i].item() == full.tokens[i].item(), (step, i)
            else:
                assert not row.greedy
                assert sum(p > 0 for p in reference(x[i], row)) >= width - 1
    assert stood > 40


def test_greedy_rows_take_the_largest_logit_beside_sampled_rows() -> None:
    """Temperature 0 is argmax whatever the other rows do."""
    x = mx.array([logits(i) for i in range(4)])
    rows = [RowSampling(0.0, 0.5, 3, 0.1, 1), CASES[2], RowSampling(0.0, 1.0, 0, 0.0, 1), CASES[5]]
    drawn = Sampler(rows, VOCAB).draw(x, [0, 1, 2, 3]).tokens.tolist()
    best = mx.argmax(x, axis=-1).tolist()
    assert drawn[0] == best[0]
    assert drawn[2] == best[2]


@pytest.mark.parametrize("temperature", [1e-5, 1e-7, 1e-38, 5e-324])
def test_the_coldest_temperatures_draw_the_largest_logit(temperature: float) -> None:
    """However small, a temperature overflows nothing."""
    x = mx.array([logits(3)])
    for row in (RowSampling(temperature, 1.0, 0, 0.0, 1), RowSampling(temperature, 0.9, 5, 0.1, 1)):
        assert Sampler([row], VOCAB).draw(x, [0]).tokens.item() == mx.argmax(x).item()


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """The same row draws the same token in any place of any batch."""
    x = logits(3)
    row, other = RowSampling(1.0, 0.9, 0, 0.0, 99), RowSampling(1.4, 1.0, 7, 0.0, 5)
    alone = Sampler([row], VOCAB).draw(mx.array([x]), [17]).tokens.tolist()[0]
    batch = (
        Sampler([other, row, other], VOCAB)
        .draw(mx.array([logits(1), x, logits(2)]), [3, 17, 4])
        .tokens.tolist()
    )
    assert batch[1] == alone


def test_positions_and_seeds_give_different_noise() -> None:
    """Neighbouring seeds and positions are uncorrelated."""
    rows = [RowSampling(1.0, 1.0, 0, 0.0, seed) for seed in range(50)]
    flat = mx.zeros((50, VOCAB))
    sampler = Sampler(rows, VOCAB)
    drawn = [tuple(sampler.draw(flat, [p] * 50).tokens.tolist()) for p in range(20)]
    assert len(set(drawn)) == 20
    assert len(set(zip(*drawn, strict=True))) == 50


def test_noise_has_the_moments_of_a_gumbel_variable() -> None:
    """Mean 0.5772 and variance pi^2 / 6 over a million values."""
    keys = mx.array([[i * 2654435761 % 2**32, i * 40503 + 7] for i in range(20)], dtype=mx.uint32)
    noise = gumbel(keys, mx.arange(50_000, dtype=mx.uint32)[None])
    assert mx.mean(noise).item() == pytest.approx(0.57722, abs=0.01)
    assert mx.var(noise).item() == pytest.approx(math.pi**2 / 6, abs=0.02)


def penalised(x: list[float], penalty: Penalty, prompt: list[int], output: list[int]) -> list[float]:
    """The definitions, one token at a time."""
    out = []
    for i, value in enumerate(x):
        if i in prompt or i in output:
            value = value / penalty.repetition if value > 0 else value * penalty.repetition
        value -= penalty.frequency * output.count(i) + penalty.presence * (i in output)
        out.append(value)
    return out


def test_penalties_follow_their_definitions_while_rows_go_on() -> None:
    """Over ten draws, with the host told of nothing after the first, greedy picks are the reference's."""
    settings = [Penalty(1.3, 0.5, 0.2), Penalty(), Penalty(1.0, 0.0, 3.0)]
    prompts, outputs = [[1, 2, 3], [4], [5]], [[7, 7, 9], [], []]
    rows = [RowSampling(0.0, 1.0, 0, 0.0, 1, penalty=p) for p in settings]
    histories = [History(p, list(o)) for p, o in zip(prompts, outputs, strict=True)]
    sampler = Sampler(rows, VOCAB, histories)
    last = mx.array([9, 4, 5], dtype=mx.uint32)
    for step in range(10):
        x = [logits(100 + step) for _ in rows]
        positions = [len(o) for o in outputs]
        drawn = sampler.draw(mx.array(x), positions, last)
        last = drawn.tokens
        for i, token in enumerate(last.tolist()):
            wanted = penalised(x[i], settings[i], prompts[i], outputs[i])
            assert token == wanted.index(max(wanted)), (step, i)
            outputs[i].append(token)


def test_a_token_that_the_host_has_not_read_counts_once() -> None:
    """A sampler made while a step is in flight counts that step's token, and only once."""
    row = RowSampling(0.0, 1.0, 0, 0.0, 1, penalty=Penalty(1.0, 0.0, 0.6))
    x = [0.0] * VOCAB
    x[3], x[4] = 1.0, 0.5
    read = Sampler([row], VOCAB, [History([1], [3])]).draw(mx.array([x]), [1], mx.array([3], dtype=mx.uint32))
    unread = Sampler([row], VOCAB, [History([1], [])]).draw(
        mx.array([x]), [1], mx.array([3], dtype=mx.uint32)
    )
    fresh = Sampler([row], VOCAB, [History([3], [])]).draw(mx.array([x]), [0], mx.array([3], dtype=mx.uint32))
    assert [d.tokens.item() for d in (read, unread, fresh)] == [4, 4, 3]


def test_logit_bias_and_banned_ids() -> None:
    """A bias decides, a banned id is never drawn, and log-probabilities stay the model's own."""
    x = mx.array([logits(5), logits(5)])
    rows = [
        RowSampling(0.0, 1.0, 0, 0.0, 1, bias={11: 100.0}, logprobs=True),
        RowSampling(1.0, 1.0, 0, 0.0, 2, logprobs=True),
    ]
    best = int(mx.argmax(x[1]).item())
    drawn = Sampler(rows, VOCAB).draw(x, [0, 0], None, [(1, [i for i in range(VOCAB) if i != 9])])
    assert drawn.tokens.tolist() == [11, 9]
    assert drawn.chosen is not None
    reference = x[0] - mx.logsumexp(x[0])
    assert drawn.chosen.tolist() == pytest.approx([reference[11].item(), reference[9].item()], abs=1e-5)
    assert int(mx.argmax(x[1]).item()) == best


def test_xtc_drops_all_but_the_least_likely_top_choice() -> None:
    """At probability 1 the top choices but one are gone; at 0.5 that happens about half of the time."""
    x = [-20.0] * VOCAB
    x[1], x[2], x[3] = 3.0, 2.5, 2.0  # 0.51, 0.31, 0.19
    always = RowSampling(1.0, 1.0, 0, 0.0, 1, xtc_probability=1.0, xtc_threshold=0.15)
    drawn = Sampler([always] * 200, VOCAB).draw(mx.array([x] * 200), list(range(200))).tokens.tolist()
    assert set(drawn) == {3}
    half = RowSampling(1.0, 1.0, 0, 0.0, 1, xtc_probability=0.5, xtc_threshold=0.15)
    drawn = Sampler([half] * 2000, VOCAB).draw(mx.array([x] * 2000), list(range(2000))).tokens.tolist()
    assert drawn.count(3) / 2000 == pytest.approx(0.5 + 0.5 * 0.186, abs=0.05)


def test_top_logprobs_against_a_float64_reference() -> None:
    """Chosen and largest log-probabilities, in descending order, to 1e-5."""
    x = [logits(i) for i in range(3)]
    rows = [RowSampling(0.0, 1.0, 0, 0.0, 1, logprobs=True, top_logprobs=n) for n in (0, 3, 5)]
    drawn = Sampler(rows, VOCAB).draw(mx.array(x), [0, 0, 0])
    assert drawn.chosen is not None
    assert drawn.top is not None
    assert drawn.top_ids is not None
    for i, values in enumerate(x):
        normaliser = math.log(sum(math.exp(v) for v in values))
        order = sorted(range(VOCAB), key=lambda t: -values[t])[:5]
        assert drawn.top_ids[i].tolist() == order
        assert drawn.top[i].tolist() == pytest.approx([values[t] - normaliser for t in order], abs=1e-5)
        assert drawn.chosen[i].item() == pytest.approx(values[order[0]] - normaliser, abs=1e-5)

"""Who is served by what: shrinkage worked out by hand, and what must hold whatever the numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedtailor.tables.model_selection import Gain, ScoreView, chance, choose, gains, required_errors


def samples(rate: float, n: int) -> np.ndarray:
    """n samples of which a share is right."""
    out = np.zeros(n)
    out[: round(rate * n)] = 1
    return out


def test_one_site_by_hand() -> None:
    (found,) = gains([np.array([1.0, 1.0, 0.0, 1.0])], [np.array([0.0, 1.0, 0.0, 0.0])])
    apart = np.array([1.0, 0.0, 0.0, 1.0])
    assert found.mean == pytest.approx(0.5)
    assert found.sd == pytest.approx(math.sqrt(apart.var(ddof=1) / 4))


def test_sites_that_agree_are_shrunk_to_their_mean() -> None:
    a, b = np.array([1.0, 0.0, 0.0, 1.0]), np.array([0.0, 1.0, 1.0, 0.0])
    found = gains([a, b], [np.zeros(4), np.zeros(4)])
    assert [g.mean for g in found] == pytest.approx([0.5, 0.5])
    within = (a.var(ddof=1) * 3 + b.var(ddof=1) * 3) / 6
    assert [g.sd for g in found] == pytest.approx([math.sqrt(within / 8)] * 2)  # as sure as all eight samples are


def test_two_sites_that_differ_by_hand() -> None:
    high, low = np.array([3.0, 5.0]), np.array([-5.0, -3.0])  # means 4 and -4, pooled variance 2, noise 1 each
    found = gains([high, low], [np.zeros(2), np.zeros(2)])
    spread = (32 - 1) / (2 - 2 / 2)  # (Q - (k - 1)) / (sum w - sum w^2 / sum w) with w = 1
    trust = spread / (spread + 1)
    assert [g.mean for g in found] == pytest.approx([4 * trust, -4 * trust])
    doubt = (spread + 1) / 2
    assert found[0].sd == pytest.approx(math.sqrt(trust + (1 - trust) ** 2 * doubt))


def test_a_site_without_samples_is_judged_by_the_others() -> None:
    found = gains([np.ones(20), np.zeros(0)], [samples(0.5, 20), np.zeros(0)])
    assert found[1].mean == pytest.approx(found[0].mean)
    assert found[1].sd >= found[0].sd
    assert gains([np.zeros(0)], [np.zeros(0)]) == [Gain(0.0, math.inf)]


def test_no_difference_is_served_alone() -> None:
    scores = {"Local": [samples(0.5, 10)] * 3, "FedAvg": [samples(0.5, 10)] * 3}
    assert choose([ScoreView(scores, 0.0)], "Local")[0] == ["Local"] * 3


def test_few_samples_do_not_convince_and_many_do() -> None:
    for n, label in ((3, "Local"), (300, "Ditto")):
        better = np.ones(n)
        better[0] = 0
        alone = samples(0.6, n)[::-1]
        assert choose([ScoreView({"Local": [alone], "Ditto": [better]}, 2.0)], "Local")[0] == [label]


def test_the_outlier_stays_alone_and_the_others_share() -> None:
    rng = np.random.default_rng(0)
    alone = [(rng.random(30) < 0.75).astype(float) for _ in range(12)]
    common = [(rng.random(30) < 0.95).astype(float) for _ in range(11)] + [(rng.random(30) < 0.1).astype(float)]
    chosen, (found,) = choose([ScoreView({"Local": alone, "FedAvg": common}, 0.5)], "Local")
    assert chosen[11] == "Local"
    assert found["FedAvg"][11].mean < -0.3
    assert chosen.count("FedAvg") >= 9


@pytest.mark.parametrize("size", [1.0, 10.0, 1e4, math.inf, math.nan])
def test_a_wild_site_does_not_decide_for_the_others(size: float) -> None:
    rng = np.random.default_rng(0)
    alone = [-(1 + 0.3 * rng.random(40)) for _ in range(10)]
    other = [a + 0.5 + 0.1 * rng.standard_normal(40) for a in alone]
    alone[0] = -size * rng.chisquare(1, 40) if math.isfinite(size) else np.full(40, -size)
    chosen, _ = choose([ScoreView({"Local": alone, "X": other}, 2.0, is_bounded=False)], "Local")
    assert chosen[1:] == ["X"] * 9
    if not math.isfinite(size):
        assert chosen[0] == "X"  # anything is better


def test_a_candidate_that_fails_somewhere_does_not_serve_there() -> None:
    alone = [samples(0.5, 40)] * 3
    other = [np.ones(40), np.full(40, math.nan), np.ones(40)]
    assert choose([ScoreView({"Local": alone, "X": other}, 2.0)], "Local")[0] == ["X", "Local", "X"]
    assert choose([ScoreView({"Local": other, "X": other}, 2.0)], "Local")[0] == ["Local"] * 3
    assert choose([ScoreView({"Local": alone[:1], "X": other[1:2]}, 2.0)], "Local")[0] == ["Local"]


def test_more_caution_serves_fewer() -> None:
    rng = np.random.default_rng(1)
    alone = [(rng.random(20) < 0.7).astype(float) for _ in range(10)]
    other = [(rng.random(20) < 0.75).astype(float) for _ in range(10)]
    served = [
        choose([ScoreView({"Local": alone, "X": other}, caution)], "Local")[0].count("X") for caution in (0, 1, 3)
    ]
    assert served == sorted(served, reverse=True)
    assert served[-1] == 0


def test_few_sites_ask_for_more_caution() -> None:
    assert required_errors(1.959964, 4) == pytest.approx(3.182446, abs=1e-5)  # 97.5 % of Student's t with 3 degrees
    assert required_errors(2.0, 10_000) == pytest.approx(2.0, abs=1e-2)
    assert required_errors(0.0, 4) == pytest.approx(0.0, abs=1e-12)
    assert required_errors(2.0, 1) == 2.0


def test_only_training_alone() -> None:
    assert choose([ScoreView({"Local": [samples(0.5, 4)]}, 1.0)], "Local")[0] == ["Local"]


def test_all_views_must_agree_and_the_first_decides() -> None:
    alone, some, all_right = samples(0.5, 100), samples(0.8, 100), np.ones(100)
    first = {"Local": [alone], "A": [all_right], "B": [some], "C": [all_right]}
    last = {"Local": [alone], "A": [some], "B": [all_right], "C": [samples(0.2, 100)]}
    assert choose([ScoreView(first, 1.0), ScoreView(last, 1.0)], "Local")[0] == ["A"]
    assert choose([ScoreView(last, 1.0), ScoreView(first, 1.0)], "Local")[0] == ["B"]
    del first["A"], first["B"], last["A"], last["B"]
    assert choose([ScoreView(first, 1.0), ScoreView(last, 1.0)], "Local")[0] == ["Local"]


def test_the_same_mean_says_less_at_a_noisy_site() -> None:
    """Where scores have no limits, a site's own variance counts beside the common one."""
    rng = np.random.default_rng(0)
    scores = [rng.normal(1.0, 1.0, size=10) for _ in range(20)]
    for site, scale in ((3, 0.5), (7, 2.5)):
        drawn = rng.normal(size=10)
        scores[site] = scale * (drawn - drawn.mean()) / drawn.std() - 0.5
    quiet, noisy = (gains(scores, [np.zeros(10)] * 20, is_bounded=False)[i] for i in (3, 7))
    assert noisy.sd > 1.2 * quiet.sd
    assert noisy.mean > quiet.mean + 0.1


def test_chance_is_the_variance_where_neither_model_is_better() -> None:
    # 0.93 against 0.98: equally good if the class has a share p with p log(0.98 / 0.93) = (1 - p) log(0.07 / 0.02)
    up, down = np.log(0.98 / 0.93), np.log(0.07 / 0.02)
    p = down / (up + down)
    assert chance(np.log([[0.07, 0.93]]), np.log([[0.02, 0.98]])) == pytest.approx([p * (1 - p) * (up + down) ** 2])
    first, second = np.log([[0.2, 0.3, 0.5]]), np.log([[0.5, 0.2, 0.3]])
    drawn = np.linspace(0, 1, 200_001)  # between the two, where the expected difference is 0
    between = np.exp(first + drawn[:, None] * (second - first))
    between /= between.sum(1, keepdims=True)
    at = between[np.abs((between * (second - first)).sum(1)).argmin()]
    wanted = float((at * (second - first)[0] ** 2).sum())
    assert chance(first, second) == pytest.approx([wanted], rel=1e-4)


def test_rows_of_one_class_are_no_proof() -> None:
    """Twenty rows of one class, to which the site's own model gives 0.98 and the shared one 0.93."""
    scores, own = [np.full(20, np.log(0.93))], [np.full(20, np.log(0.98)) + 1e-4 * (np.arange(20) % 2)]
    (sure,) = gains(scores, own, is_bounded=False)
    assert sure.mean + sure.sd < 0
    least = [float(chance(np.log([[0.07, 0.93]]), np.log([[0.02, 0.98]]))[0])]
    (unsure,) = gains(scores, own, is_bounded=False, least=least)
    assert unsure.mean + unsure.sd > 0
    assert unsure.sd == pytest.approx((least[0] / 20) ** 0.5)

"""The estimators keep scikit-learn's conventions, and rows find the model of their site."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

from fedtailor.sklearn import PersonalizedClassifier, PersonalizedRegressor

QUICK = {"rounds": 4, "settings": {"local.lr": 0.3, "local.batch_size": 8, "evaluation.every": 4}}
ESTIMATORS = (
    PersonalizedClassifier(**QUICK),  # type: ignore[arg-type]
    PersonalizedRegressor(**QUICK | {"rounds": 6}),  # type: ignore[arg-type]
)
CHECKS = [(e, check) for e in ESTIMATORS for _, check in estimator_checks_generator(e)]


@pytest.mark.filterwarnings("ignore::UserWarning")  # some checks want warnings
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_conventions(estimator: Any) -> None:
    """All checks of scikit-learn apply; those that need packages that are not there skip themselves."""
    failed = {}
    for made, check in CHECKS:
        if type(made) is type(estimator):
            try:
                check(clone(made))
            except Exception as error:
                if type(error).__name__ not in ("SkipTest", "Skipped"):
                    failed[str(check)] = error
    assert not failed


def rows(seed: int = 0, n: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two sites; at the second everything is the other way round."""
    rng = np.random.default_rng(seed)
    x, site = rng.normal(size=(n, 2)), np.array(["north", "south"])[np.arange(n) % 2]
    return x, np.where((x[:, 0] > 0) ^ (site == "south"), "ill", "well"), site


def test_every_row_is_predicted_by_the_model_of_its_site() -> None:
    x, y, site = rows()
    quick = {"local.lr": 0.3, "local.batch_size": 8}
    made = PersonalizedClassifier(algorithm="local", rounds=10, settings=quick).fit(x, y, groups=site)
    assert made.classes_.tolist() == ["ill", "well"]
    assert made.served_ == {"north": "Local", "south": "Local"}
    later, wanted, where = rows(1)
    assert (made.predict(later, groups=where) == wanted).mean() > 0.85
    assert (made.predict(later, groups=np.roll(where, 1)) == wanted).mean() < 0.3
    assert np.allclose(made.predict_proba(later, groups=where).sum(1), 1)
    unknown = made.predict_proba(later, groups=np.full(60, "west"))  # one model that all have in common
    assert not np.allclose(unknown, made.predict_proba(later, groups=where))


def test_a_frame_names_the_site_and_may_have_text() -> None:
    x, y, site = rows()
    frame = pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "ward": ["p", "q"] * 30, "site": site})
    made = PersonalizedClassifier(client="site", algorithm="ditto", rounds=4).fit(frame, y)
    assert made.feature_names_in_.tolist() == ["a", "b", "ward"]
    assert set(made.served_) == {"north", "south"}
    assert made.predict(frame).shape == (60,)
    with pytest.raises(ValueError, match='no column "site"'):
        made.predict(frame.drop("site"))


def test_a_frame_without_rows_is_refused_as_scikit_learn_does() -> None:
    x, y, site = rows()
    frame = pl.DataFrame({"a": x[:, 0], "site": site})
    made = PersonalizedClassifier(client="site", algorithm="local", rounds=1).fit(frame, y)
    for empty in (frame.head(0), frame.clear()):
        with pytest.raises(ValueError, match=r"0 sample.*PersonalizedClassifier"):
            made.predict(empty)


def test_numbers() -> None:
    x, _, site = rows(n=80)
    y = 100 + 10 * x[:, 0] * np.where(site == "north", 1, -1)
    made = PersonalizedRegressor(algorithm="local", rounds=10).fit(x, y, groups=site)
    assert np.sqrt(((made.predict(x, groups=site) - y) ** 2).mean()) < 4 < y.std()


def test_a_site_with_one_row() -> None:
    x, y, site = rows()
    site = site.astype(object)
    site[0] = "west"
    with pytest.raises(ValueError, match='site "west" has n_samples=1'):
        PersonalizedClassifier(rounds=1).fit(x, y, groups=site)

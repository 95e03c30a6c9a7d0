"""Which columns name rows, judged over all sites."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from fedtailor.data.tabular.align import is_id
from fedtailor.data.tabular.columns import Column


def column(values: list[str]) -> Column:
    text = pl.Series(values, dtype=pl.String)
    return Column(text, text.cast(pl.Float64, strict=False))


def at_sites(name: str, sites: list[list[str]]) -> bool:
    return is_id(name, [column(values) for values in sites])


def products(name: str) -> bool:
    """500 products over 200 sites of 50 rows: at every site nearly all differ."""
    rng = np.random.default_rng(0)
    return at_sites(name, [[f"p{i}" for i in rng.integers(500, size=50)] for _ in range(200)])


@pytest.mark.parametrize("name", ["product", "product_id"])
def test_a_category_that_sites_share_is_no_name_of_rows(name: str) -> None:
    assert not products(name)


def test_names_of_rows_are_found_at_many_sites_and_at_one() -> None:
    assert at_sites("note", [[f"{site}-{row}" for row in range(50)] for site in range(20)])
    assert at_sites("patient", [[str(row) for row in range(50)] for _ in range(20)])  # each numbers its rows from 0
    assert at_sites("patient", [[str(1000 * site + row) for row in range(50)] for site in range(20)])
    assert not at_sites("age", [[str(row) for row in range(50)] for _ in range(20)])

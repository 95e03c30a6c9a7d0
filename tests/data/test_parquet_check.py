"""Parquet files of every kind that polars writes pass; numbers that cannot be true do not."""

from __future__ import annotations

import io
from datetime import date
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedtailor.data.tabular.parquet_check import check
from tests.trust.parsers import SEEDS


def written(frame: pl.DataFrame, **options: Any) -> bytes:
    held = io.BytesIO()
    frame.write_parquet(held, **options)
    return held.getvalue()


FRAME = pl.DataFrame(
    {
        "number": np.random.default_rng(0).normal(size=5000),
        "same": [7] * 5000,
        "text": [f"row {i % 97}" if i % 5 else None for i in range(5000)],
        "truth": [i % 3 == 0 for i in range(5000)],
        "day": [date(2024, 1, 1 + i % 28) for i in range(5000)],
        "kind": pl.Series([f"k{i % 3}" for i in range(5000)], dtype=pl.Categorical),
        "list": [[1, 2], []] * 2500,
        "pair": [{"a": 1, "b": "x"}] * 5000,
        "nothing": pl.Series([None] * 5000, dtype=pl.String),
    }
)


@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip", "lz4", "brotli", "uncompressed"])
def test_files_that_polars_writes_pass(compression: str) -> None:
    for options in ({}, {"row_group_size": 700, "data_page_size": 512}, {"statistics": "full"}):
        check(written(FRAME, compression=compression, **options))


def test_many_equal_rows_and_none_pass() -> None:
    check(written(pl.DataFrame({"same": np.zeros(3_000_000)})))
    check(written(FRAME.head(0)))


def test_numbers_that_cannot_be_true() -> None:
    content = (SEEDS / "parquet/negative-count").read_bytes()
    with pytest.raises(ValueError, match="promises -56 values in a page"):
        check(content)
    whole = written(FRAME.head(3).select("number"))
    check(whole)
    for damaged in (whole[:-1], whole[4:], b"", b"PAR1" * 3, whole[:-8] + b"\xff\xff\xff\x7fPAR1"):
        with pytest.raises(ValueError, match=r"no Parquet file|headers cannot be read"):
            check(damaged)

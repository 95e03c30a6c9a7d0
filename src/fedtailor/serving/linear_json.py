"""A linear model as plain JSON: coefficients in the units of the table, enough to predict by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.algorithm import Algorithm
from fedtailor.data.tabular.preparation import MISSING, OTHER, NumberColumn
from fedtailor.errors import ConfigError, RunError
from fedtailor.numerics import ridge
from fedtailor.tables.serve import Personal

FORMAT = "fedtailor linear model"
HOW = (
    "score = intercept + sum over columns: of a number its coefficients times the value (the one under missing if "
    "there is none, else held within low and high), of a category the coefficients of its value"
)
LINKS = {
    "identity": "the score is the prediction, in units of the target",
    "exp": "prediction = exp(score)",
    "softmax": "probability of class k = exp(score k) / sum of exp(scores)",
}


def has_linear_base(own: Personal) -> bool:
    """Whether the model, but for trees and calibration, is one affine map of features."""
    try:
        ridge.names(own.model)
    except ConfigError:
        return False
    is_plain = type(own.algorithm).predict is Algorithm.predict and own.params.keys() == own.model.trainable.keys()
    return is_plain and own.task in ("classification", "regression", "count")


def weights_of(own: Personal) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Coefficients [outputs, features] and intercepts [outputs] of the prepared features."""
    weight, bias = ridge.names(own.model)
    w = own.params[weight].double().numpy()
    return w, np.zeros(len(w)) if bias is None else own.params[bias].double().numpy()


def linear_record(own: Personal) -> dict[str, Any]:
    """As the file has it; a model that is not linear is a `RunError`."""
    is_plain = own.extras.trees is None and (own.extras.slope, own.extras.offset) == (1.0, 0.0)
    if own.preparation is None or not has_linear_base(own) or not is_plain:
        reason = "has boosted trees" if own.extras.trees is not None else "is not a linear model of a table"
        raise RunError(f'the model of "{own.site}" {reason}, which JSON cannot hold; use --to onnx or --to safetensors')
    is_class, target = own.task == "classification", own.preparation.target
    w, intercept = weights_of(own)
    if is_class:  # scores against those of the first class
        w, intercept = w - w[:1], intercept - intercept[:1]
    else:
        w, intercept = w * target.sd, intercept * target.sd + target.mean
    columns: list[dict[str, Any]] = []
    at = 0
    for column in own.preparation.columns:
        own_w = w[:, at : at + len(column.features)]
        at += len(column.features)
        if isinstance(column, NumberColumn):
            scale = column.sites[own.site]
            intercept = intercept - own_w[:, 0] * scale.mean / scale.sd
            unit = {"unit": "days since 1970-01-01"} if column.is_date else {}
            columns.append(
                {"name": column.name, "kind": "number", **unit, "coefficients": (own_w[:, 0] / scale.sd).tolist()}
                | {"missing": scale.median, "zero_is_missing": column.zero_is_missing}
                | {"low": scale.low, "high": scale.high}
            )
        else:
            by_value = {n: (own_w @ row).tolist() for n, row in zip(column.categories, column.matrix, strict=True)}
            unknown = by_value.get(OTHER, [0.0] * len(w))
            columns.append(
                {"name": column.name, "kind": "category", "coefficients": by_value}
                | {"missing": by_value.get(MISSING, unknown), "unknown": unknown}
            )
    link = "softmax" if is_class else "identity" if own.error_scale == "plain" else "exp"
    return {
        "format": FORMAT,
        "version": 1,
        "how": HOW,
        "link": link,
        "prediction": LINKS[link],
        "site": own.site,
        "task": own.task,
        "target": target.name,
        "classes": list(own.classes),
        "intercept": intercept.tolist(),
        "columns": columns,
        "half_widths_of": {"plain": "the number", "log": "its logarithm", "root": "its square root"}[own.error_scale],
        "half_widths": {f"{level:g}": width for level, width in sorted(own.extras.half_widths.items())},
    }


def predict_by_hand(record: Mapping[str, Any], row: Mapping[str, Any]) -> list[float]:
    """The prediction of a record for one row (values by column): probabilities of the classes, or the number."""
    scores = list(record["intercept"])
    for column in record["columns"]:
        value = row.get(column["name"])
        if column["kind"] == "category":
            known = column["missing"] if value is None else column["coefficients"].get(value, column["unknown"])
            scores = [score + c for score, c in zip(scores, known, strict=True)]
            continue
        is_missing = value is None or math.isnan(value) or (value == 0 and column["zero_is_missing"])
        if is_missing:
            value = column["missing"]
        elif column["low"] is not None and column["high"] is not None:
            value = min(max(value, column["low"]), column["high"])
        scores = [score + c * value for score, c in zip(scores, column["coefficients"], strict=True)]
    if record["link"] == "identity":
        return scores
    if record["link"] == "exp":
        return [math.exp(score) for score in scores]
    odds = [math.exp(score - max(scores)) for score in scores]
    return [odd / sum(odds) for odd in odds]

"""What a site says of itself as a run begins, checked: it decides how much its replies count, and what is allocated."""

from __future__ import annotations

import math
from typing import Any

MOST_SAMPLES, LARGEST = 10**9, 2**24  # that a site may say it has, and numbers in one sample
MOST_NAMES = 100_000  # of classes or features
SCHEMA = ("task", "x", "y", "outputs", "classes", "features")
TYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


def unusable(about: dict[str, Any]) -> str:
    """Which part of it cannot be; nothing if all is well."""
    schema = about.get("schema")
    if type(about.get("samples")) is not int or not 0 < about["samples"] <= MOST_SAMPLES:
        return "number of samples"
    if not isinstance(schema, dict) or set(schema) != set(SCHEMA) or not isinstance(schema["task"], str):
        return "schema"
    if not isinstance(schema["x"], dict) or not all(map(_is_form, [*schema["x"].values(), schema["y"]])):
        return "form of its samples"
    if type(schema["outputs"]) is not int or not 0 < schema["outputs"] <= LARGEST:
        return "number of outputs"
    names = (schema["classes"], schema["features"])
    is_named = all(isinstance(these, list) and all(isinstance(name, str) for name in these) for these in names)
    return "" if is_named and max(map(len, names)) <= MOST_NAMES else "names of classes or features"


def _is_form(form: Any) -> bool:
    """Shape and type of one sample."""
    if not (isinstance(form, list) and len(form) == 2 and isinstance(form[0], list) and form[1] in TYPES):
        return False
    return all(type(size) is int and 0 < size <= LARGEST for size in form[0]) and math.prod(form[0]) <= LARGEST

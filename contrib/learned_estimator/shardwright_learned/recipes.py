"""Regressors as plain data: the class and its arguments, so that it can be made and fitted again. Never pickle."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

import shardwright as sw


def to_recipe(value: Any) -> Any:
    """An unfitted regressor, or an argument of one, as JSON data.

    Raises:
        UnsupportedError: It holds something that is no plain data: a function, a class of somebody else.
    """
    if isinstance(value, np.generic):  # float64 among them, which is a float too
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return {"sequence": type(value).__name__, "items": [to_recipe(item) for item in value]}
    if isinstance(value, dict):
        return {"mapping": [[to_recipe(key), to_recipe(item)] for key, item in value.items()]}
    if isinstance(value, np.ufunc):
        return {"numpy": value.__name__}
    if _is_of_sklearn(type(value)) and hasattr(value, "get_params"):
        arguments = {name: to_recipe(item) for name, item in value.get_params(deep=False).items()}
        return {"class": f"{type(value).__module__}.{type(value).__qualname__}", "arguments": arguments}
    raise sw.UnsupportedError(
        f"{value!r} cannot be saved as plain data. Use regressors and transformers of scikit-learn, whose "
        "arguments are numbers, texts, sequences, NumPy's functions, or such regressors and transformers."
    )


def from_recipe(data: Any) -> Any:
    """Rebuild the object that `to_recipe` was given.

    Raises:
        InvalidInputError: It is no recipe, or names something outside of scikit-learn and NumPy.
    """
    if not isinstance(data, dict):
        return data
    if "class" in data:
        arguments = {name: from_recipe(item) for name, item in data.get("arguments", {}).items()}
        return _class_of(data["class"])(**arguments)
    if "numpy" in data and isinstance(getattr(np, str(data["numpy"]), None), np.ufunc):
        return getattr(np, data["numpy"])
    if "mapping" in data:
        return {from_recipe(key): from_recipe(item) for key, item in data["mapping"]}
    if data.get("sequence") in ("list", "tuple"):
        items = [from_recipe(item) for item in data["items"]]
        return items if data["sequence"] == "list" else tuple(items)
    raise sw.InvalidInputError(f"{data!r} is no recipe of a regressor")


def _class_of(path: str) -> type:
    """A class of scikit-learn, and of nobody else: a file names what is to be run."""
    module, _, name = path.rpartition(".")
    if module.partition(".")[0] == "sklearn":
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            found = None
        if isinstance(found, type) and _is_of_sklearn(found) and hasattr(found, "get_params"):
            return found
    raise sw.InvalidInputError(
        f"{path!r} is no regressor or transformer of the scikit-learn that is installed"
    )


def _is_of_sklearn(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "sklearn"

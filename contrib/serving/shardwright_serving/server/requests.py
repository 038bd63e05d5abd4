"""Requests: JSON checked against a package's manifest, and made arrays of.

Pydantic reads and checks in one pass. What only several parts together tell is checked behind it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, FailFast, Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from shardwright_serving.packages.manifest import Feature, Manifest
from shardwright_serving.server.samples import Samples

STRICT = ConfigDict(strict=True, extra="forbid")
INT64 = np.iinfo(np.int64)
Weight = Annotated[list[FiniteFloat], FailFast()]


class UnfitRequestError(ValueError):
    """A request that the served package cannot answer.

    Attributes:
        problems: places in the request (``loc``) and sentences (``msg``), in the form of FastAPI's details.
    """

    def __init__(self, problems: Sequence[Mapping[str, Any]]) -> None:
        super().__init__("; ".join(problem["msg"] for problem in problems))
        self.problems = list(problems)

    @classmethod
    def at(cls, *loc: str | int, msg: str) -> UnfitRequestError:
        """Say one problem and its place."""
        return cls([{"loc": loc, "msg": msg}])


class RequestReader:
    """Reader of the requests that one package answers."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._adapter = TypeAdapter(_body_type(manifest))

    def json_schema(self) -> dict[str, Any]:
        """JSON schema of a request, whose definitions are to stand among an OpenAPI document's components."""
        return self._adapter.json_schema(ref_template="#/components/schemas/{model}")

    def read(self, body: bytes) -> Samples:
        """Read a request.

        Args:
            body: JSON of the request.

        Raises:
            UnfitRequestError: it is no JSON, or it does not fit the package; the feature is named.
        """
        try:
            request = self._adapter.validate_json(body)
        except ValidationError as error:
            raise UnfitRequestError([self._told(one) for one in error.errors(include_url=False)]) from None
        _check_once(body, request)
        bags: dict[str, list[list[int]]] = request["features"]
        count = self._count(bags, request)
        empty: list[list[int]] = [[]] * count
        by_feature = [bags.get(feature.name, empty) for feature in self._manifest.features]
        lengths = np.array([[*map(len, own)] for own in by_feature], dtype=np.int64)
        return Samples(
            lengths.reshape(len(by_feature), count),
            tuple(_flat(own, np.int64) for own in by_feature),
            self._weights(request.get("weights", {}), by_feature) if self._manifest.is_weighted else (),
            self._dense(request["dense"]) if self._manifest.dense else None,
        )

    def _count(self, bags: Mapping[str, list[list[int]]], request: Mapping[str, Any]) -> int:
        """Count the samples, of which every input must have as many."""
        counts: dict[tuple[str, ...], int] = {("features", name): len(own) for name, own in bags.items()}
        if self._manifest.dense:
            counts[("dense",)] = len(request["dense"])
        if not counts:
            raise UnfitRequestError.at("features", msg="the request names no feature, so it has no samples")
        (_, count), *others = counts.items()
        for place, other in others:
            if other != count:
                first = next(iter(counts))
                raise UnfitRequestError.at(
                    *place, msg=f"{_named(place)} has {other} samples; {_named(first)} has {count}"
                )
        if not count:
            raise UnfitRequestError.at("features", msg="the request has no samples")
        return count

    def _weights(
        self, weights: Mapping[str, list[list[float]]], by_feature: Sequence[list[list[int]]]
    ) -> tuple[NDArray[np.float32], ...]:
        return tuple(
            _weights_of(feature, weights.get(feature.name), bags)
            for feature, bags in zip(self._manifest.features, by_feature, strict=True)
        )

    def _dense(self, rows: list[list[float]]) -> NDArray[np.float32]:
        return _finite(np.array(rows, dtype=np.float64), "dense", msg="dense")

    def _told(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """Tell an error of pydantic's in words of the package."""
        loc = error["loc"]
        name = loc[1] if loc[:1] in (("features",), ("weights",)) and len(loc) > 1 else None
        tell = _SENTENCES.get(error["type"])
        if name is None:
            place = f"{loc[0]}, sample {loc[1]}" if len(loc) > 1 else "".join(map(str, loc))
            what = f"{place}: " if place else ""
            if error["type"] == "extra_forbidden":
                return {"loc": loc, "msg": f"unknown key {loc[-1]!r}; known: features, weights, dense"}
            return {"loc": loc, "msg": f"{what}{_lower(error['msg'])}"}
        if tell is not None and not (loc[0] == "weights" and error["type"] == "missing"):
            return {"loc": loc, "msg": tell(self._manifest, name, loc, error)}
        where = f" of sample {loc[2]}" if len(loc) > 2 else ""
        what = "weights" if loc[0] == "weights" else "ids"
        return {"loc": loc, "msg": f"feature {name!r}, {what}{where}: {_lower(error['msg'])}"}


def _check_once(body: bytes, request: Mapping[str, Any]) -> None:
    """Check that no key is there twice, of which pydantic takes the last."""
    parts = [request, request["features"], request.get("weights", {})]
    # All texts of a request that fits are its keys, so that their number tells, and most bodies are read once.
    if body.count(b'"') != 2 * sum(map(len, parts)):
        json.loads(body, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise UnfitRequestError.at(
                key, msg=f"{key!r} is there {keys.count(key)} times; which one is meant?"
            )
    return dict(pairs)


def _body_type(manifest: Manifest) -> Any:
    """Make the type of a request's body: one key per feature, ids within its table's rows."""
    weighted = {one.name: list[Weight] for one in manifest.features if one.is_weighted}
    weights = _mapping("Weights", {name: NotRequired[type_] for name, type_ in weighted.items()})
    body: dict[str, Any] = {"features": _mapping("Features", _feature_types(manifest.features))}
    if weighted:
        body["weights"] = NotRequired[weights]
    if manifest.dense:
        width = Field(min_length=manifest.dense.columns, max_length=manifest.dense.columns)
        body["dense"] = Annotated[list[Annotated[list[FiniteFloat], width, FailFast()]], FailFast()]
    return _mapping("Request", body)


def _feature_types(features: Sequence[Feature]) -> dict[str, Any]:
    types: dict[str, Any] = {}
    for feature in features:
        rows = feature.num_embeddings
        least, most = (INT64.min, INT64.max) if rows is None else (0, rows - 1)
        bag = Annotated[list[Annotated[int, Field(ge=least, le=most)]], FailFast()]
        bags = Annotated[list[bag], FailFast()]
        types[feature.name] = bags if feature.is_required else NotRequired[bags]
    return types


def _mapping(name: str, keys: Mapping[str, Any]) -> Any:
    type_ = TypedDict(name, dict(keys))  # type: ignore[misc]  # noqa: UP013  # keys of the package
    type_.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
    return type_


def _weights_of(
    feature: Feature, weights: list[list[float]] | None, bags: list[list[int]]
) -> NDArray[np.float32]:
    """Take the weights of a feature's ids; those of a feature without weights are 1."""
    if not feature.is_weighted:
        return np.ones(sum(map(len, bags)), dtype=np.float32)
    place = ("weights", feature.name)
    if weights is None:
        if not any(bags):
            return np.empty(0, dtype=np.float32)
        raise UnfitRequestError.at(*place, msg=f"feature {feature.name!r} needs a weight for each id")
    wanted, given = [*map(len, bags)], [*map(len, weights)]
    if wanted != given:
        sample, ids, got = _first_difference(wanted, given)
        raise UnfitRequestError.at(
            *place,
            *sample,
            msg=f"feature {feature.name!r} has {ids} and {got}: each id needs one",
        )
    return _finite(_flat(weights, np.float64), *place, msg=f"feature {feature.name!r}")


def _first_difference(wanted: Sequence[int], given: Sequence[int]) -> tuple[tuple[int, ...], str, str]:
    if len(wanted) != len(given):
        return (), f"{len(wanted)} samples", f"weights for {len(given)}"
    sample = next(index for index, pair in enumerate(zip(wanted, given, strict=True)) if pair[0] != pair[1])
    return (sample,), f"{wanted[sample]} ids in sample {sample}", f"{given[sample]} weights"


def _finite(values: NDArray[np.float64], *loc: str, msg: str) -> NDArray[np.float32]:
    """Round to float32, in which a large number is not finite any more."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise UnfitRequestError.at(*loc, msg=f"{msg} has a number that is not finite as a float32")
    return rounded


def _flat(bags: list[list[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.fromiter(itertools.chain.from_iterable(bags), dtype=dtype, count=sum(map(len, bags)))


def _named(place: Sequence[str]) -> str:
    return f"feature {place[1]!r}" if len(place) > 1 else place[0]


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


Tell = Callable[[Manifest, str, Sequence[Any], Mapping[str, Any]], str]


def _unknown(manifest: Manifest, name: str, loc: Sequence[Any], error: Mapping[str, Any]) -> str:
    if loc[0] == "weights" and name in manifest.names:
        return f"feature {name!r} takes no weights"
    return f"unknown feature {name!r}; known: {', '.join(manifest.names)}"


def _out_of_range(manifest: Manifest, name: str, loc: Sequence[Any], error: Mapping[str, Any]) -> str:
    rows = manifest.features[manifest.names[name]].num_embeddings
    known = "a signed integer of 64 bits" if rows is None else f"an id of 0 to {rows - 1}"
    return f"feature {name!r}, sample {loc[2]}: id {error['input']} is not {known}"


_SENTENCES: Mapping[str, Tell] = {
    "missing": lambda manifest, name, loc, error: (
        f"feature {name!r} is missing: send a list of ids for each sample, [] for one without"
    ),
    "extra_forbidden": _unknown,
    "less_than_equal": _out_of_range,
    "greater_than_equal": _out_of_range,
    "int_parsing_size": _out_of_range,
}
"""Sentences for errors of pydantic's that are about a feature, by their type."""

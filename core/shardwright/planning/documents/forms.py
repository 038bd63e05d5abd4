"""Checks of documents against their JSON schemas; faults are told in words."""

from __future__ import annotations

import functools
import itertools
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from shardwright.errors import InvalidInputError, ShardwrightError, nearest
from shardwright.planning.documents.schemas import load_schema, schema_names
from shardwright.planning.documents.text import MalformedError, parse_json, read_text

if TYPE_CHECKING:
    import jsonschema_rs

_BASE = "json-schema:///"  # what jsonschema-rs resolves relative references against
_FREE_PREFIX = "x-"
_COMMENT = {"$ref": "#/$defs/comment"}
_MOST_FAULTS = 10  # of which one is told
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist = 2, 4, 6
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60
_MAPS = frozenset({"properties", "patternProperties"})
_INNER = _MAPS | {"additionalProperties", "items"}
_TYPES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "object": "an object",
    "string": "a text",
}

Place = Sequence[str | int]
"""The keys and positions that lead to a value in a document."""


@frozen
class DocumentKind:
    """A kind of document that holds JSON: how it is read, within the limits of all documents, and checked.

    Plugins that read JSON of their own have one too, without a schema.

    Args:
        title: noun that messages use for such a document: ``"workload"``.
        schema: file of its JSON schema in ``schemas/``; empty: any JSON.
        error: exception class raised for a document that is wrong.
        locate: words for a place in a document: ``(document, place) -> (words, the rest of the place)``.

    Example:
        >>> DocumentKind("list of counts").parse("[3, 1")
        Traceback (most recent call last):
        shardwright.errors.InvalidInputError: the list of counts is no JSON: Expecting ',' delimiter at line 1, column 6
    """

    title: str
    schema: str = ""
    error: type[ShardwrightError] = InvalidInputError
    locate: Callable[[Any, Place], tuple[str, Place]] = lambda document, place: ("", place)

    def text(self, path: str | Path) -> str:
        """The text in a file.

        Raises:
            ShardwrightError: the kind's own: it cannot be read, is no text, or is too long.
        """
        with self._named(f" {str(path)!r}"):
            return read_text(path)

    def read(self, path: str | Path) -> Any:
        """The JSON value in a file; its form is not checked.

        Raises:
            ShardwrightError: the kind's own: it cannot be read, is no JSON, or exceeds a limit.
        """
        with self._named(f" {str(path)!r}"):
            return parse_json(read_text(path))

    def parse(self, text: str) -> Any:
        """The JSON value in a text; its form is not checked.

        Raises:
            ShardwrightError: the kind's own: it is no JSON, or exceeds a limit.
        """
        with self._named(""):
            return parse_json(text)

    @contextmanager
    def _named(self, file: str) -> Iterator[None]:
        """Within this, what is malformed is an error of the kind."""
        try:
            yield
        except MalformedError as error:
            raise self.error(f"the {self.title}{file} {error}") from error

    def check(self, value: Any) -> None:
        """Check that JSON data has the form that the schema states.

        Raises:
            ShardwrightError: the kind's own; the text says where it has another form, what stands there, what would
                be right, and of keys the nearest; of a document of another kind, what reads it.
        """
        try:
            faults = list(itertools.islice(_validator(self.schema).iter_errors(value), _MOST_FAULTS))
        except ValueError as error:  # Python data that JSON has no word for
            raise self.error(f"the {self.title} is no JSON data: {error}") from error
        if faults:
            schema, what = _kind_of(value) or (self.schema, "")
            if schema != self.schema:
                raise self.error(f"the {self.title} is of another kind: {what}")
            raise self.error(min((self._told(value, fault) for fault in faults), key=itemgetter(0))[1])

    def _told(self, value: Any, fault: jsonschema_rs.ValidationError) -> tuple[int, str]:
        """Priority and text of a fault; the lowest priority is reported."""
        words, rest = self.locate(value, list(_place_in(value, fault.instance_path)))
        where = ": ".join(filter(None, [words, _dotted(rest)])) or f"the {self.title}"
        nodes = _nodes(self.schema, fault.evaluation_path)
        text = f"{where} {_wrong(fault, nodes[-1])}"
        meaning = next((node["description"] for node in nodes if "description" in node), "")
        # Another format or version explains all other faults. A misspelt key is also one that is missing, and says
        # more; other unknown keys say less.
        urgencies = {"const": -1, "additionalProperties": 0 if "Did you mean" in text else 2}
        return urgencies.get(fault.kind.name, 1), f"{text}. {meaning}".rstrip(". ") + "."


def _kind_of(value: Any) -> tuple[str, str] | None:
    """The file of a document's schema, and what reads it: by its format, or by its form where its kind has none."""
    said = value.get("format") if isinstance(value, dict) else None
    for name in schema_names() if value else ():
        schema = load_schema(name)
        node = schema.get("properties", {}).get("format")
        if node and node["const"] == said:
            return name, f'its "format" is {said!r}. {node["description"]}'
        if not node and "description" in schema and _validator(name).is_valid(value):
            return name, f"its keys say so. {schema['description']}"
    return None


@functools.cache
def _validator(name: str) -> jsonschema_rs.Validator:
    import jsonschema_rs

    registry = jsonschema_rs.Registry([(_BASE + name, load_schema(name)) for name in schema_names()])
    return jsonschema_rs.validator_for({"$ref": name}, registry=registry)


def _nodes(name: str, path: Place) -> list[Mapping[str, Any]]:
    """The schemas of a value that does not keep one of them, that one last.

    Args:
        name: file of the schema.
        path: keywords, ``$ref`` among them, as validation went through them; the last is not kept.
    """
    node: Any = {"$ref": name}
    nodes: list[Mapping[str, Any]] = []
    is_schema = True  # else a map of schemas by name
    for step in path[:-1]:
        if step in _INNER and is_schema:
            nodes.clear()  # on to a value inside
        elif is_schema:
            nodes.append(node)
        is_schema = not (is_schema and step in _MAPS)
        if step == "$ref":
            name, node = _referenced(name, node["$ref"])
        else:
            node = node[step]
    return [*nodes, node]


def _referenced(name: str, reference: str) -> tuple[str, Any]:
    """The file and the schema that a reference in a file means."""
    file, _, pointer = reference.partition("#/")
    name = file or name
    node = load_schema(name)
    for key in filter(None, pointer.split("/")):
        node = node[key]
    return name, node


def _place_in(value: Any, path: Place) -> Iterator[str | int]:
    """The place that jsonschema-rs means: its paths lack keys that are empty, and have numbers for keys of digits."""
    for step in path:
        while isinstance(value, dict) and str(step) not in value and "" in value:
            value = value[""]
            yield ""
        key = str(step) if isinstance(value, dict) else step
        value = value[key] if isinstance(value, list) or key in (value or ()) else None
        yield key


def _dotted(place: Place) -> str:
    """``tables[0].optimizer``; keys that are no plain words stand in brackets."""
    text = ""
    for step in place:
        if isinstance(step, str) and step.replace("$", "_").isidentifier():
            text += f".{step}" if text else step
        else:
            text += f"[{_SHORT.repr(step)}]"
    return text


def _wrong(fault: jsonschema_rs.ValidationError, schema: Mapping[str, Any]) -> str:
    """Describe a fault of a value: the rule, and the value that breaks it."""
    kind, limit = fault.kind.name, fault.kind.value
    if kind == "additionalProperties":
        known = schema.get("properties", {})
        read = sorted(name for name in known if known[name] != _COMMENT and name != "$schema")
        return (
            f"has the key {_SHORT.repr(limit[0])}, which is not read. Known: {', '.join(read)}."
            f"{nearest(limit[0], read)} Keys of your own begin with {_FREE_PREFIX!r}"
        )
    if kind == "required":
        return f"has no {limit!r}: {_SHORT.repr(fault.instance)}"
    must = _MUST.get(kind, lambda value: f"be otherwise ({kind})")(limit)
    return f"must {must}, got {_SHORT.repr(fault.instance)}"


_MUST: Mapping[str, Callable[[Any], str]] = {
    "type": lambda types: "be " + " or ".join(_TYPES[name] for name in sorted(types)),
    "minimum": lambda least: f"be {least} at least",
    "exclusiveMinimum": lambda least: f"be above {least}",
    "maximum": lambda most: f"be {most} at most",
    "minItems": lambda least: f"have {least} item{'s'[: least - 1]} at least",
    "maxItems": lambda most: f"have {most} items at most",
    "minLength": lambda least: f"have {least} character{'s'[: least - 1]} at least",
    "maxLength": lambda most: f"have {most} characters at most",
    "const": lambda value: f"be {value!r}",
}

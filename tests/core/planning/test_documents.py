"""Schemas and readers of documents, and the page about them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from tests import readme
from tests.core.planning.conftest import make_host

import shardwright
from shardwright import (
    DocumentKind,
    EmbeddingShardingPlanner,
    InvalidInputError,
    ParameterConstraints,
    PlanError,
    ShardingPlan,
    TableSpec,
    Topology,
    Workload,
)
from shardwright.host import use_host
from shardwright.planning.documents import CONSTRAINTS, MACHINE, PLAN, WORKLOAD, limits
from shardwright.planning.documents.schemas import FOLDER, load_schema, schema_names
from shardwright.planning.tables.constraints import Constraints

PAGE = Path(shardwright.__file__).parent / "docs" / "documents.md"
TIMES = DocumentKind("document of measured times", schema="times.schema.json")
KINDS = {"workload": WORKLOAD, "constraints": CONSTRAINTS, "machine": MACHINE, "plan": PLAN, "times": TIMES}


def shown(name):
    return json.loads(readme.source(name, PAGE))


@pytest.mark.parametrize("read", sorted(KINDS))
@pytest.mark.parametrize(
    ("given", "reads"),
    [
        ("constraints", "plan --constraints"),
        ("machine", "plan --machine"),
        ("plan", "explain"),
        ("times", "explain --measured"),
        ("workload", "plan"),
    ],
)
def test_document_of_another_kind_says_what_it_is(read, given, reads):
    kind = KINDS[read]
    document = {"format": "shardwright-times", "version": 1} if given == "times" else shown(given)
    if read == given:
        kind.check(document)
    else:
        with pytest.raises(kind.error, match=rf"is of another kind: .*`shardwright {reads}`"):
            kind.check(document)


@pytest.mark.parametrize("document", [{}, {"tables": "user"}])
def test_what_has_no_kind_is_told_what_makes_plans(document):
    with pytest.raises(PlanError, match=r"has no 'format': .*`shardwright plan` makes a plan of a workload"):
        PLAN.check(document)


def test_page_examples_can_be_read():
    workload = Workload.from_data(shown("workload"))
    asked = Constraints.from_data(shown("constraints"))
    asked.check(workload.tables)
    assert workload.batch_size == 512
    assert [table.path for table in workload.tables] == ["user_id", "item_id", "tower.seen"]
    assert asked.of(workload.tables[2]).ranks == (0, 1)
    names = {"whole": "row_wise", "plain": "fused_torch"}  # the page names built-ins
    text = readme.source("plan", PAGE)
    for own, built_in in names.items():
        text = text.replace(built_in, own)
    assert ShardingPlan.from_json(text).plan["tower"]["seen"].ranks == [0, 1]


def test_wheel_has_the_schemas_and_the_page():
    builder = WheelBuilder(str(readme.README.parent))
    shipped = {file.distribution_path for file in builder.recurse_included_files()}
    root = Path(shardwright.__file__).parents[1]
    needed = [PAGE, *(FOLDER / name for name in schema_names())]
    assert len(needed) == 7
    assert {str(path.relative_to(root)) for path in needed} <= shipped


def keys_of(schema, found):
    """All names of properties anywhere in a schema."""
    if isinstance(schema, dict):
        found.update(schema.get("properties", ()))
        for value in schema.values():
            keys_of(value, found)
    return found


@pytest.mark.parametrize("name", sorted(KINDS))
def test_page_names_every_key_of_the_schema(name):
    text = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    told = set(re.findall(r"[\w$]+", " ".join(re.findall(r"`([^`]+)`", text)))) | {"$schema"}
    assert keys_of(load_schema(f"{name}.schema.json"), set()) - told == set()


def test_page_limits_are_those_that_are_stated():
    _, _, section = PAGE.read_text().partition("\n## Limits\n")
    rows = [
        tuple(cell.strip() for cell in row.strip("|").split("|"))
        for row in re.findall(r"^\|.*\|$", section, re.M)
    ]
    stated = [
        (
            limit["description"],
            str(limit.get("minimum", limit.get("minItems", ""))),
            str(limit.get("maximum", limit.get("maxItems", limit.get("maxLength")))),
        )
        for limit in load_schema("limits.schema.json")["$defs"].values()
    ]
    assert rows[2:] == stated


def test_schemas_are_schemas_and_refer_to_what_is_there():
    import jsonschema_rs

    for name in schema_names():
        assert jsonschema_rs.meta.is_valid(load_schema(name)), name
        for reference in re.findall(r'"\$ref": "([^"]+)"', (FOLDER / name).read_text()):
            file, _, pointer = reference.partition("#/$defs/")
            assert not pointer or pointer in load_schema(file or name)["$defs"], (name, reference)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"the list is no JSON: Expecting value at line 1, column 1"),
        ("[1, 2", r"the list is no JSON: Expecting ',' delimiter at line 1, column 6"),
        ('{"a": 1, "a": 2}', r"has the key 'a' twice in one object; put both values into one"),
        ("[1e999]", r"has the number 1e999, which is not finite"),
        ("[NaN]", r"has the number NaN, which is not finite"),
        ("9" * 5000, r"is not read: Exceeds the limit"),
        ("[" * 401 + "]" * 401, r"is nested too deeply; 400 lists and objects"),
        ("[" * 100_000, r"is nested too deeply"),
    ],
)
def test_parse_of_what_is_no_json_or_too_much_says_so(text, told):
    with pytest.raises(PlanError, match=told):
        DocumentKind("list", error=PlanError).parse(text)


def test_parse_of_a_document_over_the_limit_says_the_limit(monkeypatch):
    kind = DocumentKind("list")
    kind.parse('"abcd"')
    monkeypatch.setattr("shardwright.planning.documents.text.MOST_DOCUMENT_BYTES", 3)
    with pytest.raises(InvalidInputError, match=r"\b3\b.* most that is read"):
        kind.parse('"abcd"')


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\xff\xfe[\0", r"is no text in UTF-8: invalid start byte at byte 0"),
        (b"[\xff]", r"is no text in UTF-8: invalid start byte at byte 1"),
        (b"\xef\xbb\xbf[1]", None),
    ],
)
def test_read_of_bytes_says_what_is_wrong(tmp_path, data, told):
    path = tmp_path / "list.json"
    path.write_bytes(data)
    if told is None:
        assert DocumentKind("list").read(path) == [1]
        return
    with pytest.raises(InvalidInputError, match=rf"the list '.*list\.json' {told}"):
        DocumentKind("list").read(path)


@pytest.mark.parametrize("name", ["none.json", "."])
def test_read_of_no_file_says_so(tmp_path, name):
    with pytest.raises(InvalidInputError, match=r"cannot be read: (No such file|Is a directory)"):
        DocumentKind("list").read(tmp_path / name)


def test_read_ends_at_the_limit_of_an_endless_file(monkeypatch):
    monkeypatch.setattr("shardwright.planning.documents.text.MOST_DOCUMENT_BYTES", 1 << 20)
    with pytest.raises(InvalidInputError, match="is longer than 1048576 bytes"):
        DocumentKind("list").read(Path("/dev/zero"))


PLANNED = [TableSpec("a", 10, 8, ["f"]), TableSpec("b", 20, 8, ["g"], module="")]


def planned_document():
    rules = {"*": ParameterConstraints(sharding_types=["slices"], extras={"any": [1, {"": None}]})}
    return json.loads(
        EmbeddingShardingPlanner(Topology(2, "cpu"), constraints=rules).plan_tables(PLANNED).to_json()
    )


def test_what_a_planner_writes_has_the_form_of_the_schema():
    with use_host(make_host()):
        PLAN.check(planned_document())


REFUSED = [
    pytest.param(
        lambda: Topology(limits.MOST_RANKS + 1, "cpu"),
        f"to {limits.MOST_RANKS}, got",
        id="limits hold for values made in python 1",
    ),
    pytest.param(
        lambda: ParameterConstraints(pooling_factors=[limits.MOST_RATE + 1]),
        f"to {limits.MOST_RATE}, got",
        id="limits hold for values made in python 2",
    ),
    pytest.param(
        lambda: EmbeddingShardingPlanner(batch_size=limits.MOST_SAMPLES + 1),
        f"to {limits.MOST_SAMPLES} or None, got",
        id="limits hold for values made in python 3",
    ),
    pytest.param(
        lambda: TableSpec("t", limits.MOST_ROWS + 1, 8),
        f"to {limits.MOST_ROWS}, got",
        id="limits hold for values made in python 4",
    ),
    pytest.param(
        lambda: WORKLOAD.check({"tables": [{"name": "a", "num_embedings": 3, "embedding_dim": 4}]}),
        r"table 0 \('a'\) has the key 'num_embedings'.*Did you mean",
        id="check tells a misspelt key before the one that is missing then 1",
    ),
    pytest.param(
        lambda: WORKLOAD.check({"facts": 3, "what": "no workload"}),
        "the workload has no 'tables'",
        id="check tells a misspelt key before the one that is missing then 2",
    ),
    pytest.param(
        lambda: CONSTRAINTS.check({"a": {"extras": {"x": object()}}}),
        "is no JSON data",
        id="check of python data that is no json says so",
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_wrong_call_is_an_error_that_says_what_is_wrong(call, text):
    with pytest.raises(InvalidInputError, match=text):
        call()

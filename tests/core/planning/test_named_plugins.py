"""PlanningPlugins asked for by name, with arguments, and as objects."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.core.planning.conftest import Cells, EachAlone, FirstFit, Weights

from shardwright import (
    EmbeddingShardingPlanner,
    Estimator,
    InvalidInputError,
    ShardingPlan,
    TableSpec,
    Topology,
)
from shardwright_plugins.plan_differences.check import check_plan
from shardwright_plugins.plan_differences.explain import explain_table

TABLE = TableSpec("t", 10, 8, ["f"])


class Priced(Estimator):
    """Milliseconds by the cell, at a price and with what else was given."""

    name = "priced"

    def __init__(self, price=1.0, *, phases=("forward",), label="plain"):
        self.price, self.phases, self.label = price, phases, label
        if price < 0:
            raise ValueError(f"a price of {price}")

    def estimate(self, options, topology):
        cells = self.price * options.num_rows * options.num_columns
        return dict.fromkeys(self.phases, np.asarray(cells, dtype=float))

    def provenance(self, options):
        return {"price": self.price, "phases": list(self.phases), "label": self.label}


@pytest.fixture(autouse=True)
def priced(little_plugins, host_with):
    with host_with(estimators=[Cells, Weights, Priced]) as host:
        yield host


def planned(**parts):
    planner = EmbeddingShardingPlanner(Topology(1, "cpu"), 4, **parts)
    return planner.plan_tables([TABLE]), planner.report


@pytest.mark.parametrize(
    ("asked", "value", "provenance"),
    [
        ("priced", 80, {"price": 1.0, "phases": ["forward"], "label": "plain"}),
        ("priced:price=5e6", 400e6, {"price": 5e6, "phases": ["forward"], "label": "plain"}),
        (
            'priced:price=2, phases=["a","b"], label=x=y',
            320,
            {"price": 2, "phases": ["a", "b"], "label": "x=y"},
        ),
    ],
)
def test_name_with_arguments_makes_the_part_with_them(asked, value, provenance):
    plan, report = planned(estimator=asked)
    assert report.result.plan.value_ms == pytest.approx(value)
    inputs = plan.document["inputs"]
    assert inputs["estimator"] == {"value": asked, "provenance": "given"}
    assert {name: inputs[f"priced.{name}"]["value"] for name in provenance} == provenance
    assert f"time by {asked!r}" in str(report)


def test_arguments_stand_in_the_document_and_hold_for_what_reads_it():
    plan, _ = planned(estimator="priced:price=3")
    again = ShardingPlan.from_json(plan.to_json())
    assert check_plan(again).problems == []
    assert explain_table(again, "t").chosen.total_ms == pytest.approx(240)
    document = json.loads(plan.to_json())
    document["inputs"]["estimator"]["value"] = "priced"
    (problem,) = check_plan(ShardingPlan.from_json(json.dumps(document))).problems[:1]
    assert "the shards' costs add up to 80" in problem


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (
            {"estimator": "priced:prise=3"},
            r"estimator 'priced' .* cannot be made with prise=3: got an unexpected keyword argument 'prise'\. "
            r"It takes: price, phases, label\. Did you mean 'price'\?",
        ),
        ({"estimator": "priced:price=-1"}, r"cannot be made with price=-1: a price of -1"),
        (
            {"estimator": "priced:price"},
            r"arguments are given as priced:key=value,key=value, each once; got 'price'",
        ),
        ({"estimator": "priced:price=1,price=2"}, r"each once; got 'price=2'"),
        ({"estimator": "priced:"}, r"each once; got ''"),
        ({"estimator": "cells:a=1"}, r"estimator 'cells' .* cannot be made with a=1.*It takes: none"),
        ({"partitioner": "first_fit:a=1"}, r"partitioner 'first_fit' .* It takes: none"),
        (
            {"estimator": Cells},
            r"estimator is the class Cells; give the name of an estimator or an object: Cells\(\)",
        ),
        (
            {"estimator": 5},
            r"estimator must be an estimator or the name of one, got 5\. Known: cells, priced",
        ),
        ({"storage_estimator": EachAlone()}, r"storage_estimator must be an estimator or the name"),
        ({"storage_estimator": "cells"}, r"storage_estimator 'cells' measures performance, a storage"),
        ({"partitioner": FirstFit}, r"partitioner is the class FirstFit"),
        (
            {"partitioner": ["first_fit"]},
            r"partitioner must be a partitioner or the name of one, got \['first",
        ),
        ({"proposer": EachAlone}, r"proposer is the class EachAlone"),
        (
            {"proposer": iter([EachAlone()])},
            r"proposer must be a proposer or the name of one, got <list_iterator",
        ),
        ({"proposer": ["each_alone", None]}, r"proposer must be a proposer or the name of one, got None"),
        ({"proposer": []}, r"proposer is an empty list"),
        ({"option_space": 7}, r"option_space must be an OptionSpace or None, got 7"),
    ],
)
def test_part_that_cannot_be_is_an_error_that_says_why(parts, text):
    with pytest.raises(InvalidInputError, match=text):
        planned(**parts)

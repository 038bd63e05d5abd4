"""Proofs by the prices of patterns that part the plans by the options of tables."""

from __future__ import annotations

import json
from unittest.mock import patch

import attrs
import numpy as np

from shardwright.planning.constraints import Constraints
from shardwright.planning.enumeration import enumerate_options
from shardwright.planning.pattern_cases import PatternCases
from shardwright.planning.proof import why_unproven
from shardwright.planning.space import estimate_costs
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright.plugins import host


def space_of(rows, *, local, kib):
    topology = Topology(4, "cpu", ddr_cap=kib << 10, local_world_size=local)
    tables = [TableSpec(f"t{index}", count, 64, ["f"]) for index, count in enumerate(rows)]
    options = enumerate_options(tables, topology, Constraints(), host(), batch_size=64)
    create = host().estimators.create
    capacity = np.full((4, 1), kib << 10)
    return estimate_costs(options, topology, create("torchrec"), create("weights_and_buffers"), capacity)


def test_pattern_cases_of_few_tables_prove_more_by_the_options_they_take():
    rows, value_ms = [10111, 8898, 10463, 711, 49], 0.4118
    bounds = []
    for few in (0, 64):
        space = space_of(rows, local=4, kib=2372)
        with patch("shardwright.planning.pattern_cases._FEW_TABLES", few):
            PatternCases(space.prover, value_ms).sharpen()
        bounds.append(space.prover.bound_ms)
        certificate = json.loads(json.dumps(space.prover.certificate.to_data()))
        assert why_unproven(space, space.prover.bound_ms, certificate) == ""
    assert '"table"' in json.dumps(certificate)
    assert bounds[1] > 1.005 * bounds[0]


def test_pattern_cases_by_options_end_when_time_is_over():
    space = space_of([10111, 8898, 10463, 711, 49], local=4, kib=2372)
    before = space.prover.bound_ms
    late = attrs.evolve(space, watch=attrs.evolve(space.watch, seconds=0.0))
    PatternCases(late.prover, 0.4118).sharpen()
    assert late.prover.bound_ms == before

"""Proofs by the prices of patterns that part the plans by the options of tables."""

from __future__ import annotations

import json
from unittest.mock import patch

import attrs
from tests.plugins.proposers.spaces import costed

from shardwright.planning.pattern_cases import PatternCases
from shardwright.planning.proof import why_unproven
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright.planning.watch import Watch

# About what the best plan takes.
VALUE_MS = 0.4118


def five_tables():
    """Three of which no rank holds more than one, and two small ones."""
    tables = [TableSpec(f"t{rows}", rows, 64, ["f"]) for rows in (10111, 8898, 10463, 711, 49)]
    return costed(tables, Topology(4, "cpu", ddr_cap=2372 << 10))


def test_pattern_cases_of_few_tables_prove_more_by_the_options_they_take():
    bounds = []
    for few in (0, 64):
        space = five_tables()
        with patch("shardwright.planning.pattern_cases._FEW_TABLES", few):
            PatternCases(space.prover, VALUE_MS).sharpen()
        bounds.append(space.prover.bound_ms)
        certificate = json.loads(json.dumps(space.prover.certificate.to_data()))
        assert why_unproven(space, space.prover.bound_ms, certificate) == ""
    assert '"table"' in json.dumps(certificate)
    assert bounds[1] > 1.005 * bounds[0]


def test_pattern_cases_by_options_end_when_time_is_over():
    late = attrs.evolve(five_tables(), watch=Watch(0.0))
    before = late.prover.bound_ms
    PatternCases(late.prover, VALUE_MS).sharpen()
    assert late.prover.bound_ms == before

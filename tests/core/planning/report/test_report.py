from __future__ import annotations

import pytest

import shardwright as sw
from shardwright import EmbeddingShardingPlanner, OptimizerSpec, ParameterConstraints, TableSpec, Topology
from shardwright.planning.plan.sharding import ranks_text
from shardwright.planning.report.report import writer_of
from shardwright.planning.text import bytes_text


def lines_of(tables, **arguments):
    planner = EmbeddingShardingPlanner(Topology(2, "cpu", ddr_cap=1000), storage_reservation=0.0, **arguments)
    planner.plan_tables(tables)
    return [" ".join(line.split()) for line in str(planner.report).splitlines()]


def test_report_rows_of_ranks_tables_and_kernels():
    rule = ParameterConstraints(sharding_types=["slices"], compute_kernels=["plain"])
    lines = lines_of([TableSpec("t", 10, 8, ["f"])], batch_size=1000, constraints={"t": rule})
    # 5 rows x 8 columns x 4 bytes; 1000 ids on each of 2 ranks, half to each shard, 3 ms per 1000 cells. Only the half
    # of the bags that have ids there comes home: 1000 x 8 columns x 4 bytes.
    assert "0 | 160 B (16%) | 120 | 0.01 | 0.03 | SL: 1" in lines
    assert "1 | 160 B (16%) | 120 | 0.01 | 0.03 | SL: 1" in lines
    assert "t | SL (slices, range) | plain | 240 | 0-1" in lines
    assert "compute kernels: plain: 1" in lines
    assert "largest_rank_time: 120 ms" in lines


def test_report_memory_and_shards_of_each_rank_are_those_of_the_plans_blocks():
    rule = ParameterConstraints(sharding_types=["whole"], compute_kernels=["plain"])
    tables = [TableSpec(f"t{rows}", rows, 8, ["f"]) for rows in (3, 10, 14)]
    planner = EmbeddingShardingPlanner(
        Topology(2, "cpu", ddr_cap=1000), storage_reservation=0.0, constraints={"*": rule}
    )
    made = planner.plan_tables(tables)
    weights, shards = [0, 0], [0, 0]
    for sharding in made.plan[""].values():
        for block in sharding.layout.blocks:
            weights[block.rank] += 4 * block.num_rows * block.num_columns
            shards[block.rank] += 1
    ranks = planner.report.to_data()["ranks"]
    assert weights[0] != weights[1]
    assert [rank["used_bytes"] for rank in ranks] == [{"ddr": size} for size in weights]
    assert [sum(rank["num_shards"].values()) for rank in ranks] == shards
    for rank in ranks:
        expected = {"used_bytes": rank["used_bytes"], "time_ms": pytest.approx(rank["time_ms"])}
        assert rank["types"] == ({"whole": expected} if rank["time_ms"] else {})


def test_report_in_an_unknown_format_names_the_known_ones():
    with pytest.raises(
        sw.UnknownPluginError, match=r"no report 'jso'. Known: json, txt. Did you mean 'json'"
    ):
        writer_of("jso")


def test_report_says_which_kernel_was_refused_and_which_taken_instead():
    adam = OptimizerSpec("adam")
    lines = lines_of(
        [TableSpec("t", 10, 8, ["f"], optimizer=adam), TableSpec("u", 10, 8, ["g"], optimizer=adam)]
    )
    assert (
        "compute kernel 'plain' refused for 2 tables ('t', ...): plain knows no adam; 'thorough' taken"
        in lines
    )


def test_report_assumptions_have_units():
    planner = EmbeddingShardingPlanner(Topology(2, "cuda"))
    planner.plan_tables([TableSpec("t", 10, 8, ["f"])])
    lines = str(planner.report).splitlines()
    assert "  hbm_cap = 32.0 GiB (TorchRec 1.8 default)" in lines
    assert "  hbm_mem_bw = 897.0 GiB/s (TorchRec 1.8 default)" in lines


def test_report_lists_what_was_assumed_and_only_that():
    lines = lines_of([TableSpec("t", 10, 8, ["f"])], batch_size=7)
    assumed = [
        line for line in lines if line.startswith(("batch_size", "ddr_mem_bw", "ddr_cap", "pooling_factors"))
    ]
    assert [line.split(" = ")[0] for line in assumed] == ["ddr_mem_bw", "pooling_factors"]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")]
)
def test_bytes_text(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([1, 0], "1,0"), ([2, 2], "2,2"), ([1, 3], "1,3")]
)
def test_ranks_text(ranks, text):
    assert ranks_text(ranks) == text

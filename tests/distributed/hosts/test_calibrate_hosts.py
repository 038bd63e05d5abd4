"""Calibrations over the ranks of a running job, on two hosts that only the launcher's variable tells apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.hosts import calibrate_workers

from shardwright.planning.machines.topology import Topology
from shardwright_plugins.estimators.engine.machine import Machine
from shardwright_plugins.launch import launch
from shardwright_testing.ranks import RankPool


def test_calibrate_over_hosts_measures_both_links_and_keeps_the_slowest(
    pool: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    results = pool.run(calibrate_workers.calibrate, 4, str(path), 2)
    assert [code for code, _ in results] == [0] * 4, results
    assert [bool(printed) for _, printed in results] == [True, False, False, False]
    machine = Machine.read(path)
    assert set(machine.topology) >= {"intra_host_bw", "inter_host_bw", "inter_host_latency_ms"}
    assert set(machine.unmeasured) == {"hbm_to_ddr_mem_bw"}
    made = machine.made
    assert (made["ranks"], made["hosts"]) == (4, 2)
    assert [(own["hosts"], own["speed"]) for own in made["classes"]] == [
        (1, 1.0),
        (1, pytest.approx(1 / calibrate_workers.SLOWER, abs=1e-3)),
    ]
    # Bytes over times of the slower host: 16 bags of 2 ids of 8 columns in two tables, and 8 of 3 of 16 in one.
    read = {16: 2 * 16 * 2 * 8 * 4, 8: 8 * 3 * 16 * 4}
    speeds = [num_bytes / (calibrate_workers.SLOWER * 0.001 * bags) for bags, num_bytes in read.items()]
    assert machine.topology["ddr_mem_bw"] in [pytest.approx(speed, rel=1e-3) for speed in speeds]
    topology = Topology.from_machine(path, 4, local_world_size=2)
    assert topology.link_bandwidths["inter_host"] == machine.topology["inter_host_bw"]
    # Constants are those of the slower host, of which the other is so many times as fast.
    ratio = pytest.approx(calibrate_workers.SLOWER, rel=5e-3)
    assert topology.speeds == (ratio, ratio, 1.0, 1.0)
    assert topology.provenance["speed"].origin == "measured"


@pytest.mark.slow  # processes of its own, which join the launcher's group and leave it
def test_calibrate_of_launched_ranks_on_a_host_each_measures_what_is_between_them(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    results = launch(calibrate_workers.calibrate, str(path), 1, ranks=2, timeout_s=200)
    assert [code for code, _ in results] == [0, 0], results
    machine = Machine.read(path)
    assert "inter_host_bw" in machine.topology
    assert machine.unmeasured.keys() == {"intra_host_bw", "hbm_to_ddr_mem_bw"}


def test_calibrate_of_another_number_of_ranks_than_the_job_has_is_refused(
    pool: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    for code, printed in pool.run(calibrate_workers.calibrate, 2, str(path), 2, "--ranks", "3"):
        assert code == 1
        assert "2 ranks" in printed
    assert not path.exists()


def test_calibrate_whose_result_rank_0_cannot_write_ends_with_that_error_on_every_rank(
    pool: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "missing" / "machine.json"
    results = pool.run(calibrate_workers.calibrate, 2, str(path), 2)
    assert [code for code, _ in results] == [1, 1]
    for _, printed in results:
        assert f"cannot write '{path}': there is no folder" in printed

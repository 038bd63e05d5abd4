"""Random inputs of the conformance kit: tables, ranks on hosts, and models with their batches.

Everything is drawn from a fixed seed, so that a test gives the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import NAMED_ONLY, KernelRequest
from shardwright.host.plugin_host import host
from shardwright.planning.machines.topology import Topology
from shardwright.planning.tables.data_types import DataType
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec
from shardwright_testing.equality.cases import BATCHES, Case, Table
from shardwright_testing.kernels.loops import OPTIMIZERS

_COMMON = settings(
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
LAWS = settings(_COMMON, max_examples=60)
"""Of laws that take no training; what breaks one is made as small as it goes."""

TRAININGS = settings(LAWS, max_examples=12, phases=(Phase.explicit, Phase.generate))
"""Of models that are trained: what breaks is told as it was drawn."""

FEATURES = ("a", "b", "c")


def run_drawn(check: Callable[[], None]) -> None:
    """Run a drawn test of something that may depend on chance, and tell what was wrong the first time.

    Hypothesis runs what failed again, and where it then passes says that the test is unreliable, not what failed.
    """
    try:
        check()
    except FlakyFailure as error:
        raise error.exceptions[0] from None


@frozen
class Cluster:
    """Numbers of hosts and of ranks on each."""

    num_hosts: int
    local_world_size: int

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_hosts * self.local_world_size

    @property
    def topology(self) -> Topology:
        """The ranks on hosts, on the CPU."""
        return Topology(self.world_size, "cpu", local_world_size=self.local_world_size)

    @classmethod
    def of(cls, case: Case) -> Cluster:
        """Return the cluster of a case."""
        local = case.local_world_size or case.world_size
        return cls(case.world_size // local, local)


def clusters(*, most_hosts: int = 3, most_local: int = 4) -> st.SearchStrategy[Cluster]:
    """Hosts with equally many ranks."""
    return st.builds(Cluster, st.integers(1, most_hosts), st.integers(1, most_local))


def table_specs(
    *, least_rows: int = 1, most_rows: int = 60, most_columns: int = 160
) -> st.SearchStrategy[TableSpec]:
    """Tables of any shape, fewer rows than ranks and columns that nothing divides among them."""
    return st.builds(
        TableSpec,
        st.just("t"),
        st.integers(least_rows, most_rows),
        st.integers(1, most_columns),
        st.just(("f",)),
    )


def plain_kernel(*, takes_any_id: bool = False) -> str:
    """The name of a kernel that takes any table on the CPU, so that nothing but the sharding type is tested.

    Args:
        takes_any_id: a kernel of keys, which takes any table whose columns are not cut.

    Raises:
        LookupError: none is installed.
    """
    kernels = {name: host().compute_kernels.create(name) for name in sorted(host().compute_kernels)}
    able = {
        name: kernel
        for name, kernel in kernels.items()
        if bool(kernel.row_state) == takes_any_id and _is_plain(kernel)
    }
    if not able:
        raise LookupError(
            f"none of the compute kernels ({', '.join(kernels) or 'none'}) runs {', '.join(OPTIMIZERS)} on any "
            f"table{' of any id' if takes_any_id else ''} on the CPU, so that there is nothing to train sharded tables "
            "with"
        )
    return min(able, key=lambda name: (able[name].preference, name))


def _is_plain(kernel: ComputeKernel) -> bool:
    """True if a kernel is taken unasked, needs no memory beside that of any device, and takes any table."""
    is_offered = kernel.preference != NAMED_ONLY and not kernel.further_tiers
    return kernel.fuses_optimizer and is_offered and _takes_any(kernel)


def _takes_any(kernel: ComputeKernel) -> bool:
    requests = [
        KernelRequest(
            "cpu",
            DataType.FP32,
            10,
            columns,
            is_pooled=pooled,
            optimizer=OptimizerSpec(name),
            on_this_machine=True,
        )
        for columns in ((10,) if kernel.row_state else (7, 10))
        for pooled in (True, False)
        for name in OPTIMIZERS
    ]
    return all(kernel.supports(request) is True for request in requests)


@st.composite
def training_cases(
    draw: st.DrawFn,
    sharding_types: Sequence[str],
    *,
    kernels: Sequence[str],
    mode: str,
    optimizers: Sequence[str] = OPTIMIZERS,
) -> Case:
    """Models with their ranks and batches: every kind of batch, in some order.

    Args:
        draw: Hypothesis's.
        sharding_types: names, of which each table has one.
        kernels: names, of which each table has one.
        mode: ``"pooled"``, ``"weighted"`` or ``"sequence"``.
        optimizers: names, of which the model has one.
    """
    cluster = draw(clusters(most_hosts=2, most_local=2))
    poolings = ["NONE"] if mode == "sequence" else ["SUM", "MEAN"]
    table = st.builds(
        Table,
        rows=st.integers(1, 20),
        dim=st.integers(1, 12),
        features=st.lists(st.sampled_from(FEATURES), min_size=1, max_size=2, unique=True).map(tuple),
        pooling=st.sampled_from(poolings),
        sharding_type=st.sampled_from(list(sharding_types)),
        kernel=st.sampled_from(list(kernels)),
        variant=st.integers(0, 3),
        offset=st.integers(0, 3),
    )
    size = st.integers(0, 4)
    return Case(
        draw(st.lists(table, min_size=1, max_size=3)),
        draw(st.lists(size, min_size=cluster.world_size, max_size=cluster.world_size)),
        draw(st.sampled_from(list(optimizers))),
        mode == "weighted",
        local_world_size=cluster.local_world_size,
        batches=tuple(draw(st.permutations(BATCHES))),
    )

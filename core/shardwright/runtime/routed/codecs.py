"""The codecs that results and gradients of each table travel by."""

from __future__ import annotations

from shardwright.contracts.codec import Codec
from shardwright.contracts.demands import refusal_of_sums
from shardwright.errors import UnknownPluginError, UnsupportedError
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.codecs import QCommsConfig
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.routed.plan import Codecs
from shardwright.runtime.step.executor import ExecutorConfig


def codecs_of_tables(config: ExecutorConfig) -> dict[int, Codecs]:
    """Choose the codecs of each table of an executor, by index: the plan's, or, where it names none, its sharder's.

    Raises:
        UnknownPluginError: a codec is not known; the text names the nearest.
        UnsupportedError: a table has partial sums, and its codec does not carry partial sums.
    """
    chosen = {}
    for index in config.members:
        table = config.collection.tables[index]
        sharding = config.shardings[table.name]
        chosen[index] = _config_of(table, sharding)
        _check_sums(table, sharding, chosen[index].forward)
    names = {name for own in chosen.values() for name in (own.forward_precision, own.backward_precision)}
    # One object a name: tables with the same codec share a group, and are encoded in one call.
    made = {name: QCommsConfig(forward_precision=name).forward for name in names}
    return {
        index: (made[own.forward_precision], made[own.backward_precision]) for index, own in chosen.items()
    }


def _config_of(table: TableSpec, sharding: ParameterSharding) -> QCommsConfig:
    config = (sharding.qcomms_config or QCommsConfig()).over(table.qcomms_config)
    try:
        return config.resolved()
    except UnknownPluginError as error:
        raise UnknownPluginError(f"the codecs of table {table.describe()}: {error}") from error


def _check_sums(table: TableSpec, sharding: ParameterSharding, codec: Codec | None) -> None:
    if refusal := refusal_of_sums(table, codec, cuts_rows=sharding.layout.cuts_rows):
        raise UnsupportedError(
            f"table {table.describe()} ({sharding.sharding_type}): {refusal}. Name another codec in "
            f"constraints[{table.name!r}].qcomms_config, or a sharding type that keeps its rows together",
            subject=table.path,
            asked="qcomms_config",
        )

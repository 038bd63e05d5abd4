"""The command `profile`, which reads Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.cli.plans import check_writable, write_text
from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.planning.options.inputs import BATCH_SIZE
from shardwright.planning.tables.workload import Workload
from shardwright.planning.text import count_text, json_text

_LEAST_STEPS = 2  # one says nothing of reuse


def profile(
    workload: Annotated[Path, typer.Argument(metavar="WORKLOAD", help="The tables, a JSON file.")],
    data: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE.parquet ...", help="Samples, in the order of training: a column a feature."
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Where the constraints are written, for plan --constraints.")
    ],
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a rank and step; the workload's own by default.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks whose batches make a step.")] = 1,
    batches: Annotated[int, typer.Option(min=_LEAST_STEPS, help="Most steps that are looked at.")] = 200,
    algorithm: Annotated[str, typer.Option(help="What caches evict: lru or lfu.")] = "lru",
) -> None:
    """Measure how a workload's tables are used: ids per bag, and how often a cache of any size would miss."""
    from shardwright_plugins.arrow import from_arrow
    from shardwright_plugins.profiles import Profile

    check_writable(output)
    loaded = Workload.read(workload)
    collected = Profile(loaded.tables, algorithm=algorithm)
    features = list(dict.fromkeys(name for table in loaded.tables for name in table.feature_names))
    samples = (batch or loaded.batch_size or BATCH_SIZE) * ranks
    for table in islice(_steps(data, features, samples), batches):
        collected.add(from_arrow(table, features))
    if collected.num_batches < _LEAST_STEPS:
        raise InvalidInputError(
            f"the files have {count_text(collected.num_batches, 'whole step')} of {count_text(samples, 'sample')}; a "
            f"profile needs {_LEAST_STEPS} at least: give more files, or a smaller --batch"
        )
    rules = collected.constraints()
    write_text(output, json_text({path: rule.to_data() for path, rule in rules.items()}) + "\n")
    typer.echo(
        f"{collected.num_batches} steps of {count_text(samples, 'sample')}, {count_text(len(rules), 'table')}"
    )
    for path, rule in rules.items():
        ids = ", ".join(f"{factor:.4g}" for factor in rule.pooling_factors or ())
        stats = rule.cache_params.stats if rule.cache_params else None
        typer.echo(f"{path}: {ids} ids per bag, {stats.expected_lookups if stats else 0:,.0f} rows a step")


def _steps(files: Sequence[Path], features: Sequence[str], samples: int) -> Iterator[Any]:
    """Yield Arrow tables of so many rows each, across the ends of files; what is left over at the end is left out.

    Raises:
        UnsupportedError: pyarrow is not installed.
        InvalidInputError: a file is no Parquet file.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError(
            "shardwright profile needs pyarrow, which cannot be imported: pip install pyarrow"
        ) from error
    waiting: list[Any] = []
    for path in files:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                is_complete = set(features) <= set(file.schema_arrow.names)
                for batch in file.iter_batches(samples, columns=features if is_complete else None):
                    waiting.append(batch)
                    if sum(map(len, waiting)) >= samples:
                        table = pyarrow.Table.from_batches(waiting)
                        yield table.slice(0, samples)
                        waiting = table.slice(samples).to_batches()
        except (OSError, pyarrow.ArrowException) as error:
            raise InvalidInputError(f"{path} cannot be read as Parquet: {error}") from error

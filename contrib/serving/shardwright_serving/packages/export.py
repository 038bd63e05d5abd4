"""Export of a trained model for serving.

Legend: F features, B samples, N ids of all features, K ids of a table that have rows.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from shardwright import (
    CheckpointError,
    DataType,
    DistributedModelParallel,
    InvalidInputError,
    ShardingPlan,
    UnknownNameError,
    UnsupportedError,
    __version__,
    save_checkpoint,
)
from shardwright_serving.packages.checking import check_package, traced_inputs
from shardwright_serving.packages.inputs import check_ids
from shardwright_serving.packages.loading import map_rows
from shardwright_serving.packages.manifest import (
    FILES,
    MANIFEST,
    ROWS,
    Dense,
    Feature,
    Manifest,
    Output,
    Place,
)
from shardwright_serving.packages.program import Inputs, Rows, ServingProgram, without_tables
from shardwright_serving.packages.programs import check_forms, exported, writers
from shardwright_serving.packages.rows_file import Blocks, Progress, TableRows, laid_out, write_rows
from shardwright_serving.packages.served import Served, ShardedCollection, served_in, tables_of
from shardwright_serving.packages.stored_tables import StoredTables


def export_for_inference(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    precision: DataType | str = DataType.INT8,
    per_table: Mapping[str, DataType | str] | None = None,
    plan: ShardingPlan | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    forms: Sequence[str] = tuple(FILES),
    check: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Write a trained model as a package for serving on CPUs: quantized tables, and programs that torch alone runs.

    Tables are read and quantized block by block, from the model or from a checkpoint: there is never more than a block
    of them as float beside the model. Of a sharded model every rank makes this call; its tables pass through a
    temporary checkpoint beside the package, which rank 0 writes while the others return.

    The package is a folder, complete from the moment that it has its name: ``rows.bin`` with the rows of all tables,
    which programs map; a program as `torch.export` saves it, compiled by AOTInductor (``pt2``), and in TorchScript; and
    ``package.json``, which names inputs and outputs. A program takes ``values [N]`` and ``lengths [F * B]`` (int64,
    features one after the other), ``weights [N]`` if ids carry weights, ``dense [B, columns]`` if the model takes one,
    and the bytes of ``rows.bin``; any B and N.

    Args:
        model: the model, unsharded or sharded, its collections float or quantized; with a checkpoint it may be on
            ``meta``.
        example: a batch: a `KeyedJaggedTensor`, or the model's arguments as a tuple, or by name as a mapping, of which
            one is a `KeyedJaggedTensor` and at most one a dense tensor ``[B, columns]``.
        path: folder of the package, which is made.
        precision: precision of float tables: INT8, INT4, INT2, FP8 or FP16.
        per_table: name of a table -> another precision.
        plan: plan for serving, whose tables get the ``data_type`` that they were planned with; ``per_table`` goes
            before it, and ``precision`` is that of tables which it leaves out. Its shards have no meaning here: one
            process serves a package.
        checkpoint: a checkpoint of the model, or a folder of them, from which all weights are taken.
        forms: forms of the program to write: ``"exported"``, ``"pt2"`` (needs a C++ compiler) and ``"torchscript"``.
        check: load each form in a fresh process and compare it with the model, on drawn batches.
        progress: function called with the bytes of rows written so far, and with those of all.

    Returns:
        The folder.

    Raises:
        InvalidInputError: an argument is wrong, the folder is there already, or the model is on ``meta`` without a
            checkpoint.
        UnknownNameError: the example lacks a feature, or ``per_table`` or the plan names no table.
        PlanError: the plan's document is malformed.
        UnsupportedError: torch cannot export the model or compile it, quantized tables are cut over ranks, or the
            package failed its check.
        CheckpointError: the checkpoint cannot be read, or is of another model; or the package cannot be written.

    Example:
        >>> import tempfile, torch, shardwright as sw, shardwright_serving as serving
        >>> table = sw.EmbeddingBagConfig(
        ...     name="item", num_embeddings=100, embedding_dim=8, feature_names=["seen"],
        ...     init_fn=torch.nn.init.ones_,
        ... )
        >>> model = sw.EmbeddingBagCollection([table])
        >>> batch = sw.KeyedJaggedTensor.from_lists({"seen": [[3, 1], [7], []]})
        >>> folder = serving.export_for_inference(
        ...     model, batch, tempfile.mkdtemp() + "/package", forms=["torchscript"], check=False
        ... )
        >>> serving.load_package(folder).predict(batch)["values"][:, :2]
        tensor([[2., 2.],
                [1., 1.],
                [0., 0.]])
    """
    check_forms(forms)
    target = _free(Path(path))
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"the model is a torch module, got {type(model).__name__}")
    root = model.module if isinstance(model, DistributedModelParallel) else model
    export = _Export.of(root, example, precision, per_table or {}, plan)
    with _stored(model, target, checkpoint) as stored:
        if _rank_of(model) == 0:
            export.check(stored)
            with _complete(target) as folder:
                manifest, program = export.write(folder, stored, forms, progress)
                if check:
                    rows = map_rows(folder / ROWS)
                    check_package(
                        folder, manifest, lambda *inputs: program(*inputs, rows), export.known_ids()
                    )
    return target


@frozen(eq=False)
class _Export:
    """A model that is exported.

    Args:
        model: the model, without the wrapper of a sharded one.
        inputs: its arguments.
        served: its collections by path.
        tables: their tables by path, with their places in the file.
    """

    model: nn.Module
    inputs: Inputs
    served: Mapping[str, Served]
    tables: Mapping[str, Sequence[TableRows]]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example: Any,
        precision: DataType | str,
        per_table: Mapping[str, DataType | str],
        plan: ShardingPlan | None,
    ) -> _Export:
        """Read what is exported from a model and an example, both checked."""
        served = served_in(model)
        inputs = Inputs.of(model, example)
        _check_features(inputs.keys, served)
        tables = tables_of(served, precision, per_table, plan)
        placed = iter(laid_out(list(chain.from_iterable(tables.values()))))
        return cls(model, inputs, served, {path: [next(placed) for _ in own] for path, own in tables.items()})

    def check(self, stored: StoredTables | None) -> None:
        """Check that there are weights to export.

        Raises:
            InvalidInputError: there are none.
        """
        dense = [name for name, value in _tensors(self._without_tables(Rows())) if value.is_meta]
        tables = [path or "the collection" for path, one in self.served.items() if not one.has_rows]
        if stored is None and (dense or tables):
            is_cut = any(isinstance(one.module, ShardedCollection) for one in self.served.values())
            around = "the DistributedModelParallel around it, or " if is_cut else ""
            raise InvalidInputError(
                f"{', '.join([*tables, *dense][:3])} of the model has no weights here: give {around}checkpoint="
            )

    def write(
        self, folder: Path, stored: StoredTables | None, forms: Sequence[str], progress: Progress | None
    ) -> tuple[Manifest, ServingProgram]:
        """Write the package; gives its manifest, and the program for comparison."""
        places = [(path, table) for path, own in self.tables.items() for table in own]
        checksum = write_rows(
            folder / ROWS,
            [table for _, table in places],
            lambda position: self._blocks(*places[position], stored),
            progress,
        )
        rows = map_rows(folder / ROWS)
        program = self._program(stored)
        manifest = self._manifest(program, rows, forms)
        traced = dict(zip(self.inputs.example, traced_inputs(manifest), strict=True))
        made = exported(program, traced, rows, len(self.inputs.keys))
        manifest = evolve(manifest, version=_version(checksum, manifest, made))
        for form in forms:
            writers[form](made, folder / FILES[form])
        (folder / MANIFEST).write_text(manifest.to_json())
        return manifest, program

    def _blocks(self, path: str, table: TableRows, stored: StoredTables | None) -> Blocks:
        served = self.served[path]
        if stored is None:
            return served.blocks(table)
        return stored.blocks(table, ".".join(filter(None, (path, served.weight_name(table.name)))))

    def _without_tables(self, rows: Rows) -> nn.Module:
        return without_tables(self.model, self.served, self.tables, rows)

    def _program(self, stored: StoredTables | None) -> ServingProgram:
        rows = Rows()
        model = self._without_tables(rows)
        model = model.cpu() if stored is None else stored.load_dense(model)
        lost = [name for name, value in _tensors(model) if value.is_meta]
        if lost:
            raise UnsupportedError(
                f"{', '.join(map(repr, lost[:3]))} of the model is on 'meta' and in no state dict: make it on the CPU"
            )
        return ServingProgram(model, self.inputs, rows).eval()

    def _manifest(self, program: ServingProgram, rows: Tensor, forms: Sequence[str]) -> Manifest:
        """Describe the package, without its version."""
        example = self.inputs.example
        features = [
            Feature(key, self._num_embeddings(key), self.inputs.is_weighted) for key in self.inputs.keys
        ]
        check_ids(features, example["values"], example["lengths"])
        with torch.no_grad():
            outputs = program.named_outputs(*example.values(), rows)
        num_samples = len(example["lengths"]) // len(self.inputs.keys)
        _check_outputs(outputs, num_samples)
        dense = example.get("dense")
        return Manifest(
            programs={form: FILES[form] for form in forms},
            tables=ROWS,
            features=tuple(features),
            dense=None if dense is None else Dense(self.inputs.dense_name, dense.shape[1]),
            outputs=tuple(Output(name, (None, *value.shape[1:])) for name, value in outputs.items()),
            version="",
            rows_bytes=rows.numel(),
            precision={table.name: table.data_type.value for own in self.tables.values() for table in own},
            places={
                ".".join(filter(None, (path, table.name))): Place(
                    table.start, table.num_embeddings, table.embedding_dim, table.data_type.value
                )
                for path, own in self.tables.items()
                for table in own
                if self.served[path].known_ids(table.name) is None
            },
            created_with={"shardwright": __version__, "torch": str(torch.__version__)},
        )

    def known_ids(self) -> dict[str, Tensor]:
        """Feature whose table has rows of some ids alone -> these, ``[K]`` int64."""
        return {
            feature: ids
            for one in self.served.values()
            for config in one.configs
            if (ids := one.known_ids(config.name)) is not None
            for feature in config.feature_names
        }

    def _num_embeddings(self, feature: str) -> int | None:
        """Rows of the smallest table of a feature; ``None`` if it has no table, or one that takes any id."""
        sizes = [
            config.num_embeddings
            for one in self.served.values()
            for config in one.configs
            if feature in config.feature_names and one.known_ids(config.name) is None
        ]
        return min(sizes, default=None)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _check_features(keys: Sequence[str], served: Mapping[str, Served]) -> None:
    """Check that a collection finds its features in the example; one that finds none gets batches that the model makes.

    Raises:
        UnknownNameError: it finds some, or no collection finds any.
    """
    wanted = {
        path: [name for own in one.configs for name in own.feature_names] for path, one in served.items()
    }
    is_read = {path: not set(keys).isdisjoint(names) for path, names in wanted.items()}
    for path, one in served.items():
        for config in one.configs if is_read[path] or not any(is_read.values()) else ():
            for name in config.feature_names:
                if name not in keys:
                    raise UnknownNameError(
                        f"feature {name!r} of table {config.name!r} is not in the example, which has {', '.join(keys)}"
                    )


def _check_outputs(outputs: Mapping[str, Tensor], num_samples: int) -> None:
    if not outputs:
        raise UnsupportedError("the model has no output; packages have outputs with a row a sample")
    for name, value in outputs.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (num_samples,):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UnsupportedError(
                f"the model's output {name!r} is {shape} for {num_samples} samples; packages have outputs with a row a "
                "sample. Pool sequences in the model"
            )


def _version(rows: str, manifest: Manifest, program: torch.export.ExportedProgram) -> str:
    """A checksum of all that predictions and requests depend on.

    Args:
        rows: checksum of the rows.
        manifest: description of inputs and outputs. Which forms there are, and what made them, is left out.
        program: operators, other weights and constants.
    """
    told = evolve(manifest, programs={}, tables=None, places={}, created_with={}).to_json()
    made = hashlib.sha256("\0".join((rows, told, program.graph_module.code)).encode())
    weights = {**program.state_dict, **program.constants}
    for name, value in sorted(weights.items()):
        made.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        made.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


def _rank_of(model: nn.Module) -> int:
    return model.env.everyone.rank if isinstance(model, DistributedModelParallel) else 0


def _free(target: Path) -> Path:
    if target.exists():
        raise InvalidInputError(f"{target} is there already: give a package a folder of its own")
    above = _above(target)
    if not above.is_dir():
        raise InvalidInputError(f"there can be no package {target}: {above} is a file (Not a directory)")
    if not os.access(above, os.W_OK):
        raise InvalidInputError(f"there can be no package {target}: {above} cannot be written to")
    return target


def _above(target: Path) -> Path:
    """The innermost folder around a package that is there."""
    return next(parent for parent in target.absolute().parents if parent.exists())


@contextmanager
def _stored(
    model: nn.Module, target: Path, checkpoint: str | os.PathLike[str] | None
) -> Iterator[StoredTables | None]:
    """A context with the checkpoint from which weights are taken: that of a sharded model is temporary."""
    if checkpoint is not None or not isinstance(model, DistributedModelParallel):
        yield None if checkpoint is None else StoredTables(Path(checkpoint))
        return
    # Folders above the package are made when all checks are done, so it stands in the first that is there.
    above = _above(target)
    folder = _beside(above / ".".join(target.absolute().relative_to(above).parts), "weights")
    save_checkpoint(folder, model)
    if _rank_of(model):
        yield None
        return
    try:
        yield StoredTables(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _complete(target: Path) -> Iterator[Path]:
    """A context with a folder that gets the package's name at its end, unless it fails."""
    folder = _beside(target, "exporting")
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    new = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True)
        yield folder
        folder.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}", subject=str(target)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # they hold the package
            for parent in new:
                parent.rmdir()


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")

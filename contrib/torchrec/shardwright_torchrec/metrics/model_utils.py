"""Labels, predictions and weights of tasks in a model's output.

Legend: N samples of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardwright_torchrec.metrics.config import RecTaskInfo
from shardwright_torchrec.metrics.rec_metric import RecMetricException

__all__ = ["parse_task_model_outputs"]

ByTask = dict[str, Tensor]


def parse_task_model_outputs(
    tasks: Sequence[RecTaskInfo],
    model_out: Mapping[str, Tensor],
    required_inputs_list: Sequence[str] | None = None,
) -> tuple[ByTask, ByTask, ByTask, dict[str, Tensor]]:
    """Tensors of each task ``[N]``, by the names that tasks say.

    Args:
        tasks: the tasks.
        model_out: tensors by name.
        required_inputs_list: names of further tensors that metrics need.

    Returns:
        Labels, predictions and weights by task, and the further tensors by name.

    Raises:
        InvalidInputError: a tensor is missing, or a task's have different sizes.
    """
    found: dict[str, ByTask] = {"labels": {}, "predictions": {}, "weights": {}}
    for task in tasks:
        for kind, value in _samples(task, model_out).items():
            found[kind][task.name] = value
    needed = {name: _named(model_out, name) for name in required_inputs_list or ()}
    return found["labels"], found["predictions"], found["weights"], needed


def _named(model_out: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in model_out:
        raise RecMetricException(f"the model's output has no {name!r}, only {sorted(model_out)}")
    return model_out[name].reshape(-1)


def _samples(task: RecTaskInfo, model_out: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A task's labels and predictions, and weights if it has them: ``[N]`` each."""
    names = {"labels": task.label_name, "predictions": task.prediction_name, "weights": task.weight_name}
    found = {kind: _named(model_out, name) for kind, name in names.items() if name}
    sizes = {names[kind]: len(value) for kind, value in found.items()}
    if len(set(sizes.values())) > 1:
        raise RecMetricException(f"task {task.name!r} has tensors of different sizes: {sizes}")
    return found

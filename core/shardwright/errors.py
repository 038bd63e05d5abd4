"""Every error that shardwright raises on purpose.

Each class is a `ShardwrightError` and also the builtin that fits, so that a caller may catch either. A text
says what was asked, why not, the numbers, what is possible and what to do. Programs read the attributes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "CheckpointError",
    "DistributedError",
    "DuplicateNameError",
    "IdRangeError",
    "InvalidInputError",
    "NameNotLoadedError",
    "NoPlanError",
    "PlanError",
    "PlanningError",
    "PluginLoadError",
    "PluginMismatchError",
    "ShardwrightError",
    "UnknownNameError",
    "UnknownPluginError",
    "UnsupportedError",
    "nearest",
]


class ShardwrightError(Exception):
    """The base of all errors of shardwright.

    Args:
        args: the text.
        subject: name of the table, feature, file or argument that it is about; ``None`` if it is about none.
        asked: request to the subject, as plain data: a name, a number, a list.
        possible: names that could have been asked instead; none where they are no list.

    Attributes:
        subject: see above.
        asked: see above.
        possible: see above.

    Example:
        >>> import shardwright as sw
        >>> planner = sw.EmbeddingShardingPlanner(
        ...     sw.Topology(2, "cuda"), constraints={"itme": sw.ParameterConstraints(ranks=0)}
        ... )
        >>> try:
        ...     planner.plan_tables([sw.TableSpec("item", 100, 8, ["item"])])
        ... except sw.ShardwrightError as error:
        ...     print(type(error).__name__)
        UnknownNameError
    """

    def __init__(
        self, *args: object, subject: str | None = None, asked: Any = None, possible: Iterable[str] = ()
    ) -> None:
        super().__init__(*args)
        self.subject, self.asked, self.possible = subject, asked, tuple(possible)

    @property
    def facts(self) -> Mapping[str, Any]:
        """The attributes by name, for an error that is raised instead of this one."""
        return {"subject": self.subject, "asked": self.asked, "possible": self.possible}


class InvalidInputError(ShardwrightError, ValueError):
    """A value given by the caller is wrong.

    Example:
        >>> import shardwright as sw
        >>> try:
        ...     sw.EmbeddingBagConfig(100, -8, "item")
        ... except sw.InvalidInputError as error:
        ...     print(isinstance(error, ValueError))
        True
    """


class IdRangeError(InvalidInputError, IndexError):
    """An id of a batch is no row of its table.

    Example:
        >>> import shardwright as sw
        >>> bags = sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])])
        >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
        >>> try:
        ...     model(sw.KeyedJaggedTensor.from_lists({"item": [[100]]}))
        ... except sw.IdRangeError as error:
        ...     print("the id 100" in str(error))
        True
    """


class UnknownNameError(ShardwrightError, KeyError):
    """A name (of a table, a feature, a key, ...) is not known."""

    __str__ = Exception.__str__  # a `KeyError` prints its text in quotes


class UnknownPluginError(UnknownNameError):
    """No loaded plugin offers something under this name.

    Example:
        >>> import shardwright as sw
        >>> try:
        ...     sw.EmbeddingShardingPlanner(sw.Topology(2, "cuda"), estimator="rofline")
        ... except sw.UnknownPluginError as error:
        ...     print("roofline" in str(error))
        True
    """


class NameNotLoadedError(UnknownPluginError, AttributeError):
    """A public name of `shardwright` comes from a plugin that is not loaded, so that the module has no such attribute.

    ``from shardwright import NAME`` says only that the name cannot be imported: Python drops the reason. That of
    ``shardwright.NAME`` says which plugin is off, or failed and why, as `shardwright plugins` does.

    Example:
        >>> import shardwright as sw
        >>> issubclass(sw.NameNotLoadedError, AttributeError)  # so that hasattr() is False
        True
    """


class DuplicateNameError(ShardwrightError, ValueError):
    """Two different things claim one name."""


class PluginLoadError(ShardwrightError, RuntimeError):
    """A plugin could not be loaded, or what it offers does not fulfil its contract."""


class PluginMismatchError(ShardwrightError, RuntimeError):
    """The ranks of one job have different plugins."""


class PlanError(ShardwrightError, ValueError):
    """A plan document is malformed, or does not fit the module or the topology it is used with.

    Example:
        >>> import shardwright as sw
        >>> try:
        ...     sw.ShardingPlan.from_json("{}")
        ... except sw.PlanError as error:
        ...     print(isinstance(error, ValueError))
        True
    """


class PlanningError(ShardwrightError, RuntimeError):
    """Planning could not be carried out."""


class NoPlanError(PlanningError):
    """No plan was found within the memory and the constraints given.

    Example:
        >>> import shardwright as sw
        >>> topology = sw.Topology(2, "cuda", hbm_cap=1 << 20, ddr_cap=1 << 20)
        >>> planner = sw.EmbeddingShardingPlanner(topology, batch_size=64)
        >>> try:
        ...     planner.plan_tables([sw.TableSpec("user", 1_000_000, 64, ["user"])])
        ... except sw.NoPlanError as error:
        ...     print(type(error).__name__)
        NoPlanError
    """


class UnsupportedError(ShardwrightError, NotImplementedError):
    """The combination asked for is not supported (here, or yet)."""


class CheckpointError(ShardwrightError, RuntimeError):
    """A checkpoint cannot be written or read, is damaged, or does not fit the model.

    Example:
        >>> import shardwright as sw
        >>> bags = sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])])
        >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
        >>> try:
        ...     sw.load_checkpoint("no_such_folder", model)
        ... except sw.CheckpointError as error:
        ...     print("no_such_folder" in str(error))
        True
    """


class DistributedError(ShardwrightError, RuntimeError):
    """Something went wrong on, or between, the ranks of a job."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error text: `" Did you mean 'weight'?"`, or nothing if no known name is near.

    Args:
        name: What was asked for.
        known: What would have been possible, in any order.

    Returns:
        A sentence with a leading space, or the empty string.
    """
    matches = difflib.get_close_matches(name, sorted(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""

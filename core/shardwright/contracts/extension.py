"""The contract of an extension, which a plugin adds at a point of the program, and of what is used at some points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from attrs import field, frozen
from attrs.validators import in_


class Extension(ABC):
    """Something that a plugin adds at a point, such as a command of the `shardwright` program.

    ``name`` is the point, a colon and a word of the plugin's: ``command:demo``. ``load`` is called when the extension
    is used, and then only: imports belong there. What it must return depends on the point; `shardwright docs extension`
    lists them. A point is any word: plugins may have their own.
    """

    name: ClassVar[str]
    api: ClassVar[int] = 1
    aliases: ClassVar[tuple[str, ...]] = ()
    help: ClassVar[str] = ""
    """One line for lists, such as `shardwright --help`: what it does. Commands need it."""

    @abstractmethod
    def load(self) -> Callable[..., Any]:
        """Import what is called at the point."""


@frozen
class Finding:
    """One thing that a check of the installation looked at: what an extension at the point ``check`` yields.

    Attributes:
        part: area of the installation that it belongs to.
        name: name of the package, plugin or setting.
        found: version, number or value.
        state: `ok`; `absent` or `off`, which is no fault; or `broken`.
        reason: why it is not `ok`, or what is to be known of it.
        command: command that would mend it, or bring it; empty for none.
    """

    part: str
    name: str
    found: str = ""
    state: str = field(default="ok", validator=in_(("ok", "absent", "off", "broken")))
    reason: str = ""
    command: str = ""


@frozen(eq=False)
class TrainedCollection:
    """A sharded collection, as listeners know it: the same object in all of its events.

    Args:
        updated_in_backward: description of a table that is updated in each backward pass; empty if none is.
        adds_up: two updates from one forward pass equal one by the sum of their gradients.
        updated_in_step: descriptions of the tables that are updated in the optimizer's step.
        has_gradients: function that tells if gradients are kept for that now.
        limited: description of a table whose gradients are clipped in the backward pass; empty if none is.
        device_type: type of the device of its tables.
    """

    updated_in_backward: str
    adds_up: bool
    updated_in_step: Sequence[str]
    has_gradients: Callable[[], bool]
    limited: str = ""
    device_type: str = "cpu"


class StepListener:
    """Something that is told of training steps: what an extension at the point ``step`` makes.

    Every method does nothing by default. It is called on each rank, between two lines of the user's loop, and what it
    raises comes out there. Other ranks may be elsewhere: no method may wait for them.
    """

    def has_model(self, model: Any, collections: Sequence[TrainedCollection]) -> None:
        """Hear that a ``DistributedModelParallel`` was made."""

    def has_dense_part(self, wrapper: Any, module: Any, parameters: Sequence[Any]) -> None:
        """Hear that a ``DistributedDataParallel`` takes in a module with sharded tables.

        Args:
            wrapper: the ``DistributedDataParallel``, whose parameters are not averaged yet.
            module: module that it takes in.
            parameters: parameters whose gradients it averages.
        """

    def begins(self, collection: TrainedCollection, parameters: Sequence[tuple[str, Any, bool]]) -> None:
        """Hear that a lookup with gradients begins; what this raises comes out on all ranks.

        Args:
            collection: the collection.
            parameters: those that kernels update and those of frozen tables: description of the table, parameter, and
                whether it was trained when it was sharded.
        """

    def updates(self, collection: TrainedCollection, forward: Any) -> None:
        """Hear that gradients have come in a backward pass, and that the tables take them now.

        Args:
            collection: the collection.
            forward: the forward pass whose gradients they are; an object that can be referred to weakly.
        """

    def steps(self, collection: TrainedCollection) -> None:
        """Hear that the optimizer of the tables begins its step, before it applies what is kept."""

    def drops(self, collection: TrainedCollection) -> None:
        """Hear that gradients are set to zero by the optimizer of the tables."""


@frozen
class Resharded:
    """Outcome of a resharding: what an extension at the point ``method`` called ``reshard`` returns.

    Args:
        tables: paths of the tables that are sharded otherwise now.
        sent_bytes: rows that this rank sent to others.
        peak_bytes: memory that this rank needed beside what it had, as reckoned beforehand.
    """

    tables: tuple[str, ...] = ()
    sent_bytes: int = 0
    peak_bytes: int = 0

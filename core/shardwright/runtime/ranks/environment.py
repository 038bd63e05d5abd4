"""The ranks that share a model: their number, this rank's place, and their communicator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from attrs import field, frozen

from shardwright.arguments import brief
from shardwright.contracts.comm_backend import CommBackend, Communicator
from shardwright.errors import DistributedError, InvalidInputError, UnsupportedError
from shardwright.host.fingerprint import compare_fingerprints
from shardwright.host.plugin_host import host
from shardwright.planning.named_plugins import make_plugin
from shardwright.runtime.ranks.alone import LoneCommunicator
from shardwright.runtime.ranks.devices import with_index
from shardwright.runtime.ranks.group_ranks import GroupRanks
from shardwright.runtime.ranks.lockstep import Lockstep
from shardwright.runtime.ranks.together import LoneRank, Ranks, by_rank, check_alike

T = TypeVar("T")


@frozen
class ShardingEnv:
    """The ranks a module is sharded over, as one of them sees them.

    Args:
        communicator: communicator of these ranks.
        device_type: type of the devices whose tensors the communicator sends.
        process_group: process group behind it; ``None`` for one process alone, and for simulated ranks.
        local_world_size: number of ranks on this rank's host; all ranks unless the launcher says otherwise.
        lockstep: record of the calls that this rank makes, in order.
        all_ranks: environment of the ranks of all sharding groups, if these ranks are one group of several.
        headers: communicator that carries headers, if the other one does not.
        ranks: meetings of the ranks, beside their collectives.

    Example:
        >>> import shardwright as sw
        >>> env = sw.ShardingEnv.local(device_type="cpu")  # or from_process_group(), under torchrun
        >>> env.rank, env.world_size
        (0, 1)
    """

    communicator: Communicator = field(repr=False)
    device_type: str = "cpu"
    process_group: Any = field(default=None, repr=False)
    local_world_size: int = 1
    lockstep: Lockstep = field(factory=Lockstep, repr=False, eq=False)
    all_ranks: ShardingEnv | None = field(default=None, repr=False)
    headers: Communicator | None = field(default=None, repr=False)
    ranks: Ranks = field(factory=LoneRank, repr=False, eq=False)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.communicator.world_size

    @property
    def header_channel(self) -> tuple[Communicator, str]:
        """Communicator that carries headers, and the type of the devices whose memory it sends."""
        on_cpu = self.communicator.on_cpu()
        return (self.headers or self.communicator, self.device_type) if on_cpu is None else (on_cpu, "cpu")

    @classmethod
    def from_process_group(
        cls,
        process_group: Any = None,
        *,
        device_type: str | None = None,
        comm_backend: str | CommBackend | None = None,
    ) -> ShardingEnv:
        """Connect the ranks of a process group; every rank of it makes this call.

        All ranks compare their plugins, because a job whose ranks have different plugins would hang later. They also
        compare the number of ranks per host, because ranks that differ there would add up different sums.

        Args:
            process_group: the group; the world by default.
            device_type: ``"cpu"``, ``"cuda"``, ...; by default the accelerator if the group's backend and this
                machine have one, else the CPU.
            comm_backend: name of the comm backend, or the object, the same on every rank; by default the one with the
                name of the group's own backend.

        Raises:
            UnknownPluginError: no comm backend has that name.
            DistributedError: there is no process group, or this rank is not in it, or there is no comm backend for it;
                ranks differ in ``LOCAL_WORLD_SIZE``; or another rank failed in this call.
            PluginMismatchError: the ranks' plugins differ; every rank's error names the ranks and plugins.
        """
        if not dist.is_initialized():
            raise DistributedError(_NO_GROUP)
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, dist.ProcessGroup):
            raise DistributedError(
                f"{brief(group)} is no process group, but what torch.distributed.new_group gives to ranks that are not "
                "in the group: only those that are in it shard a model over it"
                if group == dist.GroupMember.NON_GROUP_MEMBER
                else f"process_group must be one of torch.distributed's, got {brief(group)}"
            )
        ranks, headers = GroupRanks.of(group), None
        with ranks.together("connecting the ranks"):
            backend, device_type = _backend_for(group, comm_backend, device_type)
            communicator = _connected(backend, group)
            local = _local_world_size(communicator.world_size)
            if communicator.world_size > 1 and communicator.on_cpu() is None:
                # A rank that leaves a backward pass out then sends no header where others expect gradients.
                headers = _connected(backend, ranks.channel("headers"))
            # What fails before the first collective leaves the group as it was.
            ranks.meet("comparing plugins")
            _compare_ranks(communicator, local)
        # All collections over one process group make their calls in one order, whoever made their environments.
        return cls(communicator, device_type, group, local, ranks.lockstep, headers=headers, ranks=ranks)

    @classmethod
    def local(cls, *, device_type: str | None = None) -> ShardingEnv:
        """Make an environment of this process alone, as in a notebook, without process group or ``torchrun``.

        Args:
            device_type: ``"cpu"``, ``"cuda"``, ...; by default the accelerator if this machine has one, else the CPU.

        Example:
            >>> import torch, shardwright as sw
            >>> table = sw.EmbeddingBagConfig(
            ...     name="user_id", num_embeddings=1000, embedding_dim=8, feature_names=["user"]
            ... )
            >>> bags = sw.EmbeddingBagCollection([table], device="meta")
            >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
            >>> batch = sw.KeyedJaggedTensor.from_lists({"user": [[7, 8], [], [9]]})
            >>> model(batch).values().shape
            torch.Size([3, 8])
        """
        return cls(LoneCommunicator(), device_type or [*_accelerators(), "cpu"][0])

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """Make an environment without process group, under TorchRec's name: that of :meth:`local`.

        Args:
            world_size: number of ranks; must be 1, since nothing connects more.
            rank: number of this rank, 0.

        Raises:
            UnsupportedError: there is to be more than one rank.
            InvalidInputError: there is no such rank.
        """
        if world_size != 1:
            raise UnsupportedError(
                f"ShardingEnv.from_local(world_size={world_size}): nothing connects {world_size} ranks without a "
                "process group. Start them (torchrun, init_process_group) and take ShardingEnv.from_process_group(). "
                f"To plan for them give Topology({world_size}, ...)"
            )
        if rank != 0:
            raise InvalidInputError(f"rank must be 0 in a world of 1, got {brief(rank)}")
        return cls.local()

    @property
    def everyone(self) -> ShardingEnv:
        """Environment of all ranks that hold the dense part: these ranks, or those of all sharding groups."""
        return self.all_ranks or self

    @property
    def ranks_of_all(self) -> range:
        """Numbers of these ranks among all (:attr:`everyone`)."""
        return range(self.world_size)

    def planning_topology(self, topology: Any) -> Any:
        """The topology that tables are planned for, of that of all ranks (:attr:`everyone`): itself."""
        return topology

    def agree(self, what: str, values: Mapping[str, Any] = MappingProxyType({}), advice: str = "") -> None:
        """Wait until every rank makes this call, without a collective, and check that all give the same values.

        Args:
            what: name of the call, for errors.
            values: values that must be the same on all ranks, by name.
            advice: advice for an error, if they differ.

        Raises:
            DistributedError: naming the ranks that do not make this call within the time-out, or the first value that
                differs and what it is on which ranks; the latter on every rank.
            ShardwrightError: another rank failed, in work that is done together; of the class that it raised.
        """
        mine = {name: str(value) for name, value in values.items()}
        if self.ranks.meet(what, repr(sorted(mine.items()))):
            return
        told = self.communicator.all_gather_objects((what, mine))
        calls, names = [call for call, _ in told], self.communicator.global_ranks
        if len(set(calls)) > 1:
            raise DistributedError(
                f"the ranks make different calls: {by_rank(calls, names)}. Every rank must make the same"
            )
        check_alike(what, [values for _, values in told], names, advice)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A context for work of every rank: all begin it, and all end it well, or all raise soon after one does.

        Inside another such context, it is part of that one. What each rank does alone is followed by :meth:`agree`
        before the next collective: after an error there, the process group can be used.

        Args:
            what: name of the work, for errors.

        Raises:
            DistributedError: a rank did not come in time, or was lost, which is named.
            ShardwrightError: another rank failed; of the class that it raised, if that is one of shardwright's.
        """
        with self.ranks.together(what) as is_outermost:
            if is_outermost:
                self.agree(what)
            yield

    def on_first_rank(self, what: str, work: Callable[[], T]) -> T:
        """Do some work on rank 0 and give its result to every rank; every rank makes this call.

        The others wait for rank 0 in the process group's store, where it leaves a sign of life every few seconds,
        whatever the group's time-out.

        Args:
            what: name of the work, for errors.
            work: function called on rank 0; its result is pickled.

        Raises:
            ShardwrightError: the work failed; of the same class on every rank.
        """
        with self.together(what):
            result: Any = None
            if self.rank == 0:
                with self.ranks.busy():
                    result = work()
            self.agree(f"{what} on rank 0")
            told: T = self.communicator.broadcast_object(result)
            return told


def environment_of(
    env: ShardingEnv | None,
    process_group: Any = None,
    comm_backend: str | CommBackend | None = None,
    *,
    device_type: str | None = None,
) -> ShardingEnv:
    """Return the given environment, or make one of a process group, for devices of a type if one is asked for.

    Raises:
        InvalidInputError: an environment is given together with a comm backend or process group that it would not use.
        DistributedError, PluginMismatchError, UnknownPluginError: ``from_process_group`` failed.
    """
    if env is None:
        return ShardingEnv.from_process_group(
            process_group, device_type=device_type, comm_backend=comm_backend
        )
    if comm_backend is not None or process_group is not None:
        raise InvalidInputError(
            "env has its process group and comm backend already: leave env out, or make it by "
            "ShardingEnv.from_process_group(process_group, comm_backend=...)"
        )
    return env


def device_of_rank(env: ShardingEnv, asked: torch.device | str | None = None) -> torch.device:
    """The device that a rank's tables are to be on, with its number.

    Args:
        env: the ranks.
        asked: device that was asked for; by default one of the environment's type.

    Raises:
        InvalidInputError: the environment's communicator does not send from it.
    """
    device = torch.device(env.device_type if asked is None else asked)
    if device.type == "meta":
        return device
    if device.type != env.device_type:
        raise InvalidInputError(
            f"the module is to be on {str(device)!r}, but the ranks of its env send from {env.device_type!r}: make it "
            f"by ShardingEnv.from_process_group(device_type={device.type!r}), over a process group that has a backend "
            f"for {device.type!r}, or give device={env.device_type!r}"
        )
    device, sends = with_index(device), env.communicator.device
    if sends is not None and sends.index is not None and sends != device:
        raise InvalidInputError(
            f"the module is to be on '{device}', but its env was connected when the current device was '{sends}': call "
            f"torch.accelerator.set_device_index({device.index}) before the env is made, or give device='{sends}'"
        )
    return device


_NO_GROUP = (
    "no process group: start the processes with torchrun and call torch.distributed.init_process_group first; or, to "
    "train in this process alone, give DistributedModelParallel(model, env=ShardingEnv.local())"
)


def _local_world_size(world_size: int) -> int:
    """Number of ranks on this host: ``LOCAL_WORLD_SIZE`` of the launcher, or all."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or str(world_size)
    if not told.isdecimal() or int(told) == 0:
        raise DistributedError(
            f"LOCAL_WORLD_SIZE is {told!r}; it must be the number of ranks on this host, at least 1"
        )
    return min(int(told), world_size)


def _backend_for(
    group: Any, asked: str | CommBackend | None, device_type: str | None
) -> tuple[CommBackend, str]:
    """Choose the comm backend of a group, and the type of the devices that it sends from.

    It is the one that was asked for, or the one with the name of the group's own backend for the device.
    """
    devices = [device_type] if device_type else [*_accelerators(), "cpu"]
    backends = host().comm_backends
    if asked is not None:
        backend = make_plugin(backends, asked, "comm_backend")
        if able := [device for device in devices if device in backend.devices]:
            return backend, able[0]
        raise DistributedError(
            f"comm backend {backend.name!r} sends from {', '.join(backend.devices)}, not from {' or '.join(devices)}"
        )
    name_of = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
    for device in devices:
        name = name_of.get(device, "")
        if name in backends and device in backends[name].devices:
            return backends.create(name), device
    known = [f"{name} ({', '.join(backends[name].devices)})" for name in sorted(backends)]
    able = [name for name in backends.names if device_type in backends[name].devices]
    advice = f" Make it with init_process_group({able[0]!r}), or give device='cpu'." if able else ""
    raise DistributedError(
        f"no comm backend for the process group's {sorted(set(name_of.values()))} on {device_type or 'this machine'}. "
        f"Known: {', '.join(known)}.{advice}"
    )


def _connected(backend: CommBackend, group: Any) -> Communicator:
    communicator = backend.connect(group)
    if not isinstance(communicator, Communicator):
        raise DistributedError(
            f"comm backend {backend.name!r} broke its contract: connect() must return a Communicator, it returned "
            f"{brief(communicator)}"
        )
    return communicator


def _accelerators() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [accelerator.type] if accelerator else []


def _compare_ranks(communicator: Communicator, local_world_size: int) -> None:
    """Compare plugins, and the number of ranks per host, with the other ranks."""
    # A rank whose plugins cannot even be read takes part all the same, so that nobody waits for it.
    try:
        mine, problem = host().fingerprint(), None
    except Exception as error:
        mine, problem = None, f"{type(error).__name__}: {error}"
    gathered = communicator.all_gather_objects((local_world_size, mine, problem))
    if problems := {rank: problem for rank, (_, _, problem) in enumerate(gathered) if problem}:
        raise DistributedError(f"plugins could not be loaded: {by_rank([*problems.values()], [*problems])}")
    compare_fingerprints([fingerprint for _, fingerprint, _ in gathered])
    sizes = [{"LOCAL_WORLD_SIZE": size} for size, _, _ in gathered]
    check_alike("the sizes of hosts", sizes, communicator.global_ranks, _SAME_SIZES)


_SAME_SIZES = (
    "Give every rank the same LOCAL_WORLD_SIZE; where hosts differ, 1, so that each rank stands for a host"
)

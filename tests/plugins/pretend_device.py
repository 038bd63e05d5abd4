"""A device that is the CPU in disguise, and counts how often the host waits for it; run as a program.

Its tensors are CPU tensors in a wrapper that says ``pretend:0``, so the runtime treats them as a GPU's. What a GPU's
host would wait for is noted with the line of the project that asked: copies to the host, blocking copies from it, and
operations whose result's size depends on values. Registering a device is for good, so this has a process of its own.

Usage: python -m tests.plugins.pretend_device CASES [--without-streams]
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import shardwright as sw
from shardwright.runtime.ranks import devices
from shardwright_testing.simulated import run_simulated

NAME = "pretend"


class _Module(_DummyBackendModule):
    """What torch asks of a device's module; it has streams, as that of a GPU."""

    Stream = torch.Stream

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Values are drawn by the CPU's generator, which is kept by itself."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


_setup_privateuseone_for_python_backend(NAME, _Module())
DEVICE = torch.device(NAME, 0)

# Operations whose host must know values before it can go on: torch's own kernels for CUDA copy them to the host.
WAITING = {
    "_local_scalar_dense", "nonzero", "bincount", "unique_consecutive", "_unique2", "masked_select", "equal",
    "unique_dim", "is_nonzero",
}  # fmt: skip
NUM_STEPS = 3


class _Waits:
    """Waits of rank 0, in its own thread and in torch's for backward passes."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.others: set[int] = set()  # threads of other ranks

    def note(self, place: str) -> None:
        """Note a wait."""
        if threading.get_ident() not in self.others:
            self.seen.append(place)


waits = _Waits()
pinned: set[int] = set()


def _place() -> str:
    """The innermost line of the project that led here."""
    frames = [frame for frame in traceback.extract_stack() if "/shardwright" in frame.filename]
    own = [frame for frame in frames if not frame.filename.endswith("ranks/devices.py")]
    return f"{own[-1].filename.rpartition('/shardwright')[2]}:{own[-1].lineno}" if own else "elsewhere"


class Pretended(torch.Tensor):
    """A tensor on the device; ``raw`` is where its values really are."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
        )
        made.raw = raw
        return made

    def __repr__(self) -> str:
        return f"Pretended({self.raw!r})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, args, kwargs or {})


def run(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the values themselves, and note if the host would wait."""
    name = op._schema.name.removeprefix("aten::")
    if name == "_pin_memory":
        own = args[0].clone()
        pinned.add(own.data_ptr())
        return own
    made_on = kwargs.get("device")
    reads = [
        value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, Pretended)
    ]
    if reads and name not in ("copy_", "_to_copy") and (mixed := _others(args, kwargs)):
        raise RuntimeError(f"{name}: tensors on {DEVICE} and, of the shapes {mixed}, on cpu")
    to_host = made_on is not None and torch.device(made_on).type == "cpu" and bool(reads)
    is_there = (bool(reads) and not to_host) or (made_on is not None and torch.device(made_on).type == NAME)
    if reads and _makes_host_wait(op, name, args, kwargs, to_host=to_host):
        waits.note(f"{name} at {_place()}")
    elif name in ("_to_copy", "copy_") and _blocks(name, args, kwargs, reads):
        waits.note(f"blocking {name} at {_place()}")
    if made_on is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain = tree_map(lambda value: value.raw if isinstance(value, Pretended) else value, (args, kwargs))
    found = op(*plain[0], **plain[1])
    if name == "set_" or op._schema.name.endswith("_") or name.endswith(".out"):
        return args[0]
    of_raw = {id(value.raw): value for value in reads}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, Pretended) or not is_there:
            return value
        return of_raw[id(value)] if id(value) in of_raw else Pretended(value)

    return tree_map(wrapped, found)


def _others(args: Any, kwargs: Any) -> list[Any]:
    """Shapes of the CPU's tensors among the arguments, which no device reads; those of one number it does."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return [
        list(value.shape)
        for value in leaves
        if isinstance(value, torch.Tensor) and not isinstance(value, Pretended) and value.dim() > 0
    ]


def _makes_host_wait(op: Any, name: str, args: Any, kwargs: Any, *, to_host: bool) -> bool:
    if to_host or name in WAITING:
        return True
    if (name == "repeat_interleave" and "output_size" not in kwargs) or kwargs.get("output_size", 0) is None:
        return True
    if name in ("index", "index_put_", "index_put"):
        indices = [index for index in args[1] if index is not None]
        return any(
            index.dtype in (torch.bool, torch.uint8) or not isinstance(index, Pretended) for index in indices
        )
    return False


def _blocks(name: str, args: Any, kwargs: Any, reads: Any) -> bool:
    """A copy between host and device that is not asked to be asynchronous, or from memory that may be paged."""
    if name == "copy_":
        target, source = args[:2]
        crosses = isinstance(target, Pretended) != isinstance(source, Pretended)
        return crosses and not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    made_on = kwargs.get("device")
    crosses = made_on is not None and torch.device(made_on).type == NAME and not reads
    return (
        crosses
        and args[0].numel() > 0
        and (not kwargs.get("non_blocking") or args[0].data_ptr() not in pinned)
    )


class PretendedDevice(TorchDispatchMode):
    """Makes tensors on the device where torch is asked to."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, args, kwargs or {})


class MakingFromLists(TorchFunctionMode):
    """Notes ``torch.tensor(list, device=...)``, whose copy no dispatcher sees."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            function in (torch.tensor, torch.as_tensor)
            and torch.device(kwargs.get("device") or "cpu").type == NAME
        ):
            waits.note(f"torch.tensor at {_place()}")
            return Pretended(function(*args, **{**kwargs, "device": "cpu"}))
        if function is torch.Tensor.tolist and isinstance(args[0], Pretended):
            waits.note(f"tolist at {_place()}")
            return args[0].raw.tolist()
        return function(*args, **kwargs)


@contextmanager
def counting() -> Iterator[list[str]]:
    """What the host waits for in the block."""
    with MakingFromLists(), PretendedDevice(), mock.patch.object(devices, "wait_for_event", note_event):
        yield waits.seen


def note_event(event: torch.Event) -> None:
    """Note that the host waits for a stream beside the main one, of which alone events are waited for."""
    waits.note(f"event at {_place()}")


@contextmanager
def any_kernel() -> Iterator[None]:
    """Lets ``fused_triton`` be built for the device; its launches do nothing, as they ask the host for nothing."""
    from shardwright_plugins.compute_kernels import fused_triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_triton, "_refusal", lambda _: None)
        if importlib.util.find_spec("triton") is not None:
            from shardwright_plugins.compute_kernels.fused_triton import _kernels

            patch.setattr(_kernels, "launch", lambda *_, **__: None)
        yield


def module_of(pooling: str) -> Any:
    """Tables of a pooled collection, maybe with weights of ids that are trained, or of one of sequences."""
    names, shape = ["a", "b", "c"], {"num_embeddings": 40, "embedding_dim": 8}
    if pooling == "NONE":
        configs: Any = [sw.EmbeddingConfig(name=f"t_{name}", feature_names=[name], **shape) for name in names]
        return sw.EmbeddingCollection(configs, device="meta")
    is_weighted = pooling == "WEIGHTED"
    kind = sw.PoolingType["SUM" if is_weighted else pooling]
    configs = [
        sw.EmbeddingBagConfig(name=f"t_{name}", feature_names=[name], pooling=kind, **shape) for name in names
    ]
    return sw.EmbeddingBagCollection(configs, device="meta", is_weighted=is_weighted)


def train(env: Any, sharding_type: str, pooling: str, kernel: str, of_device: str) -> list[str]:
    """Waits of a training step of one rank, after others."""
    # Numbers of threads that ended are given again.
    (waits.others.add if env.rank > 0 else waits.others.discard)(threading.get_ident())
    module = module_of(pooling)
    rule = sw.ParameterConstraints(sharding_types=[sharding_type], compute_kernels=[kernel])
    sharders = [sw.EmbeddingBagCollectionSharder(), sw.EmbeddingCollectionSharder()]
    topology = sw.Topology(world_size=env.world_size, compute_device="cpu", local_world_size=env.world_size)
    planner = sw.EmbeddingShardingPlanner(topology, constraints={"*": rule}, batch_size=4)
    plan = planner.plan(module, sharders)
    with counting() as seen:
        model = sw.DistributedModelParallel(module, plan=plan, env=env, sharders=sharders, device=DEVICE)
        for step in range(NUM_STEPS):
            ids, lengths = torch.arange(12) + step, torch.tensor([1, 2, 0, 1, 1, 1, 1, 1, 4, 0, 0, 0])
            weights = torch.ones(12).requires_grad_() if pooling == "WEIGHTED" else None
            features = sw.KeyedJaggedTensor(["c", "a", "b"], ids, weights=weights, lengths=lengths)
            if of_device == "device":
                features = features.to(DEVICE)
            if env.rank == 0:
                seen.clear()
            outputs = model(features).values()
            total = outputs.sum() if pooling != "NONE" else sum(own.values().sum() for own in outputs)
            total.backward()
            assert weights is None or (weights.grad is not None and weights.grad.device == weights.device)
    return list(seen)


def waits_of(num_ranks: int, *case: str) -> list[str]:
    """Waits of rank 0."""
    if num_ranks == 1:
        return train(sw.ShardingEnv.local(device_type=NAME), *case)
    return run_simulated(lambda env: train(env, *case), num_ranks, device_type=NAME)[0]


if __name__ == "__main__":
    if "--without-streams" in sys.argv:
        del _Module.Stream
        assert not devices.has_streams(DEVICE)
    with any_kernel():
        print(json.dumps([waits_of(*case) for case in json.loads(sys.argv[1])]), flush=True)
    os._exit(0)  # torch's threads of backward passes end with the process, not after Python's objects

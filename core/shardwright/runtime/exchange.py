"""The exchange dataflow for pooled collections: four collectives a training step, whatever the mix of types.

1. headers, 2. payload (lengths, ids, weights), 3. pooled results home, 4. backward: gradients out.
Every rank makes the same calls in the same order; a rank without ids or blocks takes part with empty pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.contracts.comm_backend import Communicator, Work
from shardwright.errors import DistributedError, InvalidInputError
from shardwright.planning.plan import ParameterSharding
from shardwright.planning.tables import TableSpec
from shardwright.runtime.arrange import Arrangement
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.exchange_plan import ExchangePlan, Group, plan_exchange
from shardwright.runtime.inputs import BatchProblem, Problem, Status
from shardwright.runtime.lookup import Lookup
from shardwright.runtime.payload import PayloadFormat, PeerHeader
from shardwright.runtime.routing import Routed, Router
from shardwright.sparse import KeyedJaggedTensor


class PooledExchange:
    """Runs all tables of one pooled collection whose layouts ask for the exchange dataflow.

    Args:
        tables: the tables, in the collection's order.
        shardings: how each is sharded, by name.
        env: the ranks.
        device: where the local blocks live.
        is_weighted: ids carry weights.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        shardings: Mapping[str, ParameterSharding],
        *,
        env: ShardingEnv,
        device: torch.device,
        is_weighted: bool,
    ) -> None:
        self.plan: ExchangePlan = plan_exchange(
            tables, shardings, world_size=env.world_size, device_type=device.type
        )
        self.rank, self.communicator, self.device = env.rank, env.communicator, device
        self.router = Router(self.plan, is_weighted=is_weighted)
        self.format = PayloadFormat(self.plan, rank=env.rank, is_weighted=is_weighted, device=device)
        self.arrangement = Arrangement(self.plan, gradient_scale=1.0 / env.world_size)
        self.groups: Sequence[Group] = self.plan.groups[env.rank]
        self.lookups: list[Lookup] = [
            group.kernel.build(group.blocks, device=device) for group in self.groups
        ]

    def start(self, features: KeyedJaggedTensor) -> ExchangeStep:
        """Route a batch, exchange headers, and start the payload.

        Raises:
            InvalidInputError: a rank's batch is wrong; the same text on every rank, and nothing is left under way.
        """
        return ExchangeStep(self, features)


class ExchangeStep:
    """One batch on its way through an exchange: :meth:`lookup`, then :meth:`finish`, each called once."""

    def __init__(self, exchange: PooledExchange, features: KeyedJaggedTensor) -> None:
        self._exchange = exchange
        self._training = torch.is_grad_enabled()
        routed, problem, cause = _route(exchange.router, features)
        self._headers = self._exchange_headers(routed, problem, cause)
        assert routed is not None  # else the headers raised
        self._feature_lengths = routed.feature_lengths
        self._payload, self._payload_work = self._send_payload(routed)
        self._saved: list[Any] = []

    @property
    def _communicator(self) -> Communicator:
        return self._exchange.communicator

    def _exchange_headers(
        self, routed: Routed | None, problem: Problem, cause: Exception | None
    ) -> list[PeerHeader]:
        """Collective 1. Raises what any rank has to say against its batch, on all of them."""
        fmt = self._exchange.format
        sent = fmt.headers(routed, problem)
        received = torch.empty_like(sent)
        splits = [fmt.header_size] * self._communicator.world_size
        self._communicator.all_to_all(received, sent, splits, splits, label="headers").wait()
        headers = fmt.read_headers(received)
        complaints = [
            header.problem.message(self._exchange.plan, rank)
            for rank, header in enumerate(headers)
            if header.problem.status is not Status.FINE
        ]
        if cause is not None and problem.status is Status.FAILED:
            raise cause
        if complaints:
            failed = any(header.problem.status is Status.FAILED for header in headers)
            raise (DistributedError if failed else InvalidInputError)("; ".join(complaints))
        return headers

    def _send_payload(self, routed: Routed) -> tuple[Tensor, Work]:
        """Collective 2, started."""
        sent, send_splits = self._exchange.format.pack(routed)
        splits = self._exchange.format.receive_splits(self._headers)
        received = sent.new_empty(sum(splits))
        return received, self._communicator.all_to_all(received, sent, splits, send_splits, label="ids")

    def lookup(self) -> None:
        """Wait for the payload, look up all local groups, and start collective 3: results to where their bags are."""
        self._payload_work.wait()
        with torch.no_grad():
            bags = self._exchange.format.unpack(self._payload, self._headers)
            results = []
            for lookup, group_bags in zip(self._exchange.lookups, bags, strict=True):
                result, saved = lookup.forward(group_bags, training=self._training)
                results.append(result.reshape(-1))
                self._saved.append(saved)
            widths = [group.width for group in self._exchange.groups]
            self._start_results(_by_source(results, widths, self._batch_sizes, self._exchange.device))
        del self._payload, self._payload_work

    @property
    def _batch_sizes(self) -> list[int]:
        return [header.batch_size for header in self._headers]

    def _start_results(self, sent: Tensor) -> None:
        arrangement, rank = self._exchange.arrangement, self._exchange.rank
        batch_size = self._feature_lengths.shape[1]
        send_splits = [size * arrangement.widths[rank] for size in self._batch_sizes]
        splits = [batch_size * width for width in arrangement.widths]
        self._received = sent.new_empty(sum(splits))
        self._results_work = self._communicator.all_to_all(
            self._received, sent, splits, send_splits, label="pooled results"
        )

    def finish(self) -> Tensor:
        """Wait for the results and arrange them: ``[B, C]`` float32, differentiable."""
        parameters = [parameter for lookup in self._exchange.lookups for parameter in lookup.parameters()]
        # The token makes the output differentiable on a rank that owns no block: collective 4 needs all ranks.
        token = torch.zeros((), requires_grad=True)
        output: Tensor = _Finish.apply(self, token, *parameters)
        return output

    def arrange(self) -> Tensor:
        """The output's values, waited for."""
        self._results_work.wait()
        output = self._exchange.arrangement.output(self._received, self._feature_lengths)
        del self._received, self._results_work
        return output

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Collective 4: send each rank its gradients; update fused blocks, return the gradients of the others."""
        arrangement, rank = self._exchange.arrangement, self._exchange.rank
        sent = arrangement.gradients(gradient, self._feature_lengths)
        batch_size = gradient.shape[0]
        send_splits = [batch_size * width for width in arrangement.gradient_widths]
        splits = [size * arrangement.gradient_widths[rank] for size in self._batch_sizes]
        received = sent.new_empty(sum(splits))
        self._communicator.all_to_all(received, sent, splits, send_splits, label="gradients").wait()
        widths = [group.gradient_width for group in self._exchange.groups]
        gradients: list[Tensor | None] = []
        for lookup, saved, own in zip(
            self._exchange.lookups, self._saved, _by_group(received, widths, self._batch_sizes), strict=True
        ):
            gradients += lookup.backward(saved, own)
        return gradients


class _Finish(torch.autograd.Function):
    """Joins a step to autograd: forward waits and arranges, backward sends gradients and updates."""

    @staticmethod
    def forward(ctx: Any, step: ExchangeStep, token: Tensor, *parameters: Tensor) -> Tensor:
        ctx.step = step
        return step.arrange()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *ctx.step.backward(gradient)


def _route(router: Router, features: KeyedJaggedTensor) -> tuple[Routed | None, Problem, Exception | None]:
    """Route a batch; whatever goes wrong becomes a status, since the other ranks wait for this one's header."""
    try:
        return router.route(features), Problem(Status.FINE), None
    except BatchProblem as error:
        return None, error.problem, None
    except Exception as error:
        return None, Problem(Status.FAILED), error


def _by_source(
    results: list[Tensor], widths: list[int], batch_sizes: Sequence[int], device: torch.device
) -> Tensor:
    """Groups' results ``[source][group]`` in one tensor, from ``[group][source]``."""
    if len(results) == 1:
        return results[0]
    if not results:
        return torch.empty(0, device=device)
    pieces = [
        result.split([size * width for size in batch_sizes])
        for result, width in zip(results, widths, strict=True)
    ]
    return torch.cat([group[source] for source in range(len(batch_sizes)) for group in pieces])


def _by_group(received: Tensor, widths: list[int], batch_sizes: Sequence[int]) -> list[Tensor]:
    """Each group's gradient, from ``[source][group]`` in one tensor."""
    if len(widths) == 1:
        return [received]
    pieces = received.split([size * width for size in batch_sizes for width in widths])
    return [torch.cat(pieces[group :: len(widths)]) for group in range(len(widths))]

"""Conformance tests of compute kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import attrs
import pytest
import torch

from shardwright.contracts import ComputeKernel
from shardwright.contracts.lookup import BlockSpec, Lookup
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.runtime.step.backward.learning_rates import LearningRates
from shardwright_testing.kernels.kernel_checks import (
    check_close,
    check_declared,
    check_memory,
    check_same_update,
    check_shared_storage,
    check_state,
    check_sums,
    check_unborn,
    check_weight_gradients,
    copy_state,
    go_back,
    gradient_of,
    train,
    weights_of,
)
from shardwright_testing.kernels.kernel_groups import (
    HALVES,
    any_optimizer,
    built,
    device_of,
    draw,
    groups_of,
    possible_requests,
    spec_of,
    takes,
    with_other_parameters,
)
from shardwright_testing.kernels.loops import OPTIMIZERS, Loops, block_spec, build, draw_sequences, lookup_of

SOURCES = ((3,), (2, 3), (4, 0, 1), (0, 0), (0,))
"""Batch sizes of the ranks whose bags a lookup gets."""


class ComputeKernelTests:
    """The tests of a compute kernel: give the fixture ``compute_kernel``, an instance.

    They run on the CPU, or where the kernel refuses that, on the accelerator if there is one. What the kernel says it
    does not support is left out. A kernel that takes any id is asked for rows by 64-bit keys, all of which get one. One
    that asks for columns of ids gets 1 for each id in them.

    Attributes:
        optimizers: the optimizers that it is tested with, by name or with parameters; those of the built-in kernels by
            default. A kernel with optimizers of its own names them, and what they are to do is what ``unsharded`` of
            their :func:`~shardwright.optim.fused.register_fused_optimizer` builds.
        extras: data of the requests; the subclass sets it where the kernel needs it.
    """

    optimizers: ClassVar[Sequence[str | OptimizerSpec]] = OPTIMIZERS
    extras: ClassVar[Mapping[str, Any]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run what is about an optimizer with each of them."""
        if "optimizer" in metafunc.fixturenames:
            metafunc.parametrize("optimizer", self.optimizers, ids=str)

    def test_declarations_can_be_planned_with(self, compute_kernel: ComputeKernel) -> None:
        """Every request gets an answer, and of what is supported the numbers make sense."""
        for request in possible_requests(self.optimizers):
            request = attrs.evolve(request, extras=self.extras)
            answer = compute_kernel.supports(request)
            assert answer is True or (isinstance(answer, str) and answer), (
                f"{compute_kernel.name}: supports() must be True or the reason why not, it is {answer!r}"
            )
            if answer is True:
                check_declared(compute_kernel, request)

    def test_supports_some_training(self, compute_kernel: ComputeKernel) -> None:
        """Some optimizer on some device: else no other test here would test anything."""
        answers = [
            compute_kernel.supports(attrs.evolve(request, on_this_machine=False))
            for request in possible_requests(self.optimizers)
        ]
        assert True in answers, f"{compute_kernel.name}: supports nothing: {sorted(set(map(str, answers)))}"

    def test_what_is_supported_is_built_and_looked_up(self, compute_kernel: ComputeKernel) -> None:
        """Every data type, pooling and cut of columns is tried that the kernel says it supports."""
        device = device_of(compute_kernel, self.optimizers)
        for data_type, pooling, columns in product(("FP32", *HALVES), ("SUM", "NONE"), ((0, 8), (2, 5))):
            block = block_spec(
                5,
                8,
                columns=columns,
                optimizer=any_optimizer(compute_kernel, self.optimizers),
                data_type=data_type,
                device=device.type,
                pooling=pooling,
                **self._kind_of_ids(compute_kernel),
            )
            if compute_kernel.supports(block.request) is True:
                what = f"{compute_kernel.name}: {data_type}, pooling {pooling}, columns {columns}"
                lookup, loops = built(what, compute_kernel, [block], device)
                batch = draw([block], (2, 3), pooling=pooling, is_weighted=False)
                check_sums(what, lookup, loops, batch, device)

    @pytest.mark.parametrize("is_weighted", [False, True])
    def test_forward_sums_the_rows_of_each_bag(
        self, compute_kernel: ComputeKernel, is_weighted: bool
    ) -> None:
        """Bags are empty, ids repeat, ranks have batches of different sizes or none; kernels always sum."""
        for lookup, loops, blocks, device in self._lookups(compute_kernel):
            for sources in SOURCES:
                what = f"{compute_kernel.name}: sums of batches of {sources}"
                batch = draw(blocks, sources, is_weighted=is_weighted)
                for training in (True, False):
                    check_sums(what, lookup, loops, batch, device, training=training)

    @pytest.mark.parametrize("data_type", HALVES)
    def test_forward_of_halves_sums_in_float32(self, compute_kernel: ComputeKernel, data_type: str) -> None:
        """Bags of many rows lose nothing to the weights' own type."""
        for lookup, loops, blocks, device in self._lookups(compute_kernel, data_type=data_type):
            batch = draw(blocks, (3, 2), is_weighted=True, max_length=40)
            check_sums(f"{compute_kernel.name}: sums of {data_type} rows", lookup, loops, batch, device)

    def test_forward_of_sequences_is_the_ids_rows_in_their_order(self, compute_kernel: ComputeKernel) -> None:
        """Batches have any number of ranks and ids."""
        for lookup, loops, blocks, device in self._lookups(compute_kernel, pooling="NONE"):
            for num_sources, max_ids in product((1, 2, 3), (0, 6)):
                batch = draw_sequences(blocks, num_sources, max_ids=max_ids)
                check_sums(f"{compute_kernel.name}: rows of sequences", lookup, loops, batch, device)

    @pytest.mark.parametrize("pooling", ["SUM", "NONE"])
    def test_backward_updates_rows_or_shows_their_gradients(
        self, compute_kernel: ComputeKernel, optimizer: str | OptimizerSpec, pooling: str
    ) -> None:
        """Each optimizer that the kernel declares updates rows; those that are not looked up are left alone."""
        for blocks, device in self._groups(compute_kernel, spec_of(optimizer), pooling=pooling):
            for sources, is_weighted in product(SOURCES[1:4], {False, pooling == "SUM"}):
                lookup, loops = built(compute_kernel.name, compute_kernel, blocks, device)
                for step in range(3):
                    batch = draw(blocks, sources, pooling=pooling, is_weighted=is_weighted, seed=step)
                    what = f"{compute_kernel.name}: {optimizer}, step {step} of batches of {sources}"
                    train(what, lookup, loops, batch, device, seed=step)

    @pytest.mark.parametrize("is_weighted", [False, True])
    def test_ragged_bags_are_looked_up_and_updated_slot_after_slot(
        self, compute_kernel: ComputeKernel, is_weighted: bool
    ) -> None:
        """Kernels that declare so take ragged bags: slots have bags of their own number, and none is empty."""
        if not compute_kernel.takes_ragged_bags:
            pytest.skip(f"{compute_kernel.name} takes no ragged bags, the engine fills them up for it")
        for lookup, loops, blocks, device in self._lookups(compute_kernel):
            for step, sources in enumerate(SOURCES):
                batch = draw(blocks, sources, is_weighted=is_weighted, seed=step).ragged()
                what = f"{compute_kernel.name}: ragged bags of batches of {sources}"
                check_sums(what, lookup, loops, batch, device)
                train(what, lookup, loops, batch, device, seed=step)

    def test_backward_uses_the_optimizers_parameters(
        self, compute_kernel: ComputeKernel, optimizer: str | OptimizerSpec
    ) -> None:
        """Other values than the usual ones."""
        spec = with_other_parameters(optimizer)
        for lookup, loops, blocks, device in self._lookups(compute_kernel, spec):
            for step in range(3):
                batch = draw(blocks, (2, 3), is_weighted=True, seed=step)
                train(f"{compute_kernel.name}: {spec}", lookup, loops, batch, device)

    def test_learning_rate_holds_from_the_next_forward_pass(
        self, compute_kernel: ComputeKernel, optimizer: str | OptimizerSpec
    ) -> None:
        """A new learning rate takes effect in a fused optimizer."""
        for lookup, loops, blocks, device in self._fused_lookups(compute_kernel, optimizer):
            for step, rate in enumerate((0.1, 0.7, 0.0, 0.01)):
                lookup.set_learning_rate(rate)
                batch = draw(blocks, (2, 3), is_weighted=True, seed=step)
                what = f"{compute_kernel.name}: {optimizer} after set_learning_rate({rate})"
                train(what, lookup, loops, batch, device, rate=rate)

    def test_step_keeps_the_learning_rate_of_its_forward_pass(
        self, compute_kernel: ComputeKernel, optimizer: str | OptimizerSpec
    ) -> None:
        """Rates that are set later, and later forward passes, do not change it: so the engine calls a lookup."""
        for lookup, loops, blocks, device in self._fused_lookups(compute_kernel, optimizer):
            rates, begun = LearningRates([lookup]), []
            for step, rate in enumerate((0.1, 0.7)):
                rates.set({blocks[0].request.optimizer: rate}.get)
                batch = draw(blocks, (2, 3), is_weighted=True, seed=step)
                saved = lookup.forward(batch.as_bags(device), training=True)[1]
                begun.append((batch, saved, rates.now, rate))
            rates.set({blocks[0].request.optimizer: 0.01}.get)
            for batch, saved, of_forward, rate in begun:
                what = f"{compute_kernel.name}: {optimizer}, forward pass at the learning rate {rate}, then others"
                later = rates.exchanged(of_forward)
                go_back(what, lookup, loops, batch, saved, device, rate=rate)
                rates.exchanged(later)

    def test_optimizer_state_is_of_the_rows_and_continues_in_another_lookup(
        self, compute_kernel: ComputeKernel, optimizer: str | OptimizerSpec
    ) -> None:
        """A checkpoint keeps all state there is."""
        for lookup, loops, blocks, device in self._fused_lookups(compute_kernel, optimizer):
            for step in range(3):
                batch = draw(blocks, (2, 3), is_weighted=True, seed=step)
                train(compute_kernel.name, lookup, loops, batch, device, seed=step)
            fresh, _ = build(compute_kernel, blocks, seed=9, device=device)
            for index in range(len(blocks)):
                check_state(f"{compute_kernel.name}: {optimizer}", lookup, loops, index)
                copy_state(compute_kernel.name, lookup, fresh, loops, index)
            fresh.load_step(3)
            batch = draw(blocks, (2, 3), is_weighted=True, seed=7)
            what = f"{compute_kernel.name}: {optimizer} in a lookup that took over weights and state"
            train(what, fresh, loops, batch, device)

    def test_row_wise_optimizer_is_exact_on_cut_columns(self, compute_kernel: ComputeKernel) -> None:
        """A kernel that takes such a request sees the gradient of whole rows."""
        device = device_of(compute_kernel, self.optimizers)
        blocks = [
            block_spec(
                rows,
                12,
                columns=(4, 8),
                slots=slots,
                optimizer=OptimizerSpec("row_wise_adagrad", 0.1),
                device=device.type,
                **self._kind_of_ids(compute_kernel),
            )
            for rows, slots in ((5, 2), (3, 1))
        ]
        if not compute_kernel.fuses_optimizer or not takes(compute_kernel, blocks):
            pytest.skip(
                f"{compute_kernel.name} says it does not support this, or leaves the optimizer to the user"
            )
        assert compute_kernel.needs_whole_rows(blocks[0].request), (
            f"{compute_kernel.name}: supports row_wise_adagrad on 4 of 12 columns, but does not ask for whole rows"
        )
        lookup, loops = built(compute_kernel.name, compute_kernel, blocks, device)
        for step in range(3):
            batch = draw(blocks, (2, 3), is_weighted=True, seed=step)
            train(f"{compute_kernel.name}: row_wise_adagrad, cut columns", lookup, loops, batch, device)
        if not compute_kernel.refusal_of_weight_gradients():
            what = f"{compute_kernel.name}: gradients of weights, cut columns"
            check_weight_gradients(what, compute_kernel, lookup, loops, batch, device)

    def test_gradients_of_weights_are_rows_times_gradients(self, compute_kernel: ComputeKernel) -> None:
        """The engine asks for them before the update, and reads rows itself where there is no answer."""
        if refusal := compute_kernel.refusal_of_weight_gradients():
            pytest.skip(f"{compute_kernel.name}: {refusal}")
        what = f"{compute_kernel.name}: gradients of weights"
        for lookup, loops, blocks, device in self._lookups(compute_kernel):
            batch = draw(blocks, (2, 3), is_weighted=True)
            _, saved = lookup.forward(batch.as_bags(device), training=True)
            for asked in (saved, None):
                check_weight_gradients(what, compute_kernel, lookup, loops, batch, device, asked)
            go_back(f"{what}, then the update", lookup, loops, batch, saved, device)

    def test_prepare_serves_backward_as_forward_does(self, compute_kernel: ComputeKernel) -> None:
        """``backward`` does the same after ``prepare``, which leaves out the sums."""
        for blocks, device in self._groups(compute_kernel):
            (looked_up, loops), (prepared, _) = (
                build(compute_kernel, blocks, device=device) for _ in range(2)
            )
            batch = draw(blocks, (2, 3), is_weighted=True)
            gradient = gradient_of(loops, batch, 1).to(device)
            _, saved = looked_up.forward(batch.as_bags(device), training=True)
            shown = looked_up.backward(saved, gradient.clone())
            again = prepared.backward(prepared.prepare(batch.as_bags(device)), gradient.clone())
            what = f"{compute_kernel.name}: after prepare()"
            check_same_update(what, [*again, *weights_of(prepared)], [*shown, *weights_of(looked_up)])

    def test_backward_scaled_is_backward_of_the_scaled_gradient(self, compute_kernel: ComputeKernel) -> None:
        """Averages over ranks are made so."""
        for blocks, device in self._groups(compute_kernel):
            (scaled, loops), (plain, _) = (build(compute_kernel, blocks, device=device) for _ in range(2))
            batch = draw(blocks, (2, 3), is_weighted=True)
            gradient = gradient_of(loops, batch, 1).to(device)
            _, saved = scaled.forward(batch.as_bags(device), training=True)
            shown = scaled.backward_scaled(saved, gradient.clone(), 0.25)
            _, saved = plain.forward(batch.as_bags(device), training=True)
            expected = plain.backward(saved, gradient * 0.25)
            what = f"{compute_kernel.name}: backward_scaled() by 0.25"
            check_same_update(what, [*shown, *weights_of(scaled)], [*expected, *weights_of(plain)])

    def test_anticipate_leaves_backward_as_it_is(self, compute_kernel: ComputeKernel) -> None:
        """The engine calls it while results travel, or not at all; it changes nothing that is read or written."""
        for lookup, loops, blocks, device in self._lookups(compute_kernel):
            for seed in (1, 2):
                batch = draw(blocks, (2, 3), is_weighted=True, seed=seed)
                _, saved = lookup.forward(batch.as_bags(device), training=True)
                before = [weight.clone() for weight in weights_of(lookup)]
                lookup.anticipate(saved)
                for one, other in zip(weights_of(lookup), before, strict=True):
                    check_close(f"{compute_kernel.name}: weights after anticipate()", one, other)
                go_back(f"{compute_kernel.name}: after anticipate()", lookup, loops, batch, saved, device)

    def test_prefetch_leaves_lookups_and_updates_as_they_are(self, compute_kernel: ComputeKernel) -> None:
        """A pipeline calls it for the next batch, before this one's backward pass, or not at all."""
        for lookup, loops, blocks, device in self._lookups(compute_kernel):
            batches = [draw(blocks, (2, 3), is_weighted=True, seed=seed) for seed in (1, 2, 3)]
            what = f"{compute_kernel.name}: with prefetch()"
            for batch, coming in zip(batches, [*batches[1:], batches[0]], strict=True):
                check_sums(what, lookup, loops, batch, device)
                _, saved = lookup.forward(batch.as_bags(device), training=True)
                lookup.prefetch(coming.as_bags(device))
                go_back(what, lookup, loops, batch, saved, device)

    def test_forwards_before_their_backwards_keep_apart(self, compute_kernel: ComputeKernel) -> None:
        """A pipeline looks the next batch up before it goes back through this one."""
        for lookup, loops, blocks, device in self._lookups(compute_kernel):
            batches = [draw(blocks, (3,), is_weighted=True, seed=seed) for seed in (1, 2)]
            saved = [lookup.forward(batch.as_bags(device), training=True)[1] for batch in batches]
            for batch, kept in reversed(list(zip(batches, saved, strict=True))):
                what = f"{compute_kernel.name}: two forward passes before their backward passes"
                go_back(what, lookup, loops, batch, kept, device)

    def test_weights_share_storage_with_what_is_looked_up(self, compute_kernel: ComputeKernel) -> None:
        """Lookups read the weights that a checkpoint loads into ``weight``."""
        for blocks, device in self._groups(compute_kernel):
            lookup, _ = build(compute_kernel, blocks, device=device)
            check_shared_storage(compute_kernel.name, lookup, blocks, device)

    def test_forward_runs_in_inference_mode(self, compute_kernel: ComputeKernel) -> None:
        """And gives the same."""
        for lookup, loops, blocks, device in self._lookups(compute_kernel):
            with torch.inference_mode():
                batch = draw(blocks, (3,), is_weighted=True)
                check_sums(f"{compute_kernel.name}: inference", lookup, loops, batch, device)

    def test_declared_memory_is_what_is_allocated(
        self, compute_kernel: ComputeKernel, optimizer: str | OptimizerSpec
    ) -> None:
        """Weights, optimizer state and dense gradients after a step, within 3 %; kernels on the CPU."""
        for data_type, columns in product(("FP32", *HALVES), ((0, 64), (16, 48))):
            blocks = [
                block_spec(
                    rows,
                    64,
                    slots=slots,
                    columns=columns,
                    optimizer=spec_of(optimizer),
                    data_type=data_type,
                    **self._kind_of_ids(compute_kernel),
                )
                for rows, slots in ((3000, 1), (1000, 2))
            ]
            if takes(compute_kernel, blocks):
                check_memory(f"{compute_kernel.name}: {optimizer}, {data_type}", compute_kernel, blocks)

    def test_key_without_a_row_brings_zeros_and_gets_none_without_training(
        self, compute_kernel: ComputeKernel
    ) -> None:
        """A lookup without training of keys that were never trained changes nothing."""
        if not compute_kernel.row_state:
            pytest.skip(f"{compute_kernel.name} takes rows, and no keys")
        for blocks, device in self._groups(compute_kernel):
            lookup = lookup_of(compute_kernel, blocks, device)
            what = f"{compute_kernel.name}: keys that were never trained"
            check_unborn(what, lookup, blocks, list(compute_kernel.row_state))

    def _kind_of_ids(self, kernel: ComputeKernel) -> dict[str, Any]:
        return {"takes_any_id": bool(kernel.row_state), "extras": self.extras}

    def _groups(
        self, kernel: ComputeKernel, optimizer: OptimizerSpec | None = None, **others: str
    ) -> list[tuple[list[BlockSpec], torch.device]]:
        optimizer = optimizer or any_optimizer(kernel, self.optimizers)
        return groups_of(kernel, optimizer, self.optimizers, extras=self.extras, **others)

    def _lookups(
        self, kernel: ComputeKernel, optimizer: OptimizerSpec | None = None, **others: str
    ) -> Iterator[tuple[Lookup, Loops, list[BlockSpec], torch.device]]:
        for blocks, device in self._groups(kernel, optimizer, **others):
            yield *built(kernel.name, kernel, blocks, device), blocks, device

    def _fused_lookups(
        self, kernel: ComputeKernel, optimizer: str | OptimizerSpec
    ) -> Iterator[tuple[Lookup, Loops, list[BlockSpec], torch.device]]:
        if not kernel.fuses_optimizer:
            pytest.skip(f"{kernel.name} leaves the optimizer to the user")
        return self._lookups(kernel, spec_of(optimizer))

"""Recompute changes memory and time, and not one bit of what is learned (class K, B4, B5)."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace

import numpy as np
import pytest
from small_jobs import (
    FLOAT64,
    LENGTH,
    Outcome,
    after_backward,
    bits_of,
    cut,
    gradients_are_zero,
    packed_rows,
    run_engine,
    small_decoder,
    snapshot,
    start_engine,
)

from mpisim.comm.local import run_threads
from mpisim.config.schema import OptimizerSection
from mpisim.data.batch import Batch
from mpisim.engine.loss_scale import LossScale
from mpisim.errors import PeerLost, RecomputeMismatch
from mpisim.nn.dropout import DropoutMasks, keep_threshold
from mpisim.nn.layers import LayerContext
from mpisim.nn.precision import Policy
from mpisim.plan.ops import ALL_MICROS, Backward, Forward, Recompute, StartSync

DROPOUT = 0.5
OPTIMIZER = OptimizerSection(kind="adamw", lr=0.01, weight_decay=0.1, clip_norm=1.0)
MODES = [("selective", 1), ("full", 1), ("full", 2), ("full", 3)]
POLICIES = {
    "float64": FLOAT64,
    "float32": Policy(*["float32"] * 4),
    "bfloat16": Policy("float32", "bfloat16", "float32", "float32"),
    "float16": Policy("float32", "float16", "float32", "float32"),
}


def steps_of(count, ranks=1, micros=2, rows=4):
    return [cut(packed_rows(rows, seed), ranks, micros) for seed in range(count)]


@functools.cache
def retained(dtype: str, ranks: int) -> Outcome:
    return train(dtype, ranks)


def train(dtype, ranks, recompute="none", every=1):
    scale = LossScale("dynamic", 1024.0) if dtype == "float16" else None
    return run_engine(
        small_decoder(DROPOUT), steps_of(20, ranks), optimizer=OPTIMIZER, recompute=recompute,
        every=every, policy=POLICIES[dtype], loss_scale=scale,
    )  # fmt: skip


@pytest.mark.parametrize(("recompute", "every"), MODES)
@pytest.mark.parametrize(("dtype", "ranks"), [*((d, 1) for d in POLICIES), ("float64", 2)])
def test_c104_every_bit_is_that_of_the_retained_run(dtype, ranks, recompute, every):
    """C104, B4: losses, gradients and weights after 20 steps; the masks are those of forward."""
    kept, again = retained(dtype, ranks), train(dtype, ranks, recompute, every)
    assert again.losses == kept.losses and again.norms == kept.norms
    assert len(again.grads) == len(kept.grads) == 20
    for got, want in zip(again.grads, kept.grads, strict=True):
        assert bits_of(got) == bits_of(want)
    for got, want in zip(again.states, kept.states, strict=True):
        assert bits_of(got.master) == bits_of(want.master)
        assert bits_of(got.params) == bits_of(want.params)


def test_c104_dropout_is_felt():
    """The run above would be the same with masks that drop nothing."""
    plain = run_engine(small_decoder(0.0), steps_of(20), optimizer=OPTIMIZER)
    assert plain.losses != retained("float64", 1).losses


@pytest.mark.parametrize(("recompute", "every"), MODES[1:])
def test_c105_a_replay_draws_what_forward_drew_and_nothing_else(monkeypatch, recompute, every):
    """C105: the places of all draws are the same in every step; the live counter does not move."""
    real, drawn = DropoutMasks.tiles, []

    def tiles(self, site, shape):
        drawn.append((self.key, self.site_range(site), self.first_row, shape))
        return real(self, site, shape)

    monkeypatch.setattr(DropoutMasks, "tiles", tiles)

    def run(*mode):
        drawn.clear()
        counters, addresses = [], []

        def prepare(state):
            def observe(op):
                if isinstance(op, Forward | Backward):
                    counters.append((state.step.step, state.step.dropout_words))
                if op == Backward(state.first, 1):
                    addresses.append(set(drawn))
                    drawn.clear()

            state.observe_op = observe

        run_engine(
            small_decoder(DROPOUT), steps_of(3), optimizer=OPTIMIZER, prepare=prepare,
            **dict(zip(("recompute", "every"), mode, strict=False)),
        )  # fmt: skip
        return set(counters), addresses

    before = np.random.get_state()[1].tobytes()
    counters, addresses = run(recompute, every)
    assert (counters, addresses) == run("none")
    assert np.random.get_state()[1].tobytes() == before
    # Six sites of 4 rows x 6 tokens x 8 features.
    assert counters == {(step, 6 * 4 * 6 * 8) for step in range(3)}
    # Sites x microbatches; the keys of the steps differ.
    assert [len(places) for places in addresses] == [12] * 3
    assert not addresses[0] & addresses[1] and not addresses[1] & addresses[2]


def test_c107_ranks_have_different_masks_and_equal_weights():
    """C107: 4096 elements a rank, dropout 0.5: the masks agree in half of the places +- 3%."""
    found = {}

    def prepare(state):
        def observe(op):
            if isinstance(op, Forward) and op.block == state.last:
                masks = state.context("block0", op.micro).dropout
                words = masks.words(0, (64, 8, 8))
                found[state.rank] = words < np.uint64(keep_threshold(DROPOUT))

        state.observe_op = observe

    model = small_decoder(DROPOUT, max_len=8)
    done = run_engine(
        model, [cut(packed_rows(128, 1, length=8), 2, 1)] * 2, optimizer=OPTIMIZER, prepare=prepare
    )
    assert found[0].size == 4096
    assert abs(np.mean(found[0] == found[1]) - 0.5) < 0.03
    assert abs(np.mean(found[0]) - 0.5) < 0.03 and abs(np.mean(found[1]) - 0.5) < 0.03
    assert bits_of(done.states[0].params) == bits_of(done.states[1].params)


def draws(recompute, every):
    """Return the ranges of words drawn by forwards and by backwards, by step and microbatch."""
    forwards, backwards, told = {}, {}, []

    def prepare(state):
        state.observe_draws = lambda *span: told.append(span)

        def observe(op):
            if op in (Forward(state.last, 0), Forward(state.last, 1)):
                forwards[state.step.step, op.micro] = set(told)
            elif op in (Backward(state.first, 0), Backward(state.first, 1)):
                backwards[state.step.step, op.micro] = set(told)
            else:
                return
            told.clear()

        state.observe_op = observe

    run_engine(
        small_decoder(DROPOUT), steps_of(2), optimizer=OPTIMIZER, recompute=recompute, every=every,
        prepare=prepare,
    )  # fmt: skip
    return forwards, backwards


@pytest.mark.parametrize(("recompute", "every"), [("none", 1), *MODES])
def test_c105_backward_draws_the_words_that_forward_drew(recompute, every):
    """Told by the masks themselves, replays included; six sites, two microbatches of two rows."""
    forwards, backwards = draws(recompute, every)
    assert forwards == backwards == draws("none", 1)[0]
    row = LENGTH * 8
    for (_, micro), spans in forwards.items():
        want = {(row * (4 * site + 2 * micro), row * (4 * site + 2 * micro + 2))
                for site in range(6)}  # fmt: skip
        assert spans == want
    assert len(forwards) == 4


# --- beside communication --------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["all", "selective"])
def test_between_is_called_between_layers(keep):
    """Not before the first, nor behind the last; and it changes no bit."""
    block = small_decoder().blocks[1]
    assert len(block.layers) > 3
    params = block.init(lambda name: np.random.default_rng(len(name)), np.dtype("f8"))
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 8))
    events = []

    class Told:
        """A layer that says when it runs."""

        def __init__(self, layer):
            self.layer = layer

        def __getattr__(self, name):
            return getattr(self.layer, name)

        def forward(self, *arguments):
            events.append("layer")
            return self.layer.forward(*arguments)

    told = replace(block, layers=tuple((name, Told(layer)) for name, layer in block.layers))
    y, _ = told.forward(params, x, LayerContext(), keep, between=lambda: events.append("between"))
    assert events == ["layer", *["between", "layer"] * (len(block.layers) - 1)]
    want, _ = block.forward(params, x, LayerContext(), keep)
    assert y.tobytes() == want.tobytes()


def test_a_replay_advances_the_rings_between_its_layers():
    """Rank 1 holds its gradients back until rank 0 has replayed, so one is surely on its way."""
    replayed, calls = threading.Event(), []

    def prepare(state):
        if state.rank == 1:

            def hold(op):
                if op == Forward(state.last, 0):
                    assert replayed.wait(20.0)

            state.observe_op = hold
            return
        real = state.dp.advance

        def advance():
            calls.append("advance")
            real()

        def observe(op):
            if isinstance(op, Recompute):
                replayed.set()
            calls.append(op)

        state.dp.advance, state.observe_op = advance, observe

    model = small_decoder()
    run_engine(
        model, steps_of(1, ranks=2, micros=1), recompute="full", bucket_bytes=1, prepare=prepare
    )
    replay = calls.index(Recompute("block2", 0))
    before = next(place for place in range(replay - 1, -1, -1) if calls[place] != "advance")
    assert calls[before] == StartSync(0, ALL_MICROS, 8, "all_reduce")
    layers = len(model.blocks[3].layers)
    assert model.blocks[3].name == "block2"
    # One by the engine behind the op before, the others between layers.
    assert calls[before + 1 : replay] == ["advance"] * (1 + layers - 1)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_overlap_changes_no_bit_of_a_run_with_replays(every):
    on, off = (
        run_engine(
            small_decoder(DROPOUT), steps_of(3, ranks=3, rows=6), optimizer=OPTIMIZER,
            recompute="full", every=every, bucket_bytes=1, overlap=overlap,
        )
        for overlap in (True, False)
    )  # fmt: skip
    assert on.losses == off.losses and on.norms == off.norms
    for one, other in zip(on.states, off.states, strict=True):
        assert bits_of(one.params) == bits_of(other.params)


# --- what it costs (B5) ----------------------------------------------------------------------


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize(
    ("recompute", "every", "extra"),
    [("none", 1, 0), ("selective", 1, 0), ("full", 1, 3), ("full", 2, 3)],
)
def test_recomputed_blocks_cost_one_forward_each(recompute, every, extra, micros):
    """B5: three recomputed blocks cost exactly three extra block forwards a microbatch."""
    done = run_engine(
        small_decoder(), steps_of(2, micros=micros), recompute=recompute, every=every
    ).done[0]
    assert [step.block_forwards for step in done] == [micros * (5 + extra)] * 2


def test_what_is_retained_falls_with_every_mode():
    """Between the loss and its backward, in bytes of activations."""
    seen = []
    for recompute, every in (("none", 1), ("selective", 1), ("full", 1), ("full", 3)):

        def prepare(state):
            def observe(op):
                if op == Forward(state.last, 0):
                    seen.append(state.ledger.live["activations"])

            state.observe_op = observe

        run_engine(
            small_decoder(), steps_of(1, micros=1), prepare=prepare, recompute=recompute,
            every=every,
        )  # fmt: skip
    assert seen == sorted(seen, reverse=True) and len(set(seen)) == 4


# --- planted faults --------------------------------------------------------------------------


def wrong_mask(state):
    masks = state._masks[0]
    state._masks[0] = DropoutMasks(
        masks.key + 1, masks.rows, masks.max_len, masks.width, masks.first_row
    )


def changed_input(state):
    key = next(key for key in state.step.inputs if key[0] == "block0")
    state.step.inputs[key][0, 0, 0] += 1e-9


def changed_parameter(state):
    state.params["block0.gate_up.up"][0, 0] *= 1 + 1e-15


def changed_starts(state):
    state.step.batches[0].starts[:, 1:] = 0


FAULTS = [wrong_mask, changed_input, changed_parameter, changed_starts]


def plant(fault, rank=0):
    """Return a `prepare` that plants a fault between the first loss and its backward."""

    def prepare(state):
        def observe(op):
            if state.rank == rank and state.step.step == 1 and op == Forward(state.last, 0):
                fault(state)

        state.observe_op = observe

    return prepare


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_replay_that_differs_in_one_bit_is_an_error(fault, every):
    """B4: reported, and nothing of the step remains (B6)."""
    kept = {}

    def prepare(state):
        plant(fault)(state)
        inner = state.observe_op

        def observe(op):
            inner(op)
            if state.step.step == 1 and op == Forward(state.first, 0):
                kept.update(snapshot(state))

        state.observe_op = observe

    job, outcome = start_engine(
        small_decoder(DROPOUT), steps_of(2), optimizer=OPTIMIZER, recompute="full", every=every,
        prepare=prepare,
    )  # fmt: skip
    error = job.errors[0]
    assert type(error) is RecomputeMismatch
    assert "must give the bits of its first forward" in str(error)
    assert "microbatch 0 in step 1" in str(error)
    (state,) = outcome.states
    assert gradients_are_zero(state) and state.ledger.live["activations"] == 0
    assert state.committed == 1 and state.step is None
    if fault is not changed_parameter:
        assert bits_of(state.params) == kept["params"]


@pytest.mark.parametrize("fault", [changed_starts])
def test_attention_weights_that_differ_are_an_error(fault):
    job, _ = start_engine(small_decoder(), steps_of(2), recompute="selective", prepare=plant(fault))
    assert type(job.errors[0]) is RecomputeMismatch
    assert "attention weights computed again must equal" in str(job.errors[0])


def test_a_changed_query_is_an_error():
    def fault(state):
        for saved in state.step.saved["block1", 0]:
            if len(saved) == 4 and saved[0].ndim == 4:
                saved[0][...] += 1e-9

    job, _ = start_engine(small_decoder(), steps_of(2), recompute="selective", prepare=plant(fault))
    assert type(job.errors[0]) is RecomputeMismatch


def test_a_mismatch_on_one_rank_ends_the_job_with_nothing_changed():
    job, outcome = start_engine(
        small_decoder(DROPOUT), steps_of(3, ranks=3), optimizer=OPTIMIZER, recompute="full",
        prepare=plant(wrong_mask, rank=1), bucket_bytes=1,
    )  # fmt: skip
    assert type(job.errors[1]) is RecomputeMismatch
    assert all(isinstance(job.errors[rank], PeerLost) for rank in (0, 2))
    before = run_engine(
        small_decoder(DROPOUT), steps_of(1, ranks=3), optimizer=OPTIMIZER, recompute="full",
        bucket_bytes=1,
    )  # fmt: skip
    for state in outcome.states:
        assert state.committed == 1 and gradients_are_zero(state)
        assert state.ledger.live["activations"] == 0
        assert bits_of(state.params) == bits_of(before.params)


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0])
def test_numbers_that_are_not_finite_are_compared_as_bits(value):
    """A NaN equals itself here: the step is skipped, and not reported as a mismatch."""

    def prepare(state):
        state.params["block1.out.weight"][...] = value

    done = run_engine(
        small_decoder(DROPOUT), steps_of(1), recompute="full", prepare=prepare,
        loss_scale=LossScale("dynamic", 4.0),
    )  # fmt: skip
    assert done.done[0][0].skipped is bool(value)


def test_rows_of_no_rank_replay_too():
    """A microbatch without rows has nothing to compare."""
    none = Batch(*(array[:0] for array in packed_rows(1, 0)))
    done = run_engine(
        small_decoder(DROPOUT), [[[packed_rows(2, 0), none], [none, none]]], recompute="full"
    )
    assert done.targets == [np.count_nonzero(packed_rows(2, 0).targets >= 0)]
    assert LENGTH == packed_rows(2, 0).x.shape[1]


def test_after_backward_is_where_faults_of_other_tests_are_planted():
    """The helper acts once per step, after the last gradient of the microbatch is there."""
    acted = []

    def prepare(state):
        after_backward(state, 1, lambda state: acted.append(state.step.step))
        after_backward(state, 0, lambda state: acted.append(-1), step=2)

    run_engine(small_decoder(), steps_of(3), prepare=prepare)
    assert acted == [0, 1, -1, 2]
    assert run_threads(lambda transport: transport.rank, 1).results == [0]

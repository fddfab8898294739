"""A decoder learns the same on every layout: ranks, microbatches, recompute, with dropout or not.

Bar: in float64 the weights after 10 steps are within 1e-12 * max(1, |r|) of one rank with one
microbatch that keeps everything. Packed text of documents of different length: every row and every
rank has another number of targets.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from mpi_worker import mpi_run
from small_jobs import (
    Outcome,
    assert_close,
    bits_of,
    copies,
    cut,
    make_plans,
    make_state,
    num_targets,
    packed_rows,
    run_engine,
    small_decoder,
)

from mpisim.config.schema import OptimizerSection
from mpisim.data.batch import Batch
from mpisim.engine.step import Engine

TOLERANCE = 1e-12
STEPS = 10
ROWS = 12
"""Four ranks with four microbatches have some without rows."""
OPTIMIZER = OptimizerSection(
    kind="adamw", lr=0.01, weight_decay=0.1, clip_norm=0.5, schedule="cosine", warmup_steps=2
)
MODES = {"none": ("none", 1), "selective": ("selective", 1), "full": ("full", 1),
         "every2": ("full", 2)}  # fmt: skip
BUCKET_BYTES = 2000
"""Several buckets."""


def batches() -> list[Batch]:
    return [packed_rows(ROWS, seed) for seed in range(STEPS)]


@functools.cache
def one_rank(dropout: float) -> Outcome:
    """Return the run that all others must equal."""
    steps = [cut(batch, 1, 1) for batch in batches()]
    done = run_engine(small_decoder(dropout), steps, optimizer=OPTIMIZER)
    # Or the comparison would say nothing: it clips, it moves, targets are masked.
    assert max(done.norms) > OPTIMIZER.clip_norm and len(set(done.norms)) == STEPS
    assert len(set(done.targets)) > 3 and max(done.targets) < ROWS * 6
    return done


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micros", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_same_weights_on_every_layout(ranks, micros, mode, dropout):
    """A2, A5, B1, B2, B4, C002, C107: grouped heads, tied table, packed rows, masked targets."""
    want = one_rank(dropout)
    recompute, every = MODES[mode]
    got = run_engine(
        small_decoder(dropout), [cut(batch, ranks, micros) for batch in batches()],
        optimizer=OPTIMIZER, recompute=recompute, every=every, bucket_bytes=BUCKET_BYTES,
    )  # fmt: skip
    assert got.targets == want.targets
    for a, r in zip(got.losses + got.norms, want.losses + want.norms, strict=True):
        assert abs(a - r) <= TOLERANCE * max(1.0, abs(r))
    for state in got.states:
        assert_close(state.params, want.params, TOLERANCE)
        assert bits_of(state.params) == bits_of(got.params)
        assert state.committed == STEPS


def test_dropout_and_the_order_of_rows_matter():
    """Or the equalities above would hold for masks and rows that do nothing."""
    plain, dropped = one_rank(0.0), one_rank(0.3)
    assert plain.losses != dropped.losses
    # Rows in another order have other masks, and else the same losses.
    turned = [Batch(*(array[::-1].copy() for array in batch)) for batch in batches()]
    for dropout, want, same in ((0.0, plain, True), (0.3, dropped, False)):
        got = run_engine(
            small_decoder(dropout), [cut(batch, 1, 1) for batch in turned], optimizer=OPTIMIZER
        )
        assert (abs(got.losses[0] - want.losses[0]) < 1e-12) is same


def test_documents_of_a_row_do_not_see_each_other():
    """C009 in the engine: without the starts the same rows give another loss."""
    batch = packed_rows(ROWS, 0)
    apart, together = (
        run_engine(small_decoder(), [cut(b, 1, 1)]).losses[0]
        for b in (batch, batch._replace(starts=None))
    )
    assert abs(apart - together) > 1e-9


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_padding_changes_nothing(mode, dropout):
    """B1: rows with and without columns of padding, in microbatches of different length.

    Dropout addresses the longest row of the update, so the longest row stays in both.
    """
    from mpisim.data.tokenizer import PAD

    model = small_decoder(dropout, vocab_size=300)
    recompute, every = MODES[mode]

    def rows(lengths, columns, first=0):
        x = np.full((len(lengths), columns), PAD, np.int32)
        targets = np.full((len(lengths), columns), -1, np.int32)
        for row, length in enumerate(lengths):
            x[row, :length] = np.arange(length) * 3 + row + first
            targets[row, :length] = np.arange(length) * 5 + row + first
        return Batch(x, targets)

    options = {"recompute": recompute, "every": every, "optimizer": OPTIMIZER}
    one, long, short = rows((6, 3), 6), rows((2, 4), 6, first=2), rows((2, 4), 4, first=2)
    whole = run_engine(model, [[[rows((6, 3, 2, 4), 6)]]] * 3, **options)
    for parts in ([[one, long]], [[one, short]], [[one], [short]], [[short], [one]]):
        # A rank's rows come first in dropout's array, so the last layout has other masks.
        if dropout and parts[0][0] is short:
            continue
        got = run_engine(model, [parts] * 3, **options)
        assert got.targets == whole.targets == [15] * 3
        assert_close(got.params, whole.params, TOLERANCE)
        assert max(np.abs(np.subtract(got.losses, whole.losses))) < TOLERANCE * 10


# --- real processes --------------------------------------------------------------------------


def decoder_on_a_rank(transport, micros, recompute, every, dropout):
    """Train on one MPI rank; return weights and losses."""
    model = small_decoder(dropout)
    steps = [cut(batch, transport.size, micros) for batch in batches()]
    plans = make_plans(model, steps, recompute=recompute, every=every, bucket_bytes=BUCKET_BYTES)
    state = make_state(transport, model, plans[0], optimizer=OPTIMIZER)
    engine = Engine(state, STEPS)
    losses = []
    for number, (plan, parts) in enumerate(zip(plans, steps, strict=True)):
        mine = parts[transport.rank]
        done = engine.train_step(plan, number, copies(mine), num_targets(mine))
        losses.append(done.global_loss_sum / done.global_targets)
    state.dp.close()
    state.control.close()
    return {"losses": losses, "weights": {n: a.tolist() for n, a in state.params.items()}}


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "micros", "mode"), [(2, 2, "every2"), (3, 1, "selective")])
def test_the_same_weights_on_real_ranks(ranks, micros, mode):
    """The bar on processes: within the tolerance of one rank, and the bits of threads."""
    dropout = 0.3
    recompute, every = MODES[mode]
    found = mpi_run(
        decoder_on_a_rank, ranks, micros=micros, recompute=recompute, every=every, dropout=dropout
    )
    threads = run_engine(
        small_decoder(dropout), [cut(batch, ranks, micros) for batch in batches()],
        optimizer=OPTIMIZER, recompute=recompute, every=every, bucket_bytes=BUCKET_BYTES,
    )  # fmt: skip
    want = one_rank(dropout)
    for rank in found:
        weights = {name: np.array(values) for name, values in rank["weights"].items()}
        assert_close(weights, want.params, TOLERANCE)
        assert_close(weights, threads.params, 0.0)
        assert rank["losses"] == threads.losses

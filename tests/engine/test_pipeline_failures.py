"""Wrong messages, stages that fail, numbers that are not finite: everyone ends or skips, whole."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from pipeline_jobs import ADAMW, SCHEDULES, TIED, Case, pipeline_model, watch
from planting import FLOAT16
from small_jobs import (
    VOCAB,
    bits_of,
    cut,
    gradients_are_zero,
    packed_rows,
    snapshot,
    start_engine,
)

from mpisim.comm.frames import read_header, write_header
from mpisim.config.schema import OptimizerSection
from mpisim.engine.loss_scale import LossScale
from mpisim.errors import MessageMismatch, MpisimError, PeerLost, RecomputeMismatch
from mpisim.plan.ops import (
    Backward,
    BackwardInput,
    BackwardWeight,
    ExchangeTied,
    Forward,
    GatherMetrics,
    Recompute,
    RecvActivation,
    RecvGrad,
    ReduceScalars,
    SendActivation,
    SendGrad,
    StartSync,
    WaitSend,
)

MICROS = 3


class Job:
    """Two steps of a pipeline, the second with a fault; what every rank was before it."""

    def __init__(self, case, act=None, prepare=None, **options):
        self.case, self.states, self.before = case, {}, {}

        def ready(state):
            self.states[state.rank] = state

            def observe(op):
                if state.step.step == 0 and isinstance(op, GatherMetrics):
                    self.before[state.rank] = snapshot(state)
                if state.step.step == 1 and act is not None:
                    act(state, op)

            watch(state, observe)
            if prepare is not None:
                prepare(state)

        # As many rows each: whoever fails, the shapes of all messages are the same.
        steps = [
            cut(packed_rows(2 * MICROS * case.dp, seed, 3), case.dp, MICROS) for seed in (0, 1)
        ]
        self.job, self.outcome = start_engine(
            case.model(), steps, prepare=ready, **{"optimizer": ADAMW} | case.options | options
        )

    @property
    def first(self):
        """Rank and error of the first to fail."""
        return next(iter(self.job.errors.items()))

    def assert_all_end_whole(self, kind):
        """Every rank has raised: `kind`, or that it lost another; nothing is changed or left."""
        assert len(self.job.errors) == len(self.states) == self.case.pp * self.case.dp
        rank, error = self.first
        assert type(error) is kind
        for other in self.job.errors.values():
            assert isinstance(other, (kind, PeerLost)), repr(other)
        assert len(self.outcome.losses) == 1
        for rank, state in self.states.items():
            assert snapshot(state) == self.before[rank], rank
            assert gradients_are_zero(state) and state.step is None


# --- wrong messages --------------------------------------------------------------------------


def relabel(**changes):
    """Return what gives a frame another header; the payload stays."""

    def change(frame):
        head = read_header(frame)
        values = {
            name: value(getattr(head, name)) if callable(value) else value
            for name, value in changes.items()
        }
        other = np.empty_like(frame)
        other[...] = frame
        write_header(other, replace(head, **values))
        return other

    return change


def halves(shape):
    """Return the shape of as many bytes in half as many rows."""
    return (*shape[:-1], shape[-1] * 2)


FAULTS = {
    "step": (relabel(step=lambda step: step + 6), "step 7 instead of 1"),
    "micro": (relabel(micro=2), "micro 2 instead of 1"),
    "boundary": (relabel(boundary=3), "boundary 3 instead of 0"),
    "evaluation": (relabel(evaluation=True), "evaluation True instead of False"),
    "shape": (relabel(shape=lambda s: s[::-1]), r"shape \(4, 3, 2\) instead of \(2, 3, 4\)"),
    "dtype": (
        relabel(dtype="float32", shape=halves),
        r"shape \(2, 3, 8\) instead of \(2, 3, 4\), dtype float32 instead of float64",
    ),
    "kind": (
        relabel(kind=lambda kind: {"activation": "grad", "grad": "activation"}[kind]),
        "kind (grad|activation) instead of (grad|activation)",
    ),
}
LENGTHS = {
    "short": (lambda frame: frame[:-8].copy(), "-8 bytes"),
    "only a header": (lambda frame: frame[:64].copy(), "the header alone"),
    "empty": (lambda frame: frame[:0].copy(), "nothing"),
    "long": (lambda frame: np.concatenate([frame, frame[:8]]), "+8 bytes"),
}


def send_wrong(case, kind, change, **options):
    """Let the sender of microbatch 1 over boundary 0 send something else in the second step."""
    sender = {"activation": 0, "grad": 1}[kind]

    def prepare(state):
        if state.rank != sender:
            return
        send, count = state.links.send, [0]

        def other(frame, peer, boundary, way):
            if state.step.step == 1 and (boundary, way) == (0, kind):
                count[0] += 1
                if count[0] == 2:
                    frame = change(frame)
            return send(frame, peer, boundary, way)

        state.links.send = other

    return sender, Job(case, prepare=prepare, **options)


@pytest.mark.parametrize("kind", ["activation", "grad"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_frame_that_is_not_the_expected_one_names_both_ranks_and_ops(fault, kind):
    change, said = FAULTS[fault]
    sender, job = send_wrong(Case(pp=2), kind, change)
    job.assert_all_end_whole(MessageMismatch)
    rank, error = job.first
    assert rank == 1 - sender
    sent, text = {"activation": "Activation", "grad": "Grad"}, str(error)
    if fault != "kind":
        name = sent[kind]
        assert re.search(rf"Recv{name} boundary 0 micro 1 of step 1 on rank {rank} must get", text)
        assert re.search(rf"Send{name} boundary \d micro \d of step \d", text)
    assert f"from rank {sender}" in text and f"on rank {sender}: " in text
    assert re.search(said, text), text


@pytest.mark.parametrize(("kind", "synchronous"), [("activation", False), ("grad", True)])
@pytest.mark.parametrize("fault", LENGTHS)
def test_a_frame_of_another_length_is_refused_by_its_receiver(fault, kind, synchronous):
    sender, job = send_wrong(Case(pp=3), kind, LENGTHS[fault][0], synchronous=synchronous)
    job.assert_all_end_whole(MessageMismatch)
    rank, error = job.first
    assert rank == 1 - sender
    name = {"activation": "Activation", "grad": "Grad"}[kind]
    assert f"rank {sender}" in str(error) and f"rank {rank}" in str(error)
    assert re.search(rf"It was received for Recv{name}\(?.*micro.*1", str(error)), str(error)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_wrong_frame_of_one_replica_ends_all_of_them(zero):
    _, job = send_wrong(Case(pp=2, dp=2, zero=zero, schedule="zb-h1"), "grad", FAULTS["micro"][0])
    job.assert_all_end_whole(MessageMismatch)
    assert job.first[0] == 0


def test_a_peer_that_is_a_step_ahead_is_noticed():
    """Not a planted header: the engine of one rank is told another step."""
    case = Case(pp=2)

    def prepare(state):
        if state.rank == 1:
            enter = state.enter

            def ahead(plan, step):
                if step.step == 1:
                    step.step = 2
                enter(plan, step)

            state.enter = ahead

    job = Job(case, prepare=prepare)
    job.assert_all_end_whole(MessageMismatch)
    rank, error = job.first
    assert rank == 1  # the first frame of the step comes from rank 0
    assert "RecvActivation boundary 0 micro 0 of step 2 on rank 1" in str(error)
    assert "SendActivation boundary 0 micro 0 of step 1 on rank 0: step 1 instead of 2" in str(
        error
    )


# --- stages that fail ------------------------------------------------------------------------


class MadeUpError(Exception):
    pass


FAILURES = [
    (Case(pp=2), 1, Forward),
    (Case(pp=3, schedule="gpipe"), 1, SendActivation),
    (Case(pp=3, schedule="1f1b", recompute=("full", 2)), 1, RecvGrad),
    (Case(pp=2, schedule="zb-h1", dp=2, zero=1), 2, BackwardInput),
    (Case(pp=2, schedule="zb-h1", dp=2, zero=2), 1, BackwardWeight),
    (Case(pp=2, schedule="interleaved", dp=2, zero=3), 3, RecvActivation),
    (Case(pp=2, schedule="interleaved", dp=2), 0, SendGrad),
    (Case(pp=4, schedule="naive"), 2, WaitSend),
    (Case(pp=2, dp=3), 4, StartSync),
    (Case(pp=2, dp=2, zero=2), 3, ExchangeTied),
    (Case(pp=2, dp=2, zero=3, recompute=("full", 2)), 0, Recompute),
]


@pytest.mark.parametrize(
    ("case", "culprit", "kind"), FAILURES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_stage_that_raises_in_the_middle_ends_all_and_leaves_all_whole(case, culprit, kind):
    def act(state, op):
        last = getattr(op, "micro", 1) in (1, -1)
        if state.rank == culprit and isinstance(op, kind) and last:
            raise MadeUpError(f"after {op}")

    # Half of them with sends that need their receiver.
    job = Job(case, act, synchronous=culprit % 2 == 0)
    job.assert_all_end_whole(MadeUpError)
    assert job.first[0] == culprit
    assert sum(isinstance(error, MadeUpError) for error in job.job.errors.values()) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_replay_that_gives_other_bits_is_refused_at_the_end_of_a_stage(schedule, stage):
    """The output left long ago: a checksum of it stayed."""
    case = Case(pp=3, schedule=schedule, recompute=("full", 2))
    found = []

    def act(state, op):
        ends = state.replay_ends
        leaves = isinstance(op, Forward) and ends.get((op.block, op.micro)) is False
        if state.rank == stage and leaves and op.micro == 1 and not found:
            assert state.step.checksums.keys() >= {(op.block, op.micro)}
            found.append(op.block)
            inputs = [key for key in state.step.inputs if key[1] == op.micro]
            state.step.inputs[inputs[-1]][0, 0, 0] += 1e-9

    job = Job(case, act)
    job.assert_all_end_whole(RecomputeMismatch)
    rank, error = job.first
    assert rank == stage
    assert str(error).startswith(f"the replay of block {found[0]} must give the bits of its first")
    assert "for microbatch 1 in step 1" in str(error)


def test_a_changed_checksum_is_a_replay_of_other_bits():
    def act(state, op):
        for key in state.step.checksums:
            state.step.checksums[key] ^= 1 << 31

    job = Job(Case(pp=2, schedule="gpipe", recompute=("full", 2)), act)
    job.assert_all_end_whole(RecomputeMismatch)
    assert job.first[0] == 0


# --- numbers that are not finite -------------------------------------------------------------

SCALE = 2.0**10


def test_an_update_that_overflows_in_one_stage_is_made_in_none():
    """Gradient and norm are finite, and no other stage could know it."""
    (rows,) = cut(packed_rows(2 * MICROS, 1, 3), 1, 1)
    unused = min(set(range(VOCAB)) - set(rows[0].x.reshape(-1).tolist()))

    def prepare(state):
        if state.rank == 0:
            # A token that no row has: what it weighs is not seen in the loss.
            state.master[TIED][unused, 0] = -1.7e308

    def act(state, op):
        if state.rank == 0 and isinstance(op, ReduceScalars) and op.kind == "loss":
            state.grads[TIED][unused, 0] = 1e308

    steps = OptimizerSection(kind="sgd", lr=0.5, momentum=0.0)
    job = Job(Case(pp=3, tied=False), act, prepare=prepare, optimizer=steps)
    job.assert_all_end_whole(MpisimError)
    for error in job.job.errors.values():
        assert isinstance(error, PeerLost) or "the update must be finite" in str(error)


def skipping_run(case, act, ready=lambda state: None, **options):
    """Train three steps in float16, the second with a fault; return states, and who skipped."""
    skipped, weights = {}, {}

    def prepare(state):
        def observe(op):
            step = state.step.step
            if step == 1:
                act(state, op)
            if isinstance(op, GatherMetrics):
                skipped.setdefault(step, set()).add(state.step.skipped)
                whole = [a.tobytes() for s in state.stores for a in (s.master, *s.moments)]
                weights[state.rank, step] = whole

        watch(state, observe)
        ready(state)

    steps = [cut(packed_rows(4 * case.dp, seed, 3), case.dp, 2) for seed in range(3)]
    job, done = start_engine(
        pipeline_model(case.pp), steps, policy=FLOAT16, optimizer=ADAMW, prepare=prepare,
        loss_scale=LossScale("dynamic", SCALE), **case.options | options,
    )  # fmt: skip
    assert not job.errors, job.errors
    assert skipped == {0: {False}, 1: {True}, 2: {False}}
    assert {(state.committed, state.loss_scale.value) for state in done.states} == {(2, SCALE / 2)}
    for rank in range(case.pp * case.dp):
        assert weights[rank, 0] == weights[rank, 1] != weights[rank, 2]
    for rank, params in enumerate(done.gathered):
        assert bits_of(params) == bits_of(done.gathered[rank % case.pp])
    return done


@pytest.mark.parametrize(
    ("case", "culprit"),
    [
        (Case(pp=3, schedule="1f1b"), 1),
        (Case(pp=2, schedule="zb-h1", dp=2, zero=1), 3),
        (Case(pp=2, schedule="gpipe", dp=3, zero=2), 0),
        (Case(pp=2, schedule="interleaved", dp=2, zero=3), 2),
    ],
)
def test_an_overflow_in_one_stage_makes_all_skip(case, culprit):
    """The stages before and after it, and all replicas, agree on the scale and go on."""

    def act(state, op):
        if state.rank == culprit and isinstance(op, (Backward, BackwardWeight)) and op.micro == 0:
            name = state.blocks[op.block].full_names
            state.grads[next(iter(name.values()))].reshape(-1)[0] = np.inf

    skipping_run(case, act)


CODECS = [("none", "none"), ("int8", "int4-token"), ("int2-token", "int8")]


def poison(kind):
    """Return what makes one number of a boundary's microbatch 1 NaN, on the rank that sends it."""

    def act(state, op):
        flow, ends = state.step.flow, isinstance(op, Forward)
        if kind == "grad":
            flow, ends = state.step.grad_flow, isinstance(op, (Backward, BackwardInput))
        if not ends or op.micro != 1 or op.block not in state.blocks:
            return
        for (block, micro), x in flow.items():
            if micro == 1 and block not in state.blocks and state.dp.index == 0:
                x.reshape(-1)[3] = np.nan

    return act


@pytest.mark.parametrize("codecs", CODECS, ids="-".join)
@pytest.mark.parametrize("kind", ["activation", "grad"])
def test_a_nan_crosses_a_boundary_and_makes_all_skip(kind, codecs):
    """No codec may turn it into a number: whoever decodes it must see it."""
    skipping_run(Case(pp=3, schedule="1f1b"), poison(kind), codecs=codecs)


@pytest.mark.parametrize("codecs", [*CODECS, ("fp16", "bf16")], ids="-".join)
@pytest.mark.parametrize("kind", ["activation", "grad"])
def test_a_nan_crosses_a_boundary_and_ends_the_job_without_a_loss_scale(kind, codecs):
    job = Job(Case(pp=2, dp=2), poison(kind), codecs=codecs)
    job.assert_all_end_whole(MpisimError)
    assert re.search("must be finite; got .*No update was made", str(job.first[1]))


def test_error_feedback_does_not_keep_a_nan():
    """What a gradient lost is added to the next one: a skipped step must not poison it."""
    lost = []

    def ready(state):
        if state.rank == 1:
            state.residuals = {0: np.zeros((2, 3, 4), np.float16)}
            state.ledger.hold("comm_buffers", *state.residuals.values())
            watch(state, lambda op: lost.append(state.residuals[0].copy()))

    skipping_run(Case(pp=2), poison("grad"), ready, codecs=("none", "int4"))
    assert np.any(lost[-1]) and all(np.isfinite(residual).all() for residual in lost)

"""Plans with stages: what is built, how much is in flight, and every fault that is refused.

Golden files of these plans are among those of `test_plan_text`.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from small_plans import edited, moved, pipeline_plan, refused, removed, replaced

from mpisim.errors import DeadlockError, PlanError
from mpisim.mesh import Mesh
from mpisim.plan.check import check_plan
from mpisim.plan.check_pipeline import in_flight
from mpisim.plan.ops import (
    ALL_MICROS,
    Backward,
    BackwardInput,
    BackwardWeight,
    CheckGradients,
    ExchangeTied,
    Forward,
    LoadBatch,
    Recompute,
    RecvActivation,
    RecvGrad,
    ReduceScalars,
    Reshard,
    SendActivation,
    SendGrad,
    StartSync,
    WaitSend,
    WaitSync,
    WaitUnshard,
)
from mpisim.plan.text import op_text, parse_plan, plan_text

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1")
MICROS = (1, 2, 3, 4, 8)

FACTORS = {
    "pp": (2, 3, 4),
    "schedule": SCHEDULES,
    "micros": MICROS,
    "zero": (0, 1, 2, 3),
    "dp": (1, 2),
    "recompute": (("none", 1), ("selective", 1), ("full", 1), ("full", 2)),
    "tied": (True, False),
    "overlap": (True, False),
    "prefetch": (True, False),
}


def pairs_of(case):
    """Return the pairs of settings that a case has, by their places in `FACTORS`."""
    return set(itertools.combinations(enumerate(case), 2))


def make_cases():
    """Return every pp x schedule x microbatches, the rest chosen so that all pairs occur."""
    first, rest = list(FACTORS.values())[:3], list(FACTORS.values())[3:]
    choices = list(itertools.product(*rest))
    seen, cases = set(), []
    for number, head in enumerate(itertools.product(*first)):
        # Of a few that differ in everything the one with most that is new.
        some = [choices[(number * 37 + shift * 29) % len(choices)] for shift in range(24)]
        best = max(some, key=lambda tail: len(pairs_of((*head, *tail)) - seen))
        cases.append((*head, *best))
        seen |= pairs_of(cases[-1])
    return cases, seen


CASES, SEEN = make_cases()


def test_the_cases_cover_every_pair_of_settings():
    wanted = set()
    for (a, first), (b, second) in itertools.combinations(enumerate(FACTORS.values()), 2):
        wanted |= {((a, x), (b, y)) for x in first for y in second}
    assert wanted <= SEEN
    assert len(CASES) == 75


def case_plan(case):
    options = dict(zip(FACTORS, case, strict=True))
    mode, every = options.pop("recompute")
    names = options.pop("pp"), options.pop("micros"), options.pop("schedule")
    return pipeline_plan(*names, **options, recompute=mode, recompute_every=every)


def kinds(plan, kind, rank=0):
    return [op for op in plan.ranks[rank] if isinstance(op, kind)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_every_built_plan_passes(case):
    """All of it: proof, text, sums of each bucket, ends of the tied table, order of additions."""
    plan = case_plan(case)
    check_plan(plan)
    assert parse_plan(plan_text(plan)) == plan
    _, _, num_micros, zero, *_ = case
    micros = range(num_micros) if zero >= 2 else (ALL_MICROS,)
    for rank, ops in enumerate(plan.ranks):
        own = plan.rank_buckets(rank)
        # One reduction per bucket and step; with gradients sharded one per microbatch.
        starts = sorted((op.bucket, op.micro) for op in ops if isinstance(op, StartSync))
        assert starts == sorted((bucket.index, micro) for bucket in own for micro in micros)
        waits = sorted((op.bucket, op.micro) for op in ops if isinstance(op, WaitSync))
        assert waits == starts
        exchanges = [op for op in ops if isinstance(op, ExchangeTied)]
        twins = [bucket for bucket in own if bucket.twin >= 0]
        assert [op.bucket for op in exchanges] == [bucket.index for bucket in twins]
        for op, bucket in zip(exchanges, twins, strict=True):
            of_it = [
                n for n, other in enumerate(ops)
                if isinstance(other, StartSync if zero < 2 else WaitSync)
                and other.bucket == bucket.index
            ]  # fmt: skip
            place = ops.index(op)
            assert place < min(of_it) if zero < 2 else place > max(of_it)
        # Gradients are added in the order of microbatches, whatever the schedule.
        for block in plan.rank_blocks(rank):
            adds = [
                op.micro for op in ops
                if isinstance(op, (Backward, BackwardWeight)) and op.block == block
            ]  # fmt: skip
            assert adds == list(range(num_micros))
    ends = sum(bool(kinds(plan, ExchangeTied, rank)) for rank in range(plan.mesh.size))
    assert ends == (2 * plan.mesh.dp if dict(zip(FACTORS, case, strict=True))["tied"] else 0)


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("zero", [0, 3])
def test_every_evaluation_passes(pp, schedule, zero):
    """Forwards and activations only, under dp x pp, with uneven rows and ranks without rows."""
    rows = [(2, 1)] * pp + [(1, 0)] * pp
    plan = pipeline_plan(pp, 2, schedule, dp=2, kind="eval", rows=rows, zero=zero, prefetch=True)
    check_plan(plan)
    assert parse_plan(plan_text(plan)) == plan
    last = len(plan.stages) - 1
    for rank in range(plan.mesh.size):
        sends = {(op.boundary, op.micro) for op in kinds(plan, SendActivation, rank)}
        places = range(plan.mesh.coordinate(rank)["pp"], last, pp)
        assert sends == {(stage, micro) for stage in places for micro in range(2)}
        assert not kinds(plan, (SendGrad, RecvGrad, StartSync, ExchangeTied), rank)
        assert in_flight(plan, rank) == 0


def test_uneven_rows_travel_in_their_own_shapes():
    """The rows of a microbatch are those of its pp group: 4 tokens a row, 2 numbers a token."""
    plan = pipeline_plan(2, 2, "1f1b", dp=2, rows=[(3, 0), (3, 0), (2, 1), (2, 1)])
    check_plan(plan)
    shapes = [[op.shape for op in kinds(plan, SendActivation, rank)] for rank in (0, 2)]
    assert shapes == [[(3, 4, 2), (0, 4, 2)], [(2, 4, 2), (1, 4, 2)]]
    for rank in (1, 3):
        assert [op.shape for op in kinds(plan, RecvActivation, rank)] == shapes[rank // 2]
        assert [op.shape for op in kinds(plan, SendGrad, rank)] == shapes[rank // 2]
    peers = [{op.peer for op in kinds(plan, (SendActivation, SendGrad), r)} for r in range(4)]
    assert peers == [{1}, {0}, {3}, {2}]


def test_codecs_are_those_of_their_direction():
    plan = pipeline_plan(3, 2, "1f1b", codecs=("int4", "bf16"))
    check_plan(plan)
    for ops in plan.ranks:
        for op in ops:
            if isinstance(op, (SendActivation, RecvActivation)):
                assert op.codec == "int4"
            elif isinstance(op, (SendGrad, RecvGrad)):
                assert op.codec == "bf16"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_at_most_one_frame_per_boundary_and_direction_is_alive(schedule):
    plan = pipeline_plan(3, 4, schedule)
    for ops in plan.ranks:
        alive = set()
        for op in ops:
            if isinstance(op, (SendActivation, SendGrad)):
                key = (op.boundary, "grad" if isinstance(op, SendGrad) else "activation")
                assert key not in alive
                alive.add(key)
            elif isinstance(op, WaitSend):
                alive.remove((op.boundary, op.kind))
        assert not alive


# --- in flight -------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("micros", MICROS)
def test_microbatches_in_flight(pp, micros):
    """Bars: 1F1B keeps min(N - i, M) on stage i, GPipe M; ZB-H1 as many as its first stage."""
    expected = {
        "naive": [1] * pp,
        "gpipe": [micros] * pp,
        "1f1b": [min(pp - place, micros) for place in range(pp)],
        "zb-h1": [min(pp, micros)] * pp,
    }
    for schedule, most in expected.items():
        plan = pipeline_plan(pp, micros, schedule, dp=2)
        counted = [in_flight(plan, rank) for rank in range(plan.mesh.size)]
        # The lag of weight gradients is bounded by what there is to lag behind.
        assert counted == most * 2 if schedule != "zb-h1" else max(counted) <= min(pp, micros)
        if schedule == "zb-h1":
            assert counted[0] == min(pp, micros)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("micros", MICROS)
def test_zb_h1_runs_no_further_ahead_than_1f1b(pp, micros):
    """Until their input gradients are there at most min(N - i, M) microbatches are on stage i."""
    plan = pipeline_plan(pp, micros, "zb-h1")
    for rank in range(pp):
        last = plan.rank_blocks(rank)[-1]
        ahead = most = 0
        for op in plan.ranks[rank]:
            if getattr(op, "block", None) == last:
                ahead += isinstance(op, Forward) - isinstance(op, BackwardInput)
            most = max(most, ahead)
        assert most == min(pp - rank, micros)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2])
def test_interleaving_keeps_chunks_of_a_group_and_the_way_to_the_last_stage(pp, groups):
    """2 (N - i - 1) + (v - 1) N + 1 chunks at most, each one of v parts of a microbatch."""
    plan = pipeline_plan(pp, groups * pp, "interleaved")
    for rank in range(pp):
        chunks = min(2 * (pp - rank - 1) + pp + 1, 2 * groups * pp)
        assert in_flight(plan, rank) == chunks / 2
    # A whole number is written as one.
    assert isinstance(in_flight(plan, 0), int) == (chunks_of_first(pp, groups) % 2 == 0)


def chunks_of_first(pp, groups):
    return min(3 * pp - 1, 2 * groups * pp)


# --- messages that are refused ---------------------------------------------------------------

PLAN = pipeline_plan(2, 3, "1f1b", num_blocks=2)
"""Two ranks: (embed, block0) and (block1, head), tied; three microbatches."""
SHAPE = (2, 4, 2)
THREE = pipeline_plan(3, 3, "1f1b")
SPLIT = pipeline_plan(2, 3, "zb-h1", num_blocks=2)
"""As PLAN, with split backwards."""


def send(micro, peer=1, boundary=0):
    return SendActivation(boundary, micro, peer, SHAPE, "none")


def recv(micro, peer=0, boundary=0):
    return RecvActivation(boundary, micro, peer, SHAPE, "none")


def send_grad(micro, peer=0, boundary=0):
    return SendGrad(boundary, micro, peer, SHAPE, "none")


def recv_grad(micro, peer=1, boundary=0):
    return RecvGrad(boundary, micro, peer, SHAPE, "none")


def insert(plan, op, before, ranks):
    return edited(plan, lambda ops: ops.insert(ops.index(before), op), ranks)


def swap_micros(ops):
    """Run the forwards of microbatches 0 and 1 in the other order."""
    for index, op in enumerate(ops):
        if isinstance(op, (LoadBatch, Forward, RecvActivation)) and op.micro < 2:
            ops[index] = replace(op, micro=1 - op.micro)


def swapped(plan, one, two, ranks):
    def edit(ops):
        first, second = ops.index(one), ops.index(two)
        ops[first], ops[second] = two, one

    return edited(plan, edit, ranks)


def test_a_removed_receive_of_an_activation_is_refused():
    plan = removed(PLAN, recv(1), ranks=[1])
    rule = (
        r"forward must follow the receive of the output of block block0, which rank 0 sends; "
        r"got rank 1:\n(.*\n)+Add RecvActivation boundary=0 micro=1 peer=0 before it\.$"
    )
    refused(plan, rule, op="Forward block=block1 micro=1 keep=all", ranks=[1])


def test_a_removed_receive_of_a_gradient_is_refused():
    plan = removed(PLAN, recv_grad(1), ranks=[0])
    rule = (
        r"backward must follow the receive of the gradient of block block1, which rank 1 sends; "
        r"got rank 0:\n(.*\n)+Add RecvGrad boundary=0 micro=1 peer=1 before it\.$"
    )
    refused(plan, rule, op="Backward block=block0 micro=1", ranks=[0])


@pytest.mark.parametrize(
    ("rank", "op", "behind"),
    [(0, recv_grad(1), Backward("block0", 1)), (1, recv(1), Forward("block1", 1))],
)
def test_a_receive_behind_what_reads_it_is_to_be_moved_up(rank, op, behind):
    def edit(ops):
        ops.remove(op)
        ops.insert(ops.index(behind) + 1, op)

    place = op_text(op).split(" shape")[0]
    refused(
        edited(PLAN, edit, [rank]), rf"must follow the receive(.*\n)+Move up {place} before it\.$",
        op=op_text(behind), ranks=[rank],
    )  # fmt: skip


def test_a_missing_receive_of_another_replica_and_chunk_names_its_own_sender():
    """Rank 2 of a second replica holds stages 0 and 2; stages 1 and 3 are on rank 3."""
    plan = pipeline_plan(2, 2, "interleaved", dp=2)
    for kind, tensor, boundary in ((RecvActivation, "output", 1), (RecvGrad, "gradient", 2)):
        lost = next(op for op in plan.ranks[2] if isinstance(op, kind) and op.boundary == boundary)
        assert lost.peer == 3
        remedy = rf"Add {kind.__name__} boundary={boundary} micro={lost.micro} peer=3 before it"
        rule = rf"receive of the {tensor} of block \w+, which rank 3 sends(.*\n)+{remedy}"
        refused(removed(plan, lost, ranks=[2]), rule, ranks=[2])


def test_a_removed_send_leaves_the_receiver_with_the_next_one():
    plan = removed(removed(PLAN, send(1), ranks=[0]), WaitSend(0, 1, 1, "activation"), ranks=[0])
    refused(plan, "must match the send that is next in line", ranks=[0, 1])


def test_a_removed_last_send_strands_the_receiver():
    plan = PLAN
    for op in (send(2), WaitSend(0, 2, 1, "activation")):
        plan = removed(plan, op, ranks=[0])
    refused(plan, "for ever", ranks=[0, 1], error=DeadlockError)


def test_microbatches_that_are_received_in_another_order_are_refused():
    """C-type fault: the gradient of microbatch 1 would be taken for that of 0."""
    plan = swapped(PLAN, recv_grad(0), recv_grad(1), ranks=[0])
    refused(plan, "must match the send that is next in line", ranks=[0, 1])


def test_microbatches_that_are_sent_in_another_order_are_refused():
    gpipe = pipeline_plan(2, 3, "gpipe")
    check_plan(gpipe)

    def edit(ops):
        for index, op in enumerate(ops):
            if isinstance(op, (LoadBatch, Forward, SendActivation)) and op.micro < 2:
                ops[index] = replace(op, micro=1 - op.micro)
            elif isinstance(op, WaitSend) and op.micro < 2:
                ops[index] = replace(op, micro=1 - op.micro)

    refused(edited(gpipe, edit, ranks=[0]), "a receive must match the send", ranks=[0, 1])
    check_plan(edited(edited(gpipe, edit, [0]), swap_micros, [1]))


@pytest.mark.parametrize(
    "wrong", [{"shape": (2, 2, 4)}, {"shape": (16,)}, {"codec": "fp16"}, {"micro": 1}]
)
@pytest.mark.parametrize(("rank", "op"), [(1, recv(0)), (0, recv_grad(0))])
def test_a_receive_of_something_else_is_refused_with_both_ranks(rank, op, wrong):
    """Shape, codec and microbatch are those of the sender: nothing is decoded by guess."""
    plan = replaced(PLAN, op, replace(op, **wrong), ranks=[rank])
    with pytest.raises(PlanError, match="must match the send that is next in line") as caught:
        check_plan(plan)
    text = str(caught.value)
    assert f"for {op_text(replace(op, **wrong))} on rank {rank}" in text
    marked = re.findall(r"^  rank (\d+) op +\d+ >> (.*)$", text, flags=re.MULTILINE)
    other = send(0) if rank else send_grad(0)
    assert sorted(marked) == sorted(
        [(str(rank), op_text(replace(op, **wrong))), (str(1 - rank), op_text(other))]
    )
    (what,) = wrong
    assert text.splitlines()[-1] == (
        "Send and receive the microbatches in the same order, each once."
        if what == "micro"
        else f"Give both ends one {what}."
    )


@pytest.mark.parametrize(("rank", "micro"), [(0, 1), (1, 0)])
def test_a_receive_that_nobody_wrote_is_refused(rank, micro):
    """The send is the last of its rank: it would stay in the library for ever."""

    def edit(ops):
        at = ops.index(BackwardWeight("embed", 2)) if rank == 0 else ops.index(CheckGradients())
        extra = send_grad(2) if rank else send(2)
        ops.insert(at, extra)

    with pytest.raises(PlanError, match=r"a send must follow the (forward|backward) of its stage"):
        check_plan(edited(SPLIT, edit, ranks=[rank]))


def test_a_send_without_a_receive_is_refused():
    """An evaluation whose last activation nobody takes; the forwards that need it are left out."""
    plan = pipeline_plan(2, 2, "1f1b", kind="eval")

    def edit(ops):
        ops.remove(recv(1))
        ops.remove(Forward("head", 1))
        ops.remove(LoadBatch(1))
        ops.remove(ReduceScalars("eval", 3, "float64"))

    # Both sides leave out the sum, and the sender does not wait.
    plan = edited(plan, edit, ranks=[1])
    plan = removed(plan, ReduceScalars("eval", 3, "float64"), ranks=[0])
    plan = removed(plan, WaitSend(0, 1, 1, "activation"), ranks=[0])
    rule = "every send must have its receive; got none on rank 1 for the activation over boundary 0"
    refused(plan, rule, op=op_text(send(1)), ranks=[0])


@pytest.mark.parametrize(
    ("rank", "op"),
    [
        (0, WaitSend(0, 2, 1, "activation")),
        (1, WaitSend(0, 2, 0, "grad")),
    ],
)
def test_a_frame_that_is_not_waited_for_is_left_behind(rank, op):
    rule = rf"nothing behind; got frames \[\(0, '{op.kind}'\)\] on rank {rank}"
    refused(removed(PLAN, op, ranks=[rank]), rule, ranks=[rank])


def test_frames_that_are_waited_for_in_another_order_are_refused():
    first, second = (WaitSend(0, micro, 1, "activation") for micro in (0, 1))
    plan = moved(PLAN, first, CheckGradients(), ranks=[0])
    plan = removed(plan, second, ranks=[0])
    plan = insert(plan, second, CheckGradients(), [0])
    plan = swapped(plan, first, second, ranks=[0])
    refused(plan, "waited for in the order of their sends", ranks=[0])


@pytest.mark.parametrize(
    "wrong", [{"micro": 2}, {"boundary": 1}, {"kind": "grad"}, {"kind": "weights"}]
)
def test_a_wait_for_a_frame_that_was_not_posted_is_refused(wrong):
    op = WaitSend(0, 0, 1, "activation")
    plan = replaced(PLAN, op, replace(op, **wrong), ranks=[0])
    refused(plan, "posted before it is waited for", op=op_text(replace(op, **wrong)), ranks=[0])


def test_a_second_wait_for_a_frame_is_refused():
    op = WaitSend(0, 0, 1, "activation")
    refused(
        insert(PLAN, op, CheckGradients(), [0]), "posted before it is waited for", op=op_text(op)
    )


@pytest.mark.parametrize("peer", [0, -1, 2])
def test_a_message_to_oneself_or_to_nobody_is_refused(peer):
    op = WaitSend(0, 0, 1, "activation")
    for old in (recv_grad(0), op):
        wrong = replace(old, peer=peer)
        plan = replaced(PLAN, old, wrong, ranks=[0])
        rule = rf"another rank in 0\.\.1; got peer={peer} on rank 0:\n(.*\n)+Name the rank of its"
        refused(plan, rule, op=op_text(wrong), ranks=[0])


@pytest.mark.parametrize("op", [send(0), recv_grad(0)])
@pytest.mark.parametrize("peer", [0, 2, 3])
def test_a_message_to_another_replica_is_refused(op, peer):
    """Under dp x pp rank 1 holds the next stage of rank 0; rank 3 holds it of rank 2."""
    plan = pipeline_plan(2, 3, "1f1b", dp=2, num_blocks=2)
    check_plan(plan)
    wrong = replace(op, peer=peer)
    plan = replaced(plan, op, wrong, ranks=[0])
    if isinstance(op, RecvGrad) and peer:
        # Nobody sends there: whoever is drawn, it is no wrong tensor.
        with pytest.raises(DeadlockError, match="for ever") as caught:
            check_plan(plan)
        last = str(caught.value).splitlines()[-1]
        assert last == f"Set peer=1 in {op_text(wrong)} of rank 0: that rank holds block block1."
        return
    if isinstance(op, RecvGrad):
        refused(plan, "must be another rank", op=op_text(wrong), ranks=[0])
        return
    rule = (
        rf"the other side must be rank 1, which holds block block1; got peer={peer} on rank 0:\n"
        r"(.*\n)+Set peer=1\.$"
    )
    refused(plan, rule, op=op_text(wrong), ranks=[0])


@pytest.mark.parametrize(("rank", "op"), [(1, recv(0)), (0, recv_grad(0))])
def test_a_receive_from_a_rank_that_does_not_hold_the_stage_is_refused(rank, op):
    """The wrong sender has sent, too, so that only the receiver's rule is left."""
    plan = pipeline_plan(2, 3, "1f1b", dp=2, num_blocks=2)
    mates = {0: 3, 1: 2}
    wrong = replace(op, peer=mates[rank])
    plan = replaced(plan, op, wrong, ranks=[rank])
    back = send(0) if rank else send_grad(0)
    plan = replaced(plan, replace(back, peer=rank ^ 3 ^ 1), replace(back, peer=rank), [mates[rank]])
    refused(plan, "the other side must be ", ranks=[mates[rank]])


@pytest.mark.parametrize("boundary", [-1, 1, 5])
@pytest.mark.parametrize("op", [send(0), recv(0), send_grad(0), recv_grad(0)])
def test_a_boundary_that_does_not_exist_is_refused(op, boundary):
    wrong = replace(op, boundary=boundary)
    others = {SendActivation: recv, RecvActivation: send, SendGrad: recv_grad, RecvGrad: send_grad}
    mate = others[type(op)](0)
    plan = edited(
        PLAN,
        lambda ops: ops.__setitem__(
            slice(None),
            [replace(found, boundary=boundary) if found in (op, mate) else found for found in ops],
        ),
    )
    with pytest.raises(PlanError, match="a boundary must lie between two stages") as caught:
        check_plan(plan)
    sender = (
        wrong if isinstance(op, (SendActivation, SendGrad)) else replace(mate, boundary=boundary)
    )
    assert f">> {op_text(sender)}" in str(caught.value)


def test_a_boundary_of_two_other_stages_is_refused():
    """Rank 0 holds neither side of boundary 1."""
    op = SendActivation(0, 0, 1, SHAPE, "none")
    wrong = replace(op, boundary=1)
    refused(
        replaced(THREE, op, wrong, ranks=[0]),
        "block block0 must lie on the rank",
        op=op_text(wrong),
    )
    op = next(op for op in THREE.ranks[1] if isinstance(op, SendGrad))
    wrong = replace(op, boundary=1)
    plan = replaced(THREE, op, wrong, ranks=[1])
    refused(plan, "block head must lie on the rank", op=op_text(wrong), ranks=[1])


@pytest.mark.parametrize(
    ("rank", "op", "before", "rule"),
    [
        (0, send(0), Forward("block0", 0), "a send must follow the forward of its stage"),
        (1, send_grad(0), Backward("block1", 0), "a send must follow the backward of its stage"),
    ],
)
def test_a_send_before_its_tensor_is_made_is_refused(rank, op, before, rule):
    refused(moved(PLAN, op, before, ranks=[rank]), rule, op=op_text(op), ranks=[rank])


def test_an_output_that_is_not_sent_is_left_behind():
    """Nobody receives it either; what needs it, and the sum, are left out."""
    plan = pipeline_plan(2, 2, "1f1b", kind="eval")
    gone = (ReduceScalars, WaitSend, SendActivation, RecvActivation)

    def edit(ops):
        ops[:] = [op for op in ops if not isinstance(op, gone) or getattr(op, "micro", -1) == 0]
        if Forward("head", 1) in ops:
            ops.remove(Forward("head", 1))
            ops.remove(LoadBatch(1))

    rule = r"nothing behind; got block outputs \[\('block0', 1\)\] on rank 0"
    refused(edited(plan, edit), rule, ranks=[0])


# --- order on a stage that is refused --------------------------------------------------------


@pytest.mark.parametrize("block", ["block1", "head"])
def test_a_forward_on_a_rank_that_does_not_hold_the_block_is_refused(block):
    op = Forward(block, 0)
    plan = insert(PLAN, op, send(0), [0])
    refused(plan, f"block {block} must lie on the rank", op=op_text(op), ranks=[0])


def test_a_backward_on_a_rank_that_does_not_hold_the_block_is_refused():
    op = Backward("block1", 0)
    plan = insert(PLAN, op, recv_grad(0), [0])
    refused(plan, "block block1 must lie on the rank", op=op_text(op), ranks=[0])
    op = BackwardWeight("block1", 0)
    plan = insert(SPLIT, op, recv_grad(0), [0])
    refused(plan, "block block1 must lie on the rank", op=op_text(op), ranks=[0])


def test_gradients_that_are_added_in_another_order_are_refused():
    """All schedules must give the same bits: floating-point sums depend on the order."""
    gpipe = pipeline_plan(2, 2, "gpipe", tied=False)

    def edit(ops):
        for index, op in enumerate(ops):
            if isinstance(op, (Backward, RecvGrad, SendGrad)):
                ops[index] = replace(op, micro=1 - op.micro)
            if isinstance(op, WaitSend) and op.kind == "grad":
                ops[index] = replace(op, micro=1 - op.micro)

    check_plan(gpipe)
    plan = edited(gpipe, edit)
    refused(plan, "gradients must be added in the order of microbatches", ranks=[1])


def test_weight_gradients_in_another_order_are_refused():
    one, two = (BackwardWeight("embed", micro) for micro in (0, 1))
    plan = edited(
        SPLIT, lambda ops: (ops.remove(one), ops.insert(ops.index(two) + 1, one)), ranks=[0]
    )
    refused(plan, "in the order of microbatches", op=op_text(two), ranks=[0])


def test_a_weight_half_before_its_input_half_is_refused():
    op = BackwardWeight("block0", 0)
    plan = moved(SPLIT, op, BackwardInput("block0", 0), ranks=[0])
    rule = "the weight half of a backward must follow the input half"
    refused(plan, rule, op=op_text(op), ranks=[0])
    refused(insert(SPLIT, op, CheckGradients(), [0]), rule, op=op_text(op), ranks=[0])
    refused(insert(PLAN, op, Backward("block0", 0), [0]), rule, op=op_text(op), ranks=[0])


def test_an_input_half_that_runs_twice_is_refused():
    op = BackwardInput("block0", 0)
    plan = edited(SPLIT, lambda ops: ops.insert(ops.index(op) + 1, op), ranks=[0])
    refused(plan, "the input half of a backward must run once", op=op_text(op), ranks=[0])


def test_a_missing_weight_half_is_refused():
    plan = removed(SPLIT, BackwardWeight("block0", 2), ranks=[0])
    refused(plan, "gradients of all 3 microbatches of block block0", ranks=[0])


def test_a_weight_half_that_is_left_behind_is_refused():
    """All of the update is left out, so that only the leftovers are at fault."""

    def edit(ops):
        keep = (LoadBatch, Forward, BackwardInput, ReduceScalars, SendActivation, RecvActivation,
                SendGrad, RecvGrad, WaitSend)  # fmt: skip
        ops[:] = [op for op in ops if isinstance(op, keep) and getattr(op, "kind", "") not in
                  ("norm", "non_finite")]  # fmt: skip

    rule = r"nothing behind; got .*weight gradients to compute \[\('block0', 0\), "
    with pytest.raises(PlanError, match=rule):
        check_plan(edited(SPLIT, edit))


def test_a_missing_input_half_is_refused():
    plan = removed(SPLIT, BackwardInput("block0", 1), ranks=[0])
    with pytest.raises(PlanError, match="backward must follow the backward of the block after"):
        check_plan(plan)


@pytest.mark.parametrize("kind", [BackwardInput, Backward])
def test_a_backward_before_the_replay_is_refused(kind):
    schedule = "zb-h1" if kind is BackwardInput else "1f1b"
    plan = pipeline_plan(2, 3, schedule, num_blocks=2, recompute="full")
    check_plan(plan)
    op = kind("block0", 1)
    plan = moved(plan, op, Recompute("block0", 1), ranks=[0])
    refused(plan, "backward must follow the replay of its block", op=op_text(op), ranks=[0])


def test_a_backward_before_the_global_target_count_is_refused():
    """Only the last stage divides by it."""
    targets = ReduceScalars("target_count", 1, "int64")
    loss = ReduceScalars("loss", 2, "float64")
    plan = moved(PLAN, targets, loss)
    refused(plan, "target_count", op="Backward block=head micro=0", ranks=[1])


def test_an_input_half_without_its_parameters_is_refused():
    plan = pipeline_plan(2, 2, "zb-h1", num_blocks=2, dp=2, zero=3, tied=False)
    check_plan(plan)
    bucket = next(b.index for b in plan.buckets if b.blocks == ("block0",))

    def edit(ops):
        at = ops.index(BackwardInput("block0", 0))
        # What the forward gathered is freed by then.
        gather = max(n for n, op in enumerate(ops[:at]) if op == WaitUnshard(bucket))
        del ops[ops.index(Reshard(bucket), at)]
        del ops[gather - 1 : gather + 1]

    rule = f"block block0 must find the parameters of bucket {bucket} gathered"
    plan = edited(plan, edit, ranks=[0, 2])
    refused(plan, rule, op="BackwardInput block=block0 micro=0")


def test_a_weight_half_that_adds_to_a_bucket_in_flight_is_refused():
    plan = pipeline_plan(2, 2, "zb-h1", num_blocks=2, dp=2, zero=2, tied=False)
    check_plan(plan)
    bucket = next(b.index for b in plan.buckets if b.blocks == ("block0",))
    late = BackwardWeight("block0", 1)
    plan = moved(plan, WaitSync(bucket, 0), late, ranks=[0, 2])
    check_plan(plan)
    plan = swapped(plan, WaitSync(bucket, 0), late, ranks=[0, 2])
    refused(plan, f"must not add to bucket {bucket} while it is summed", op=op_text(late))


@pytest.mark.parametrize(
    "stages",
    [
        (("embed",), ("block0", "block1")),
        (("embed", "block0"), ("block1", "head"), ()),
        (("embed", "block0"), (), ("block1", "head"), ()),
        (("embed", "block0", "block1", "head"),),
        (("block1", "head"), ("embed", "block0")),
        (("embed",), ("block0",), ("block1", "head")),
        (("embed", "block0"), ("block0", "block1", "head")),
    ],
)
def test_stages_that_are_no_split_of_the_model_are_refused(stages):
    with pytest.raises(PlanError, match="stages must hold all blocks in order, none empty"):
        check_plan(replace(PLAN, stages=stages))


def test_another_split_of_the_same_ops_is_refused():
    stages = (("embed",), ("block0", "block1", "head"))
    refused(replace(PLAN, stages=stages), "block block0 must lie on the rank", ranks=[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": ((2, 2, 2), (2, 2, 1))},
        {"lengths": ((4, 4, 4), (4, 4, 3))},
    ],
)
def test_stages_that_see_other_rows_are_refused(wrong):
    """The shapes in the messages would be those of one of them only."""
    rule = "all stages of a replica must see the same rows; got .* on rank 1 and .* on rank 0"
    with pytest.raises(PlanError, match=rule):
        check_plan(replace(PLAN, **wrong))


# --- sums and ends that are refused ----------------------------------------------------------

TIED = {zero: pipeline_plan(2, 2, "1f1b", dp=2, num_blocks=2, zero=zero) for zero in (0, 1, 2, 3)}


def ends(plan, rank=0):
    """Return the exchange of a rank, and its bucket."""
    (op,) = kinds(plan, ExchangeTied, rank)
    return op, plan.buckets[op.bucket]


@pytest.mark.parametrize("zero", [0, 1])
def test_ends_that_are_added_up_before_their_last_gradient_are_refused(zero):
    """The last microbatch would be missing on the other end for ever."""
    op, _ = ends(TIED[zero])
    plan = edited(
        TIED[zero],
        lambda ops: (ops.remove(op), ops.insert(ops.index(Backward("embed", 1)), op)),
        ranks=[0],
    )
    refused(plan, "when all their gradients are there", op=op_text(op), ranks=[0])


@pytest.mark.parametrize("zero", [0, 1])
def test_ends_that_are_added_up_after_their_sum_are_refused(zero):
    op, bucket = ends(TIED[zero])
    start = next(s for s in kinds(TIED[zero], StartSync) if s.bucket == bucket.index)
    plan = swapped(TIED[zero], op, start, ranks=[0])
    with pytest.raises(PlanError, match="must be added up before the sum over dp") as caught:
        check_plan(plan)
    assert f">> {op_text(start)}" in str(caught.value)


@pytest.mark.parametrize("zero", [2, 3])
def test_shards_that_are_added_up_before_the_last_sum_are_refused(zero):
    op, bucket = ends(TIED[zero])
    plan = moved(TIED[zero], op, WaitSync(bucket.index, 1), ranks=[0])
    refused(plan, "added up after the last sum over dp", op=op_text(op), ranks=[0])


@pytest.mark.parametrize("zero", [2, 3])
def test_a_sum_after_the_ends_were_added_up_is_refused(zero):
    """The last microbatch would be in the sum once, and on one end only."""
    op, bucket = ends(TIED[zero])
    start = next(s for s in kinds(TIED[zero], StartSync) if s.bucket == bucket.index and s.micro)
    plan = moved(TIED[zero], op, start, ranks=[0])
    refused(plan, "added up after the last sum over dp", op=op_text(op), ranks=[0])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ends_that_are_not_added_up_are_refused(zero):
    plan = TIED[zero]
    for rank in range(4):
        op, _ = ends(plan, rank)
        plan = removed(plan, op, ranks=[rank])
    rule = "before the sum over dp" if zero < 2 else "the norm must follow ExchangeTied of buckets"
    with pytest.raises(PlanError, match=rule):
        check_plan(plan)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_end_that_the_other_does_not_come_to_is_refused(zero):
    """The other end's copy would drift away; the first end waits for it."""
    plan = removed(TIED[zero], ends(TIED[zero], 1)[0], ranks=[1])
    if zero < 2:
        refused(plan, "must be added up before the sum over dp", ranks=[1])
    else:
        refused(plan, "for ever", ranks=range(4), error=DeadlockError)


@pytest.mark.parametrize("zero", [0, 3])
def test_ends_that_are_added_up_twice_are_refused(zero):
    op, _ = ends(TIED[zero])
    plan = insert(TIED[zero], op, CheckGradients(), [0])
    refused(plan, "two ends must be added up once per step", op=op_text(op), ranks=[0])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("change", [-1, 1])
def test_an_exchange_of_another_count_is_refused(zero, change):
    """With gradients sharded it is the shard that is exchanged, else the bucket."""
    op, bucket = ends(TIED[zero])
    assert op.count == (bucket.count if zero < 2 else bucket.count // 2)
    wrong = replace(op, count=op.count + change)
    plan = replaced(TIED[zero], op, wrong, ranks=[0])
    refused(plan, f"an exchange must be of {op.count} elements", op=op_text(wrong), ranks=[0])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_ends_in_different_dtypes_are_refused(zero, rank):
    """Both sums would be wrong, or the longer one would hang."""
    op, _ = ends(TIED[zero], rank)
    wrong = replace(op, dtype="float32")
    plan = replaced(TIED[zero], op, wrong, ranks=[rank])
    with pytest.raises(PlanError, match="both ends must exchange one dtype, and not float(32|64)"):
        check_plan(plan)


def test_an_exchange_with_another_rank_is_refused():
    op, _ = ends(TIED[0])
    plan = TIED[0]
    for rank, peer in ((0, 3), (3, 0)):
        found, _ = ends(plan, rank)
        plan = replaced(plan, found, replace(found, peer=peer), ranks=[rank])
    rule = "the other end must be on rank"
    with pytest.raises(PlanError, match=rule):
        check_plan(plan)
    wrong = replace(op, peer=0)
    plan = replaced(TIED[0], op, wrong, ranks=[0])
    refused(plan, r"another rank in 0\.\.3", op=op_text(wrong), ranks=[0])


def test_an_exchange_of_the_other_end_is_refused():
    """Each rank holds one end only: it has no gradients of the other's bucket."""
    plan = TIED[0]
    for rank in (0, 1):
        op, bucket = ends(TIED[0], rank)
        plan = replaced(plan, op, replace(op, bucket=bucket.twin), ranks=[rank])
    refused(plan, "whose ends are added up must lie on the rank")


@pytest.mark.parametrize("number", [1, 17, -1])
def test_an_exchange_of_a_bucket_with_one_end_is_refused(number):
    op, bucket = ends(TIED[0])
    assert bucket.index != number
    wrong = replace(op, bucket=number)
    with pytest.raises(PlanError, match="whose ends are added up must") as caught:
        check_plan(replaced(TIED[0], op, wrong, ranks=[0]))
    assert f">> {op_text(wrong)}" in str(caught.value)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_bucket_of_another_stage_is_refused(zero, rank):
    """A rank may sum only what it holds."""
    plan = TIED[zero]
    start = kinds(plan, StartSync, rank)[0]
    away = kinds(plan, StartSync, 1 - rank)[0]
    assert plan.buckets[away.bucket].coordinate == 1 - rank
    wrong = replace(away, micro=start.micro)
    plan = replaced(plan, start, wrong, ranks=[rank, rank + 2])
    with pytest.raises(PlanError, match="a bucket must lie on the rank") as caught:
        check_plan(plan)
    assert f">> {op_text(wrong)}" in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("zero", [0, 2])
def test_a_bucket_that_is_not_reduced_on_a_stage_is_refused(rank, zero):
    start = kinds(TIED[zero], StartSync, rank)[0]
    plan = edited(
        TIED[zero],
        lambda ops: (ops.remove(start), ops.remove(WaitSync(start.bucket, start.micro))),
        ranks=[rank, (rank + 2) % 4],
    )
    with pytest.raises(PlanError, match=rf"must follow WaitSync of buckets \[{start.bucket}\]"):
        check_plan(plan)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_bucket_that_is_reduced_twice_is_refused(zero):
    """C017: once per step on every stage, or once per microbatch."""
    start = kinds(TIED[zero], StartSync, 1)[0]
    plan = insert(TIED[zero], start, CheckGradients(), [1, 3])
    with pytest.raises(PlanError, match="a bucket must be reduced once per") as caught:
        check_plan(plan)
    assert f">> {op_text(start)}" in str(caught.value)


def test_the_norm_is_one_of_all_stages():
    """C033: without the sum every stage would clip by the norm of its own part."""
    for plan, count in ((PLAN, 5), (TIED[0], 2 * 5), (TIED[3], 2 * 5)):
        assert len(plan.buckets) == 5
        norm = ReduceScalars("norm", count, "float64")
        assert norm in plan.ranks[0]
        with pytest.raises(PlanError, match="the flag must follow the sum norm"):
            check_plan(removed(plan, norm))
        with pytest.raises(PlanError, match=r"the sum norm must be of \("):
            check_plan(replaced(plan, norm, replace(norm, count=count - 1)))


# --- deadlocks -------------------------------------------------------------------------------


def circle(plan):
    """Check that a plan is refused as a deadlock, and return the lines of the circle."""
    with pytest.raises(DeadlockError) as caught:
        check_plan(plan)
    text = str(caught.value)
    assert "They wait in a circle:\n" in text, text
    lines = text.split("They wait in a circle:\n")[1].splitlines()
    return lines[: next(n for n, line in enumerate(lines) if not line.startswith("  rank "))]


def test_two_ranks_that_receive_first_are_a_circle():
    """Each waits for what the other would send after it."""
    plan = moved(PLAN, recv_grad(0), send(0), ranks=[0])
    assert circle(plan) == [
        f"  rank 0 in {op_text(recv_grad(0))} waits for rank 1",
        f"  rank 1 in {op_text(recv(0))} waits for rank 0",
    ]
    refused(plan, "for ever", ranks=[0, 1], error=DeadlockError)
    with pytest.raises(DeadlockError) as caught:
        check_plan(plan)
    assert str(caught.value).splitlines()[-2:] == [
        "Order forwards and backwards so that no rank of the circle waits before it has made what "
        "the others wait for (first stuck: rank 0):",
        "a forward comes after that of the stage before, a backward after that of the stage after.",
    ]


def at_once(plan):
    """Return a plan whose ranks wait for each send at once, as a blocking send does."""

    def edit(ops):
        waits = {(w.boundary, w.micro, w.kind): w for w in ops if isinstance(w, WaitSend)}
        rest = [op for op in ops if not isinstance(op, WaitSend)]
        ops[:] = []
        for op in rest:
            ops.append(op)
            if isinstance(op, (SendActivation, SendGrad)):
                kind = "grad" if isinstance(op, SendGrad) else "activation"
                ops.append(waits[op.boundary, op.micro, kind])

    return edited(plan, edit)


def test_blocking_sends_of_1f1b_are_a_circle():
    """They pass while messages are small, and hang when the library stops buffering."""
    assert circle(at_once(PLAN)) == [
        "  rank 0 in WaitSend boundary=0 micro=1 peer=1 kind=activation waits for rank 1",
        "  rank 1 in WaitSend boundary=0 micro=0 peer=0 kind=grad waits for rank 0",
    ]


def test_the_place_of_an_error_is_marked_in_the_grid():
    """What stands before the marks has run; rows, marks, then the ops around them."""
    with pytest.raises(DeadlockError) as caught:
        check_plan(at_once(PLAN))
    lines = str(caught.value).splitlines()
    assert lines[1:5] == [
        "  slot     0   1   2",
        "  rank 0   F0 >F1< .",
        "  rank 1   .   F0 >B0<",
        "  F forward, B backward, number: microbatch, . idle",
    ]
    assert lines[5].startswith("  rank 0 op ")
    with pytest.raises(PlanError, match=r"\n  rank 0 +F0  F1 >B0< "):
        check_plan(removed(PLAN, recv_grad(0), ranks=[0]))


def test_blocking_sends_of_naive_are_none():
    """One message is on its way at a time, and somebody waits for it."""
    check_plan(at_once(pipeline_plan(3, 3, "naive")))


def test_a_circle_of_three_ranks_names_all_three():
    """Rank 0 waits for the way round before it sends what goes round."""
    plan = pipeline_plan(3, 3, "interleaved")
    check_plan(plan)
    # Rank 0's second chunk is fed by rank 2, whose first is fed by rank 1, and that by rank 0.
    late = next(op for op in plan.ranks[0] if isinstance(op, RecvActivation))
    assert late.peer == 2
    plan = edited(plan, lambda ops: (ops.remove(late), ops.insert(1, late)), ranks=[0])
    assert [re.sub(r" in .* waits", " waits", line) for line in circle(plan)] == [
        "  rank 0 waits for rank 2", "  rank 2 waits for rank 1", "  rank 1 waits for rank 0",
    ]  # fmt: skip


def test_an_exchange_before_the_other_stage_has_its_gradients_is_a_circle():
    """Zero 0: the last stage's part is there long before the first one's."""
    plan = pipeline_plan(2, 3, "1f1b", num_blocks=2)
    op, _ = ends(plan, 1)
    plan = moved(plan, op, send_grad(2), ranks=[1])
    assert circle(plan) == [
        f"  rank 0 in {op_text(recv_grad(2))} waits for rank 1",
        f"  rank 1 in {op_text(op)} waits for rank 0",
    ]
    # It is no forward or backward that stands in the way.
    rule = r"Give all ranks the same order of collectives and messages \(first stuck: rank 0\)\.$"
    refused(plan, rule, ranks=[0, 1], error=DeadlockError)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"mesh": Mesh(dp=1, pp=0)}, "degrees of the mesh must be at least 1"),
        ({"mesh": Mesh(dp=-1, pp=-2)}, "degrees of the mesh must be at least 1"),
        ({"dtype": "nothing"}, "dtype of a plan must be one of float64"),
        ({"param_dtype": "floatx"}, "params of a plan must be one of float64"),
        ({"rows": ((-4, -4), (-4, -4))}, "rows must be 0 or more"),
    ],
)
def test_a_head_that_makes_no_sense_is_refused(changed, rule):
    plan = pipeline_plan(2, 2, "1f1b", num_blocks=2)
    with pytest.raises(PlanError, match=rule):
        check_plan(replace(plan, **changed))


@pytest.mark.parametrize("twin", [99, 0, -7])
def test_a_bucket_whose_twin_is_none_is_refused(twin):
    plan = pipeline_plan(2, 2, "1f1b", num_blocks=2)
    number = next(bucket.index for bucket in plan.buckets if bucket.twin >= 0)
    buckets = list(plan.buckets)
    buckets[number] = replace(buckets[number], twin=twin)
    with pytest.raises(PlanError, match="twins must name each other"):
        check_plan(replace(plan, buckets=tuple(buckets)))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [("codec", "nosuch", "a codec must be one of none"), ("shape", (99, 1, 1), "have its 2 rows")],
)
def test_a_frame_that_is_wrong_on_both_ends_is_refused(field, value, rule):
    plan = pipeline_plan(2, 2, "1f1b", num_blocks=2)
    kinds = (SendActivation, RecvActivation)
    lists = [
        [replace(op, **{field: value}) if isinstance(op, kinds) else op for op in ops]
        for ops in plan.ranks
    ]
    with pytest.raises(PlanError, match=rule):
        check_plan(replace(plan, ranks=tuple(map(tuple, lists))))

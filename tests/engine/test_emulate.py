"""Emulated blocks: the memory and the sharing of the real ones, and times from operations."""

from __future__ import annotations

import numpy as np
import pytest
from small_jobs import FLOAT64, cut, packed_rows, run_engine, small_decoder

from mpisim.engine.emulate import EmulatedBlock
from mpisim.layouts.specs import Conditions
from mpisim.memory.tracker import hook_is_built, open_tracker
from mpisim.nn.blocks import Block
from mpisim.nn.dropout import DropoutMasks
from mpisim.nn.layers import Activation, LayerContext, Linear
from mpisim.nn.models import build_mlp
from mpisim.nn.params import init_params
from mpisim.nn.precision import Policy, dtype_of
from mpisim.nn.transformer import Dropout

SPEED = 1e9
KEEPS = ("all", "selective", "nothing")


class Probe:
    """Counts the bytes of the arrays of this thread: (peak, left) of each call."""

    def __init__(self, tracker) -> None:
        self._tracker = tracker
        self.seen: list[tuple[int, int]] = []

    def __call__(self, function, *args):
        before = self._tracker.live()
        self._tracker.reset_peak()
        result = function(*args)
        self.seen.append((self._tracker.peak() - before, self._tracker.live() - before))
        return result


@pytest.fixture
def tracker():
    if not hook_is_built():
        pytest.skip("the allocator hook is not built")
    opened = open_tracker("hook")
    yield opened
    opened.close()


def emulated(block, seconds=None):
    seconds = [] if seconds is None else seconds
    return EmulatedBlock(block, flops_per_s=SPEED, sleep=seconds.append)


def shares(arrays, **named):
    """Return which named arrays are among `arrays`, and the bytes of the others together."""
    others = [array for array in arrays if not any(array is each for each in named.values())]
    found = {name for name, each in named.items() if any(each is array for array in arrays)}
    return found, sum(array.nbytes for array in others)


def story(probe, block, params, x, dy, ctx):
    """Call everything; return what the calls share with each other, and the output."""
    told = []
    for keep in KEEPS:
        y, saved = probe(block.forward, params, x, ctx, keep)
        if keep == "nothing":
            continue
        told.append(shares(block.saved_arrays(saved), x=x, y=y))
        if keep == "selective":
            saved = probe(block.restore, saved, ctx)
            told.append(shares(block.saved_arrays(saved), x=x, y=y))
        dx, grads = probe(block.backward, params, saved, dy, ctx)
        told.append((dx is dy, None if dx is None else (dx.shape, dx.dtype)))
        told.append({name: (grad.shape, grad.dtype) for name, grad in grads.items()})
        del dx, grads
        dx, kept = probe(block.backward_input, params, saved, dy, ctx)
        told.append((dx is dy, None if dx is None else (dx.shape, dx.dtype)))
        told.append(shares(block.kept_arrays(kept), dx=dx, dy=dy))
        grads = probe(block.backward_weight, saved, kept, ctx)
        told.append({name: (grad.shape, grad.dtype) for name, grad in grads.items()})
        ready = {
            name for name, grad in grads.items()
            if any(grad is array for array in block.kept_arrays(kept))
        }  # fmt: skip
        told.append(ready)

        def forget():
            nonlocal dx, grads, y
            dx = grads = y = None

        # What is left is what `saved` and `kept` hold alive.
        probe(forget)
        del saved, kept
    return told


def check_like(tracker, block, params, x, ctx):
    """Compare the emulated block with the real one; return the real output."""
    y, _ = block.forward(params, x, ctx)  # makes tables that belong to the process
    dy = np.ones(y.shape, y.dtype) if y.shape else 0.25
    real, other = Probe(tracker), Probe(tracker)
    stand_in = emulated(block)
    stand_in.forward(params, x, ctx, "nothing")  # costs are worked out once
    want, got = story(real, block, params, x, dy, ctx), story(other, stand_in, params, x, dy, ctx)
    assert got == want
    assert other.seen == real.seen
    assert len(real.seen) == 12
    y_zero, saved = stand_in.forward(params, x, ctx)
    assert type(y_zero) is type(y) and y_zero.dtype == y.dtype and y_zero.shape == y.shape
    assert not np.any(y_zero) and saved[-1][-1] == 0
    return y


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [{}, {"tied": False, "dropout": 0.25}, {"loss_chunk_tokens": 4}])
@pytest.mark.parametrize("training", [True, False])
def test_a_decoders_blocks_have_the_real_ones_bytes(tracker, sizes, dtype, training):
    model = small_decoder(**sizes)
    batch = packed_rows(4, seed=1)
    masks = DropoutMasks(key=3, rows=4, max_len=model.input_width, width=model.d_model)
    masks = masks if training and "dropout" in sizes else None
    ctx = LayerContext(batch.targets, starts=batch.starts, dropout=masks)
    x = batch.x
    for block, params in zip(
        model.blocks, model.split_params(init_params(model, 0, dtype_of(dtype))), strict=True
    ):
        x = check_like(tracker, block, params, x, ctx)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("kind", ["tokens", "features"])
def test_an_mlps_blocks_have_the_real_ones_bytes(tracker, kind, activation, dtype):
    rng = np.random.default_rng(0)
    if kind == "tokens":
        model = build_mlp(
            input_kind="tokens", window=3, vocab_size=11, embed_dim=2, hidden=(5, 6),
            activation=activation, output=("classes", 11),
        )  # fmt: skip
        x, targets = rng.integers(0, 11, (7, 3)).astype(np.uint8), np.zeros(7, np.uint8)
    else:
        model = build_mlp(
            input_kind="features", num_features=5, hidden=(5,), activation=activation,
            output=("targets", 2),
        )  # fmt: skip
        x = rng.standard_normal((7, 5)).astype(dtype_of(dtype))
        targets = np.zeros((7, 2), "f4" if dtype == "float16" else dtype)
    for block, params in zip(
        model.blocks, model.split_params(init_params(model, 0, dtype_of(dtype))), strict=True
    ):
        x = check_like(tracker, block, params, x, LayerContext(targets))


def test_a_gradient_that_is_passed_on_is_shared(tracker):
    layers = (("one", Linear(8, 4)), ("act", Activation("gelu")), ("drop", Dropout(0.5, 0)))
    block = Block("b", layers)
    params = block.init(lambda name: np.random.default_rng(0), np.dtype("f8"))
    check_like(tracker, block, params, np.ones((3, 8)), LayerContext())


@pytest.mark.parametrize("with_gaps", [False, True])
def test_it_sleeps_for_the_operations_of_each_call(with_gaps):
    model = small_decoder(dropout=0.25)
    block, params = model.blocks[1], model.split_params(init_params(model, 0, "float32"))[1]
    masks = DropoutMasks(key=3, rows=4, max_len=model.input_width, width=8)
    ctx = LayerContext(dropout=masks)
    x = np.ones((4, 6, 8), np.float32)
    spec = block.spec(x.shape, x.dtype, Conditions())
    seconds: list[float] = []
    gaps: list[int] = []
    between = (lambda: gaps.append(len(seconds))) if with_gaps else None
    stand_in = emulated(block, seconds)

    def spent():
        total = sum(seconds)
        seconds.clear()
        return pytest.approx(total * SPEED, rel=1e-12)

    _, saved = stand_in.forward(params, x, ctx, "selective", between)
    assert spec.forward_flops == spent()
    saved = stand_in.restore(saved, ctx)
    assert spec.interior_flops == spent()
    stand_in.backward(params, saved, x, ctx, between)
    assert spec.backward_flops == spent()
    _, kept = stand_in.backward_input(params, saved, x, ctx, between)
    assert spec.input_flops == spent()
    stand_in.backward_weight(saved, kept, ctx, between)
    assert spec.weight_flops == spent()
    # The caller acts while work remains, not before or after all of it.
    assert not with_gaps or len(set(gaps)) > 4


def gaps_of(block, params, x):
    """Return how often the caller may act, by call."""
    gaps: list[str] = []
    ctx = LayerContext()
    _, saved = block.forward(params, x, ctx, "all", lambda: gaps.append("forward"))
    block.backward(params, saved, x, ctx, lambda: gaps.append("backward"))
    _, kept = block.backward_input(params, saved, x, ctx, lambda: gaps.append("input"))
    block.backward_weight(saved, kept, ctx, lambda: gaps.append("weight"))
    return gaps


def test_the_caller_may_act_as_often_as_in_the_real_block():
    model = small_decoder()
    block, params = model.blocks[1], model.split_params(init_params(model, 0, "float64"))[1]
    x = np.ones((2, 6, 8))
    real = gaps_of(block, params, x)
    assert gaps_of(emulated(block), params, x) == real
    num_layers = len(block.layers)
    assert len(real) == 3 * (num_layers - 1) + 2 * num_layers - 1


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"recompute": "full", "every": 2},
        {"zero": 3, "prefetch": True},
    ],
    ids=lambda mode: "-".join(map(str, mode.values())) or "plain",
)
@pytest.mark.parametrize("policy", [FLOAT64, Policy("float32", "bfloat16", "float32", "float32")])
def test_a_step_holds_the_same_bytes_op_by_op(mode, policy):
    model = small_decoder(dropout=0.25)
    steps = [cut(packed_rows(8, seed), 2, 2) for seed in range(2)]
    ledgers, seconds = [], []

    def run(replace_blocks):
        told = [[], []]

        def prepare(state):
            if replace_blocks:
                state.blocks = {
                    name: emulated(block, seconds) for name, block in state.blocks.items()
                }
            state.observe_op = lambda op: told[state.rank].append(
                (str(op), state.ledger.vector(), state.ledger.peak_total)
            )

        outcome = run_engine(model, steps, policy=policy, prepare=prepare, **mode)
        ledgers.append(told)
        return outcome

    run(False)
    outcome = run(True)
    assert ledgers[0] == ledgers[1]
    assert len(ledgers[0][0]) > 30
    assert outcome.losses == [0.0, 0.0] and outcome.norms == [0.0, 0.0]
    assert [done.num_correct for done in outcome.done[0]] == [0, 0]
    # Per rank, step and microbatch: four forwards, as the lookup takes none, and five backwards.
    assert len(seconds) >= 2 * 2 * 2 * 9

"""Steps, moments and norms are counted once and found by name (the rest of classes A to D)."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from small_jobs import (
    assert_close,
    cut,
    linear_model,
    packed_rows,
    rows_of,
    run_engine,
    small_decoder,
)

from mpisim.config.schema import OptimizerSection
from mpisim.engine.loss_scale import LossScale
from mpisim.errors import CheckpointError
from mpisim.layouts.specs import ParamSpec
from mpisim.nn.models import build_mlp
from mpisim.train.weights import load_weights, save_weights

ADAM = OptimizerSection(kind="adamw", lr=0.01, eps=1e-8, weight_decay=0.0)


def test_c007_micro_slices_of_a_batch_make_one_update():
    """Two batches in three slices each: two updates, also of the last batch."""
    slices = [rows_of([1.0], [2.0]), rows_of([3.0], [1.0]), rows_of([0.5], [4.0])]
    done = run_engine(linear_model(), [[slices], [slices]])
    assert [state.committed for state in done.states] == [2]
    assert len(done.losses) == 2 and done.targets == [3, 3]
    whole = tuple(np.concatenate(parts) for parts in zip(*slices, strict=True))
    assert_close(done.params, run_engine(linear_model(), [[[whole]]] * 2).params, 1e-15)


def test_c032_a_scale_goes_on_from_where_it_was_written_down():
    """All of it is plain numbers: written as JSON and read back, the next steps are the same."""
    scale = LossScale("dynamic", 1024.0, growth_interval=2)
    for step, good in enumerate((True, False, True)):
        scale.commit() if good else scale.skip(step)
    again = LossScale(**json.loads(json.dumps(asdict(scale))))
    assert (again.value, again.good_steps, again.num_skipped) == (512.0, 1, 1)
    scale.commit()
    again.commit()
    assert again == scale and again.value == 1024.0


def test_c033_every_rank_clips_with_the_norm_of_the_whole_gradient():
    """Rank 0 sees gradient (3, 0), rank 1 (0, 4): both clip (3, 4), norm 5, to (0.6, 0.8)."""
    model = linear_model(num_features=2)
    # With weights of zero the gradient of a row is -2 x target; two rows, so divided by 2.
    rows = [
        [(np.array([[1.0, 0.0]]), np.array([[-3.0]]))],
        [(np.array([[0.0, 1.0]]), np.array([[-4.0]]))],
    ]
    start = {"head.linear.weight": np.zeros((2, 1)), "head.linear.bias": np.zeros(1)}
    settings = OptimizerSection(kind="sgd", lr=1.0, momentum=0.0, clip_norm=1.0)
    done = run_engine(model, [rows], optimizer=settings, start=start)
    grads = done.grads[0]
    assert grads["head.linear.weight"].ravel().tolist() == [3.0, 4.0]
    # The bias has a gradient of 7: norm sqrt(9 + 16 + 49).
    norm = float(np.sqrt(74.0))
    for rank in range(2):
        assert done.done[rank][0].grad_norm == pytest.approx(norm, rel=1e-15)
        moved = done.states[rank].params["head.linear.weight"].ravel()
        assert moved == pytest.approx([-3.0 / norm, -4.0 / norm], rel=1e-15)


def test_c038_one_trajectory_of_loss_norm_and_weights_for_any_number_of_ranks():
    """K = 3 micro-batches, clip 1, W = 1 to 4: loss and norm within 1e-12, ten steps."""
    steps = [packed_rows(12, seed) for seed in range(10)]
    settings = OptimizerSection(kind="adamw", lr=0.01, clip_norm=1.0)
    runs = {
        ranks: run_engine(
            small_decoder(), [cut(batch, ranks, 3) for batch in steps], optimizer=settings
        )
        for ranks in (1, 2, 3, 4)
    }
    assert any(norm > 1.0 for norm in runs[1].norms)
    for done in runs.values():
        assert done.losses == pytest.approx(runs[1].losses, rel=1e-12)
        assert done.norms == pytest.approx(runs[1].norms, rel=1e-12)
        assert_close(done.params, runs[1].params, 1e-12)


def test_c041_one_step_count_serves_all_parameters():
    """A parameter without a gradient in step 1 has a gradient of zero there, and t = 2 after.

    With bias correction at t = 2 and moments that have decayed once, its first move is
    0.0074414, not 0.01: all parameters share the step count, and the README says so.
    """
    # Feature 1 is zero in the first step, so its weight has no gradient.
    model = linear_model(num_features=2)
    start = {"head.linear.weight": np.zeros((2, 1)), "head.linear.bias": np.zeros(1)}
    first = [[(np.array([[1.0, 0.0]]), np.array([[-0.25]]))]]
    done = run_engine(model, [first], optimizer=ADAM, start=start)
    weight = done.params["head.linear.weight"].ravel()
    assert weight == pytest.approx([-0.01, 0.0], abs=1e-9)
    # In the second step both have a gradient of 0.5: error 0.25 with feature 1.
    now = weight[0] + done.params["head.linear.bias"][0]
    second = [[(np.array([[1.0, 1.0]]), np.array([[now - 0.25]]))]]
    both = run_engine(model, [first, second], optimizer=ADAM, start=start)
    assert both.grads[1]["head.linear.weight"].ravel() == pytest.approx([0.5, 0.5], rel=1e-12)
    late = both.params["head.linear.weight"].ravel()[1]
    assert late == pytest.approx(-0.0074414, abs=5e-8)


def test_c045_moments_and_saved_weights_follow_the_name(tmp_path):
    """Two parameters of equal shape, listed in the other order: state follows the name."""
    model = build_mlp(
        input_kind="features", num_features=2, hidden=(2,), activation="tanh",
        output=("targets", 2),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    rows = [[(rng.normal(size=(4, 2)), rng.normal(size=(4, 2)))]]
    done = run_engine(model, [rows] * 2, optimizer=ADAM)
    state, names = done.states[0], ("block0.linear.weight", "head.linear.weight")
    assert state.master[names[0]].shape == state.master[names[1]].shape
    grads = {name: [step[name] for step in done.grads] for name in names}
    for name in names:
        one, two = grads[name]
        want = 0.9 * (0.1 * one) + 0.1 * two
        assert np.allclose(state.moments[name][0], want, rtol=1e-13, atol=0)
    path = tmp_path / "weights.safetensors"
    save_weights(path, {name: state.master[name] for name in reversed(names)})
    specs = tuple(ParamSpec(name=name, shape=(2, 2)) for name in names)
    loaded, _ = load_weights(path, specs)
    for name in names:
        assert np.array_equal(loaded[name], state.master[name])
    with pytest.raises(CheckpointError, match="other.weight"):
        load_weights(path, (specs[0], ParamSpec(name="other.weight", shape=(2, 2))))

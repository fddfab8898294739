"""The engine against the textbook ladder of `mpisim.reference`, one rank and several.

Same first weights, same rows, plain single-process functions on the other side (A1, A2, A5).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from small_jobs import assert_close, make_config, run_engine, train

from mpisim.data.load import load_data
from mpisim.data.sampler import Sampler
from mpisim.nn.models import build_mlp
from mpisim.nn.params import init_params
from mpisim.reference.data_parallel import data_parallel_train_step
from mpisim.reference.mlp import (
    linear_backward,
    linear_forward,
    mlp_loss_and_gradients,
    softmax_cross_entropy,
    softmax_cross_entropy_backward,
    tanh_backward,
    tanh_forward,
)
from mpisim.reference.optimizers import (
    adamw_init,
    adamw_step,
    clip_by_global_norm,
    global_norm,
    sgd_momentum_step,
    sgd_step,
    zeros_like_params,
)
from mpisim.train.setup import build_model

TOLERANCE = 1e-12
STEPS = 12


def lr_of(settings, step, total):
    """Return the rate by hand: linear warm-up to lr, then the schedule to lr * min_lr_ratio."""
    lr, warmup = settings["lr"], settings.get("warmup_steps", 0)
    if step < warmup:
        return lr * (step + 1) / warmup
    first = max(warmup - 1, 0)
    share = (step - first) / (total - 1 - first)
    least = settings.get("min_lr_ratio", 0.1)
    if settings.get("schedule") == "linear":
        return lr * (1 - share * (1 - least))
    if settings.get("schedule") == "cosine":
        return lr * (least + (1 - least) * (1 + math.cos(math.pi * share)) / 2)
    return lr


def plain_training(config, loss_and_gradients):
    """Train without engine, plan or ranks; return losses, norms and parameters."""
    data = load_data(config)
    sampler = Sampler(data.num_train, config.train.global_batch, config.run.seed)
    settings = config.optimizer.model_dump()
    params = init_params(build_model(config), config.run.seed, config.model.dtype)
    velocity, adam = zeros_like_params(params), adamw_init(params)
    losses, norms = [], []
    for step in range(config.train.steps):
        x, y, _ = data.train_batch(sampler.batch_indices(step))
        loss, gradients = loss_and_gradients(params, x, y)
        losses.append(loss)
        norms.append(global_norm(gradients))
        if settings["clip_norm"]:
            gradients, _ = clip_by_global_norm(gradients, settings["clip_norm"])
        lr = lr_of(settings, step, config.train.steps)
        if settings["kind"] == "adamw":
            params, adam = adamw_step(
                params, gradients, adam, lr, settings["beta1"], settings["beta2"],
                settings["eps"], settings["weight_decay"],
            )  # fmt: skip
        else:
            params, velocity = sgd_momentum_step(
                params, gradients, velocity, lr, settings["momentum"], settings["weight_decay"]
            )
    return losses, norms, params


def assert_equals_reference(done, reference, config):
    losses, norms, params = reference
    settings = config.optimizer.model_dump()
    assert len(done.steps) == len(losses)
    for row, loss, norm in zip(done.steps, losses, norms, strict=True):
        assert abs(row["loss"] - loss) <= TOLERANCE * max(1.0, loss)
        assert abs(row["grad_norm"] - norm) <= TOLERANCE * max(1.0, norm)
        rate = lr_of(settings, row["step"], config.train.steps)
        assert row["lr"] == pytest.approx(rate, rel=1e-14, abs=1e-18)
    assert_close(done.params, params, TOLERANCE)


SGD = {"kind": "sgd", "lr": 0.03}
ADAMW = {"kind": "adamw", "lr": 0.02}


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD | {"momentum": 0.0},
        SGD | {"momentum": 0.9},
        SGD | {"momentum": 0.5, "weight_decay": 0.3, "clip_norm": 0.7},
        SGD | {"momentum": 0.9, "warmup_steps": 4},
        SGD | {"schedule": "linear", "min_lr_ratio": 0.0},
        SGD | {"schedule": "cosine", "warmup_steps": 3},
        SGD | {"clip_norm": 1e-3},
        SGD | {"clip_norm": 1e6},
        ADAMW,
        ADAMW | {"weight_decay": 0.5},
        ADAMW | {"beta1": 0.0, "beta2": 0.5, "eps": 1e-3, "clip_norm": 0.2},
        ADAMW | {"schedule": "linear", "warmup_steps": 5, "min_lr_ratio": 0.25},
    ],
)
@pytest.mark.parametrize(("ranks", "micros"), [(1, 1), (3, 2)])
def test_optimizer_clipping_decay_and_schedule(tmp_path, optimizer, ranks, micros):
    """A1: momentum, weight decay, clip norm, schedule; the epoch ends with a short batch."""
    config = make_config(
        tmp_path, optimizer=optimizer, model={"hidden": [5, 4], "activation": "tanh"},
        data={"num_rows": 150}, parallel={"bucket_bytes": 200},
        train={"steps": STEPS, "global_batch": 30, "num_microbatches": micros},
    )  # fmt: skip
    reference = plain_training(config, lambda p, x, y: mlp_loss_and_gradients(p, x, y, "tanh"))
    if optimizer.get("clip_norm", 0) == 1e-3:
        assert min(reference[1]) > 1e-3  # it does clip
    assert_equals_reference(train(config, ranks), reference, config)


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize("hidden", [(), (6,), (6, 5, 4)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_depth_and_activation(tmp_path, activation, hidden, ranks):
    """A1: an MLP of any depth; no hidden layer is a linear model."""
    config = make_config(
        tmp_path, optimizer=SGD, model={"hidden": list(hidden), "activation": activation},
        train={"steps": STEPS, "global_batch": 30},
    )  # fmt: skip
    reference = plain_training(config, lambda p, x, y: mlp_loss_and_gradients(p, x, y, activation))
    assert_equals_reference(train(config, ranks), reference, config)


def text_loss_and_gradients(params, ids, classes):
    """Embed, flatten, one tanh layer, softmax over 256 classes: every gradient by hand."""
    table = params["embed.embedding.weight"]
    flat = table[ids].reshape(len(ids), -1)
    w0, b0 = params["block0.linear.weight"], params["block0.linear.bias"]
    w1, b1 = params["head.linear.weight"], params["head.linear.bias"]
    z = linear_forward(flat, w0, b0)
    y = tanh_forward(z)
    logits = linear_forward(y, w1, b1)
    classes = classes.astype(np.int64)
    dy, dw1, db1 = linear_backward(y, w1, softmax_cross_entropy_backward(logits, classes))
    dflat, dw0, db0 = linear_backward(flat, w0, tanh_backward(z, dy))
    dtable = np.zeros_like(table)
    np.add.at(dtable, ids, dflat.reshape(*ids.shape, -1))
    return softmax_cross_entropy(logits, classes), {
        "embed.embedding.weight": dtable,
        "block0.linear.weight": dw0,
        "block0.linear.bias": db0,
        "head.linear.weight": dw1,
        "head.linear.bias": db1,
    }


@pytest.mark.parametrize(("ranks", "micros"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("optimizer", [SGD | {"lr": 0.5}, ADAMW])
def test_text(tmp_path, ranks, micros, optimizer):
    """Item 5: next-byte prediction from an embedded, flattened window."""
    config = make_config(
        tmp_path, "text", optimizer=optimizer,
        train={"steps": STEPS, "global_batch": 48, "num_microbatches": micros},
    )  # fmt: skip
    reference = plain_training(config, text_loss_and_gradients)
    assert_equals_reference(train(config, ranks), reference, config)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_one_step_against_the_reference_workers(num_workers):
    """A5: uneven shards, one of them empty; both rings add the same numbers."""
    rng = np.random.default_rng(11)
    model = build_mlp(
        input_kind="features", num_features=3, hidden=(5,), activation="relu",
        output=("targets", 2),
    )  # fmt: skip
    params = init_params(model, 3, "float64")
    shards = [
        (rng.standard_normal((count, 3)), rng.standard_normal((count, 2)))
        for count in range(num_workers)  # worker 0 has no row
    ]
    done = run_engine(
        model, [[[shard] for shard in shards]] * 3, start=params, bucket_bytes=100,
        algorithm="ring",
    )  # fmt: skip
    replicas = [params] * num_workers
    for step in range(3):
        replicas, loss = data_parallel_train_step(
            replicas, shards, lambda p, g: sgd_step(p, g, 0.125), "relu", bucket_bytes=100
        )
        assert done.losses[step] == pytest.approx(loss, rel=TOLERANCE)
    assert_close(done.params, replicas[0], TOLERANCE)

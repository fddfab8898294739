"""The worked example of accumulation and recompute: three short texts, one tiny decoder.

Small enough to follow by hand, run by the real engine on one rank: `mpisim demo accumulation`
prints its record. Every number in it is computed here and now; the tests hold the right values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpisim.comm.local import run_threads
from mpisim.config.schema import OptimizerSection
from mpisim.data.batch import Batch
from mpisim.data.documents import documents_batch
from mpisim.data.tokenizer import VOCAB_SIZE, encode
from mpisim.engine.loss_scale import LossScale
from mpisim.engine.state import EngineState, StepState
from mpisim.engine.step import Engine
from mpisim.errors import ConfigError
from mpisim.mesh import Mesh
from mpisim.nn.decoder import build_decoder
from mpisim.nn.models import Model
from mpisim.nn.precision import Policy
from mpisim.plan.build import Plan, build_train_plan
from mpisim.plan.check import check_plan
from mpisim.plan.forecast import retained_estimate
from mpisim.plan.ops import Backward, Forward
from mpisim.trace.recorder import Recorder

TEXTS = ("a", "cat", "do")
"""With a first and a last token around it, a text of n bytes has n + 1 targets: 2, 4 and 3."""
LOSS_SCALE = 128.0
DROPOUT = 0.5
WIDTH, NUM_BLOCKS, NUM_HEADS, D_FF = 4, 3, 1, 8
MAX_LEN = 4
ABSOLUTE, RELATIVE = 1e-11, 1e-10
"""Two results are the same if they differ by at most ABSOLUTE + RELATIVE * |r|."""

_POLICY = Policy("float64", "float64", "float64", "float64")
_OPTIMIZER = OptimizerSection(kind="adamw", lr=0.01, weight_decay=0.1, clip_norm=1.0)


def worked_model(dropout: float = 0.0) -> Model:
    """Return the decoder of the example: 29 tensors, 1572 scalars."""
    return build_decoder(
        vocab_size=VOCAB_SIZE, d_model=WIDTH, num_blocks=NUM_BLOCKS,
        num_heads=NUM_HEADS, num_kv_heads=NUM_HEADS, d_ff=D_FF, tied=True, max_len=MAX_LEN,
        dropout=dropout,
    )  # fmt: skip


def microbatches(rows: int) -> list[Batch]:
    """Cut the texts into microbatches of at most `rows`, each as long as its longest text."""
    documents = [encode(text, bos=True, eos=True) for text in TEXTS]
    return [documents_batch(documents[at : at + rows]) for at in range(0, len(documents), rows)]


@dataclass
class Outcome:
    """What a few updates of the example left."""

    plan: Plan
    steps: list[StepState]
    losses: list[list[float]]
    """Mean loss per microbatch, per step."""
    gradients: dict[str, np.ndarray]
    """True gradients of the first committed update."""
    weights: dict[str, np.ndarray]
    state: EngineState
    words: list[dict[str, int]]
    """Dropout counter around the first backward, per step."""
    retained: list[dict[str, int]]
    """Per microbatch of the first step: bytes kept between the loss and its backward."""


def run_example(
    rows: int,
    *,
    dropout: float = 0.0,
    recompute: str = "none",
    steps: int = 1,
    growth_interval: int = 1,
    overflow_in: tuple[int, int] | None = None,
) -> Outcome:
    """Train the example's decoder on its three texts.

    Parameters
    ----------
    rows : int
        Rows of a microbatch at most, 1..3.
    dropout : float
    recompute : {"none", "selective", "full"}
    steps : int
    growth_interval : int
        Of the loss scale.
    overflow_in : (step, micro), optional
        Plant an infinite gradient after the first block backward of that microbatch.

    Returns
    -------
    Outcome
    """
    model = worked_model(dropout)
    batches = microbatches(rows)
    plan = build_train_plan(
        mesh=Mesh(), specs=lambda r, length: model.spec(r, np.dtype("f8"), length),
        rows=(tuple(len(batch.x) for batch in batches),),
        lengths=(tuple(batch.x.shape[1] for batch in batches),),
        dtype="float64", itemsize=8, bucket_bytes=1 << 20, overlap=False, algorithm="auto",
        recompute=recompute,
    )  # fmt: skip
    check_plan(plan)

    def body(transport: Any) -> Outcome:
        state = EngineState(
            model=model, mesh=Mesh(), transport=transport, optimizer=_OPTIMIZER,
            buckets=plan.buckets, seed=0, policy=_POLICY, algorithm="auto", recorder=Recorder(),
            loss_scale=LossScale("dynamic", LOSS_SCALE, growth_interval=growth_interval),
        )  # fmt: skip
        watch = _Watch(state, overflow_in)
        engine = Engine(state, steps)
        done, losses = [], []
        for step in range(steps):
            watch.start(step)
            done.append(
                engine.train_step(
                    plan, step, lambda micro: Batch(*(a.copy() for a in batches[micro].arrays())),
                    sum(batch.num_targets for batch in batches),
                )
            )  # fmt: skip
            losses.append(
                [s / b.num_targets for s, b in zip(watch.loss_sums, batches, strict=True)]
            )
        return Outcome(
            plan, done, losses, watch.gradients, dict(state.master), state, watch.words,
            watch.retained,
        )  # fmt: skip

    result = run_threads(body, 1)
    for error in result.errors.values():
        raise error
    return result.results[0]


class _Watch:
    """Reads what the record wants to know off a running step."""

    def __init__(self, state: EngineState, overflow_in: tuple[int, int] | None) -> None:
        self.state, self.overflow_in = state, overflow_in
        self.gradients: dict[str, np.ndarray] = {}
        self.words: list[dict[str, int]] = []
        self.retained: list[dict[str, int]] = []
        state.observe_gradients = self._keep_gradients
        state.observe_op = self._see
        state.observe_draws = lambda start, end: self._draws.append((start, end))
        self._draws: list[tuple[int, int]] = []
        self._forward_draws: set[tuple[int, int]] = set()
        self._last = state.last

    def start(self, step: int) -> None:
        self.step, self.loss_sums, self._total = step, [], 0.0

    def _keep_gradients(self, gradients: dict[str, np.ndarray]) -> None:
        self.gradients = self.gradients or gradients

    def _see(self, op: Any) -> None:
        step = self.state.step
        if isinstance(op, Forward) and op.block == self._last:
            self.loss_sums.append(step.loss_sum - self._total)
            self._total = step.loss_sum
            if self.step == 0:
                self.retained.append(retained_bytes(self.state, op.micro))
            self._forward_draws = set(self._draws)
            self.words.append({"before_backward": self._counter()})
        elif isinstance(op, Backward):
            if op.block == self.state.first:
                self.words[-1]["after_backward"] = self._counter()
                again = set(self._draws) - self._forward_draws
                self.words[-1]["new_words"] = sum(end - start for start, end in again)
                self._draws.clear()
            if (self.step, op.micro) == self.overflow_in and op.block == self._last:
                self.state.buckets[0][0] = np.inf

    def _counter(self) -> int:
        """Return where the next words would come from: behind all that are owned or were drawn."""
        return max([self.state.step.dropout_words, *(end for _, end in self._draws)])


def retained_bytes(state: EngineState, micro: int) -> dict[str, int]:
    """Measure what a microbatch keeps between its loss and its backward, by what it is.

    Returns
    -------
    dict
        ``saved_contexts``: arrays that layers saved for backward; ``kept_values``: inputs of
        blocks that are replayed and in no saved context; ``recipes``: number of blocks whose
        forward can be run again from them; ``total``: bytes of all arrays, each counted once.

    Notes
    -----
    Excluded: token ids, targets and starts (category data), parameters, gradients, and the random
    words of dropout, which are drawn again and never kept.
    """
    step = state.step
    saved: dict[int, np.ndarray] = {}
    for (block, number), arrays in step.saved.items():
        if number == micro:
            for array in state.blocks[block].saved_arrays(arrays):
                saved[id(array)] = array
    kept = {id(x): x for (_, number), x in step.inputs.items() if number == micro}
    kept |= {id(x): x for (_, number), x in step.first_outputs.items() if number == micro}
    kept_only = [array for key, array in kept.items() if key not in saved]
    recipes = sum(
        1 for (_, number), keep in state.plan_keeps.items() if number == micro and keep == "input"
    )
    contexts = sum(array.nbytes for array in saved.values())
    values = sum(array.nbytes for array in kept_only)
    return {
        "saved_contexts": contexts, "kept_values": values, "recipes": recipes,
        "total": contexts + values,
    }  # fmt: skip


def accumulation_record(rows: int) -> dict[str, Any]:
    """Return the record that `mpisim demo accumulation --rows ROWS` prints.

    Parameters
    ----------
    rows : int
        Rows of a microbatch at most, 1..3.

    Returns
    -------
    dict
        ``accumulation``, ``recomputation``, ``late_overflow``.

    Raises
    ------
    ConfigError
        `rows` is not 1, 2 or 3.
    """
    if rows not in (1, 2, 3):
        raise ConfigError(f"--rows must be 1, 2 or 3; got {rows}. There are three texts.")
    return {
        "accumulation": _accumulation(rows),
        "recomputation": _recomputation(rows),
        "late_overflow": _late_overflow(rows),
    }


def _accumulation(rows: int) -> dict[str, Any]:
    whole, parts = run_example(3), run_example(rows)
    batches, step = microbatches(rows), parts.steps[0]
    counts = [batch.num_targets for batch in batches]
    total = step.global_targets
    means = parts.losses[0]
    params = parts.state.model.param_specs()
    return {
        "texts": list(TEXTS),
        "valid_targets_per_text": [batch.num_targets for batch in microbatches(1)],
        "grids": [list(batch.x.shape) for batch in batches],
        "target_counts": counts,
        "total_targets": total,
        "loss_scale": step.loss_scale,
        "seeds": [step.loss_scale * count / total for count in counts],
        "microbatch_mean_losses": means,
        "loss": step.global_loss_sum / total,
        "unweighted_mean_of_means": sum(means) / len(means),
        "full_batch_loss": whole.steps[0].global_loss_sum / total,
        "num_tensors": len(params),
        "num_scalars": sum(param.size for param in params),
        "tolerance": f"{ABSOLUTE:g} + {RELATIVE:g} * |r|",
        "gradients": _compared(parts.gradients, whole.gradients),
        "weights": _compared(parts.weights, whole.weights),
        "grad_norm": step.grad_norm,
        "optimizer_steps": parts.state.committed,
        "loss_scale_after": parts.state.loss_scale.value,
        "gradients_cleared": not any(bucket.any() for bucket in parts.state.buckets),
    }


def _recomputation(rows: int) -> dict[str, Any]:
    steps = 3
    kept = run_example(rows, dropout=DROPOUT, steps=steps)
    again = run_example(rows, dropout=DROPOUT, steps=steps, recompute="full")
    micros = len(microbatches(rows))
    words = again.steps[0].dropout_words
    sites = again.state.model.num_dropout_sites
    extra = again.steps[0].block_forwards - kept.steps[0].block_forwards
    estimated = [_estimate(again, micro) for micro in range(micros)]
    measured = [entry["total"] for entry in again.retained]
    retained_estimated = [_estimate(kept, micro) for micro in range(micros)]
    retained_measured = [entry["total"] for entry in kept.retained]
    return {
        "dropout": DROPOUT,
        "logical_array": [len(TEXTS), MAX_LEN, WIDTH],
        "words_per_site": words // sites,
        "site_ranges": [[s * words // sites, (s + 1) * words // sites] for s in range(sites)],
        "counter_before_backward": max(entry["before_backward"] for entry in again.words),
        "counter_after_backward": max(entry["after_backward"] for entry in again.words),
        "words_drawn_in_backward_only": sum(entry["new_words"] for entry in again.words),
        "steps": steps,
        "losses_bitwise_equal": kept.losses == again.losses,
        "gradients_bitwise_equal": _same_bits(kept.gradients, again.gradients),
        "weights_bitwise_equal": _same_bits(kept.weights, again.weights),
        "recomputed_blocks": NUM_BLOCKS,
        "extra_block_forwards_per_microbatch": extra / micros,
        "declared_point": "after the forward of the loss, before backward",
        "excluded": "token ids and targets (data), parameters, gradients, dropout words",
        "retained": {
            "items": kept.retained, "estimated_bytes": retained_estimated,
            "measured_bytes": retained_measured,
        },
        "recomputed": {
            "items": again.retained, "estimated_bytes": estimated, "measured_bytes": measured,
        },
        "estimate_equals_measurement": estimated == measured
        and retained_estimated == retained_measured,
        "saved_bytes": sum(retained_measured) - sum(measured),
    }  # fmt: skip


def _estimate(run: Outcome, micro: int) -> int:
    return retained_estimate(
        run.plan, 0, micro, lambda r, length: run.state.model.spec(r, np.dtype("f8"), length)
    )


def _late_overflow(rows: int) -> dict[str, Any]:
    """Overflow in the last microbatch of the first update; the second one commits."""
    last = len(microbatches(rows)) - 1
    untouched = run_example(rows, steps=0)
    failed = run_example(rows, steps=1, overflow_in=(0, last))
    both = run_example(rows, steps=2, overflow_in=(0, last), growth_interval=1000)
    state = failed.state
    moments = [array for moments in state.moments.values() for array in moments]
    return {
        "overflow_in_microbatch": last,
        "skipped": failed.steps[0].skipped,
        "loss_scale_before": failed.steps[0].loss_scale,
        "loss_scale_after": state.loss_scale.value,
        "optimizer_steps": state.committed,
        "weights_bitwise_equal": _same_bits(failed.weights, untouched.weights),
        "moments_zero": not any(array.any() for array in moments),
        "gradients_cleared": not any(bucket.any() for bucket in state.buckets),
        "learning_rate_of_skipped_step": both.steps[0].lr,
        "learning_rate_of_next_step": both.steps[1].lr,
        "next_step_committed": not both.steps[1].skipped,
        "optimizer_steps_after_next": both.state.committed,
    }


def _compared(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict[str, Any]:
    differences = {name: np.abs(got[name] - right) for name, right in want.items()}
    within = [
        bool(np.all(differences[name] <= ABSOLUTE + RELATIVE * np.abs(right)))
        for name, right in want.items()
    ]
    return {
        "compared": len(want),
        "within_tolerance": sum(within),
        "largest_difference": max(float(d.max()) for d in differences.values()),
    }


def _same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> bool:
    return got.keys() == want.keys() and all(
        got[name].tobytes() == array.tobytes() for name, array in want.items()
    )

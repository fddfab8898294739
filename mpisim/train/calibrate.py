"""How bottlenecks start: principal components of the activations, or random directions.

`loop` calls in here before the first step. Both ranks of a boundary see the same activations, bit
for bit, and compute the same start; that they did is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import numpy as np

from mpisim.comm.communicator import Communicator
from mpisim.comm.transport import Transport
from mpisim.data.batch import Batch, token_positions
from mpisim.engine.state import EngineState
from mpisim.errors import ConfigError
from mpisim.nn.bottleneck import (
    ActivationStatistics,
    BottleneckStart,
    LayerNorm,
    encode_name,
    random_start,
)
from mpisim.nn.kernels import load_kernels
from mpisim.nn.layers import LayerContext
from mpisim.train.setup import Setup

CALIBRATION_CHANNEL = 4


def near_boundaries(setup: Setup, rank: int) -> dict[int, int]:
    """Return the boundaries that a rank is an end of, and the width of their activations."""
    plan = setup.full_plan()
    own = set(plan.rank_blocks(rank))
    names = [block.name for block in setup.model.blocks]
    specs = setup.specs(1)

    def width(boundary: int) -> int:
        # Of what goes into the encoder: the output of the block before it.
        return specs[names.index(encode_name(boundary)) - 1].output_shape[-1]

    return {
        boundary: width(boundary)
        for boundary, (stage, after) in enumerate(zip(plan.stages, plan.stages[1:], strict=False))
        if stage[-1] in own or after[0] in own
    }


def start_bottlenecks(
    transport: Transport,
    setup: Setup,
    state: EngineState,
    run_base: Callable[[Callable[[int, Batch], None]], None],
) -> None:
    """Write the first values of all bottlenecks into the weights. All ranks call it.

    Parameters
    ----------
    transport : Transport
    setup : Setup
    state : EngineState
    run_base : callable
        Runs the model without compressors over training rows, at least as many tokens as the config
        asks for: what crosses a boundary is shown to `EngineState.observe_boundary`, and every
        microbatch of padded rows, before it runs, to the function that it is called with.

    Raises
    ------
    ConfigError
        There are too few tokens, or two ranks have computed different starts.
    """
    compression, seed = setup.config.compression, setup.config.run.seed
    widths = near_boundaries(setup, transport.rank)
    width, is_random = compression.bottleneck, compression.start == "random"
    # What prepares a run is no part of its memory; the forwards over training rows are.
    aside = state.watch.tracker.aside
    if is_random or setup.config.compute.mode == "emulated":
        with aside():
            starts = {b: random_start(seed, b, d, width) for b, d in widths.items()}
    else:
        totals = _measure(transport, setup, state, run_base, widths)
        with aside():
            starts = {boundary: _components(totals[boundary], width) for boundary in widths}
    _require_agreement(transport, starts)
    with aside():
        for boundary, start in starts.items():
            for store in state.stores:
                store.assign(start.named(boundary))


def _measure(
    transport: Transport,
    setup: Setup,
    state: EngineState,
    run_base: Callable[[Callable[[int, Batch], None]], None],
    widths: dict[int, int],
) -> dict[int, ActivationStatistics]:
    """Return the statistics of what crosses each boundary, over all replicas."""
    aside = state.watch.tracker.aside
    with aside():
        totals = {boundary: ActivationStatistics(d_model) for boundary, d_model in widths.items()}
        # A module that is loaded here for the first time makes tables that stay.
        context = LayerContext(kernels=load_kernels("numpy"))
    norms = {boundary: LayerNorm(d_model) for boundary, d_model in widths.items()}
    normalises = setup.config.compression.start == "layernorm"

    real: dict[int, np.ndarray] = {}
    """Which positions of a microbatch hold a token, where rows are padded: what stands at the
    others says nothing of activations."""

    def note(micro: int, batch: Batch) -> None:
        with aside():
            real[micro] = token_positions(batch)

    def observe(boundary: int, micro: int, x: np.ndarray) -> None:
        with aside():
            if normalises:
                x = norms[boundary].forward({}, x, context)[0]
            totals[boundary].add(x[real[micro]] if real else x)

    state.observe_boundary = observe
    try:
        run_base(note)
    finally:
        state.observe_boundary = None
    # A communicator of its own: what it moves belongs to no step.
    group = Communicator(
        transport, setup.mesh.group(transport.rank, "dp"), axis="dp", channel=CALIBRATION_CHANNEL
    )
    with aside():
        for statistics in totals.values():
            group.all_reduce(statistics.totals)
        group.close()
    return totals


def _components(statistics: ActivationStatistics, width: int) -> BottleneckStart:
    try:
        return statistics.components(width)
    except ValueError as error:
        raise ConfigError(
            f"compression.calibration_tokens must be enough for principal components: {error}"
        ) from None


def _require_agreement(transport: Transport, starts: dict[int, BottleneckStart]) -> None:
    mine = {
        str(boundary): hashlib.sha256(b"".join(array.tobytes() for array in start)).hexdigest()
        for boundary, start in starts.items()
    }
    told: dict[str, tuple[int, str]] = {}
    for rank, text in enumerate(transport.exchange(json.dumps(mine))):
        for boundary, digest in json.loads(text).items():
            first, known = told.setdefault(boundary, (rank, digest))
            if digest != known:
                raise ConfigError(
                    f"both halves of a bottleneck must start from one calibration; got other bits "
                    f"on rank {rank} than on rank {first} at boundary {boundary}. Run on hosts "
                    f"with the same libraries, or set compression.start = 'random'."
                )

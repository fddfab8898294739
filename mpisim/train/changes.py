"""The smallest change of a config that fits its budget: tried on real plans, not guessed.

A layout is a config with some settings changed, its exact forecast and what a step of it costs.
`mpisim plan` searches whole grids of layouts (`mpisim.planner`); here single changes and pairs are
tried, for the text of a refusal.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpisim.config.schema import RunConfig
from mpisim.cost.price import price_rank
from mpisim.errors import ConfigError
from mpisim.plan.build import Plan
from mpisim.plan.ops import Forward, Recompute
from mpisim.train.fit import WorstForecast, worst_forecast
from mpisim.train.setup import Setup
from mpisim.units import format_bytes

FLOPS_PER_BYTE = 16
"""Flops of recompute that count as much as a byte sent: a core does some 16 Gflop/s in the time in
which a link carries 1 GB/s. A scale without seconds, the same on every machine."""

MOST_MICROBATCHES = 64
"""Microbatches that a layout is tried with at most, if fewer are enough."""

Settings = tuple[tuple[str, Any], ...]
"""("section.key", value) of what is changed."""

_CHANGES_NUMBERS = "precision."


@dataclass(frozen=True)
class Work:
    """What a full step of a layout costs beyond the arithmetic that every layout does."""

    bytes_moved: int
    """Sent by all ranks together."""
    messages: int
    recomputed_flops: int
    """By all ranks together."""

    @property
    def score(self) -> int:
        """`bytes_moved` * FLOPS_PER_BYTE + `recomputed_flops`: smaller is better."""
        return self.bytes_moved * FLOPS_PER_BYTE + self.recomputed_flops


@dataclass(frozen=True)
class Layout:
    """A config with some settings changed, and what they come to."""

    settings: Settings
    config: RunConfig
    worst: WorstForecast
    work: Work

    @property
    def peak_total(self) -> int:
        """Predicted peak of the fullest rank, bytes."""
        return self.worst.peak_total

    @property
    def changes_numbers(self) -> bool:
        """Values are rounded otherwise, so the run learns slightly other weights."""
        return any(name.startswith(_CHANGES_NUMBERS) for name, _ in self.settings)

    @property
    def options(self) -> str:
        """The settings as command-line options."""
        return " ".join(f"--set {name}={_shown(value)}" for name, value in self.settings)

    @property
    def rank_key(self) -> tuple:
        """What layouts that fit are ordered by: cost, then messages, then what is changed."""
        work = self.work
        micros = self.config.train.num_microbatches
        return (self.changes_numbers, work.score, work.messages, micros, self.settings_key)

    @property
    def settings_key(self) -> str:
        """A text that decides between equals, the same on every machine."""
        return " ".join(f"{len(self.settings)} {name}={value!r}" for name, value in self.settings)


Change = Layout
"""A layout that fits, as answer to "what would?"."""


def with_settings(config: RunConfig, settings: Iterable[tuple[str, Any]]) -> RunConfig:
    """Return a config with settings changed; the values are taken as valid."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings:
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=values)
            for section, values in sections.items()
        }
    )


class LayoutTrial:
    """Prices layouts of one config on a number of ranks; block specs are computed once.

    Parameters
    ----------
    config : RunConfig
    num_ranks : int
    data_bytes, eval_rows, short_rows : int
        See `fit.DataSizes`.
    like : Setup, optional
        The config's own setup, if there is one.
    """

    def __init__(
        self,
        config: RunConfig,
        num_ranks: int,
        data_bytes: int = 0,
        eval_rows: int = 0,
        short_rows: int = 0,
        like: Setup | None = None,
    ) -> None:
        self.config, self.num_ranks = config, num_ranks
        self._sizes = data_bytes, eval_rows, short_rows
        self._models: dict[tuple, Setup] = {}
        if like is not None:
            self._models[_model_key(config)] = like

    def layout(self, settings: Settings) -> Layout | None:
        """Return the layout with some settings changed, or None if there is no such layout."""
        config = with_settings(self.config, settings)
        try:
            setup = Setup(config, self.num_ranks)
        except ConfigError:
            return None
        known = self._models.setdefault(_model_key(config), setup)
        setup.share_specs(known)
        worst = worst_forecast(setup, *self._sizes)
        return Layout(settings, config, worst, work_of(setup))


def _model_key(config: RunConfig) -> tuple:
    return config.precision, config.model


def work_of(setup: Setup) -> Work:
    """Return what a full step of a layout costs; no arrays, no messages."""
    plan = setup.full_plan()
    nbytes = messages = flops = 0
    for rank in range(setup.mesh.size):
        for counts in price_rank(plan, rank).values():
            nbytes += counts["sent_bytes"]
            messages += counts["sent_messages"]
        flops += _recomputed_flops(setup, plan, rank)
    return Work(nbytes, messages, flops)


def _recomputed_flops(setup: Setup, plan: Plan, rank: int) -> int:
    keeps = {(op.block, op.micro): op.keep for op in plan.ranks[rank] if isinstance(op, Forward)}
    numbers = {name: number for number, name in enumerate(plan.blocks)}
    total = 0
    for op in plan.ranks[rank]:
        if isinstance(op, Recompute):
            specs = setup.specs(plan.rows[rank][op.micro], plan.length(rank, op.micro))
            spec = specs[numbers[op.block]]
            selective = keeps[op.block, op.micro] == "selective"
            total += spec.interior_flops if selective else spec.forward_flops
    # The head's logits, which come chunk by chunk: once more in backward.
    chunked = setup.config.model.kind == "decoder" and setup.config.model.loss_chunk_tokens
    if chunked and plan.blocks[-1] in plan.rank_blocks(rank):
        for micro, rows in enumerate(plan.rows[rank]):
            spec = setup.specs(rows, plan.length(rank, micro))[-1]
            total += max((layer.forward_flops for layer in spec.layers), default=0)
    return total


def smallest_change(
    config: RunConfig,
    ranks: int,
    data_bytes: int = 0,
    eval_rows: int = 0,
    short_rows: int = 0,
    *,
    like: Setup | None = None,
    until_s: float | None = None,
) -> Change | None:
    """Return the cheapest change of a config that keeps its budget, or None if none was found.

    Parameters
    ----------
    config : RunConfig
    ranks : int
    data_bytes, eval_rows, short_rows : int
        See `fit.DataSizes`.
    like : Setup, optional
        The config's own setup, if there is one.
    until_s : float, optional
        `time.monotonic` at which the search gives up: while a rank searches, others wait for it.

    Returns
    -------
    Change or None
        Single changes come before pairs; of these, those that leave the numbers as they are before
        those of precision, and then the cheapest: see `Work.score`.
    """
    trial = LayoutTrial(config, ranks, data_bytes, eval_rows, short_rows, like)
    budget = config.memory.budget_bytes
    singles = list(single_changes(config, ranks))
    pairs = (a + b for a, b in itertools.combinations(singles, 2) if not _same_field(a, b))
    for group in (singles, pairs):
        best: Layout | None = None
        for settings in group:
            if until_s is not None and time.monotonic() > until_s:
                break
            layout = trial.layout(settings)
            if layout is None or layout.peak_total > budget:
                continue
            if best is None or layout.rank_key < best.rank_key:
                best = layout
        if best is not None:
            return best
    return None


def _same_field(first: Settings, second: Settings) -> bool:
    return bool({name for name, _ in first} & {name for name, _ in second})


def single_changes(config: RunConfig, ranks: int) -> Iterator[Settings]:
    """Yield every change of one thing that may save memory."""
    for micros in more_microbatches(config, ranks):
        yield (("train.num_microbatches", micros),)
    modes = ("none", "selective", "full")
    for mode in modes[modes.index(config.memory.recompute) + 1 :]:
        yield (("memory.recompute", mode),)
    if config.memory.recompute == "full" and config.memory.recompute_every > 1:
        yield (("memory.recompute_every", 1),)
    replicas = config.parallel.dp or ranks // config.parallel.pp
    if replicas > 1:
        for stage in range(config.parallel.zero + 1, 4):
            yield (("parallel.zero", stage),)
    if config.parallel.zero == 3 and config.parallel.prefetch:
        yield (("parallel.prefetch", False),)
    for nbytes in (1 << 18, 1 << 16, 1 << 14, 1):
        one_stage = config.parallel.pp == 1
        if one_stage and config.parallel.zero < 3 and nbytes < config.parallel.bucket_bytes:
            yield (("parallel.bucket_bytes", nbytes),)
    if config.model.kind == "decoder":
        for tokens in (1024, 256, 64):
            if tokens < (config.model.loss_chunk_tokens or config.data.window * 1024):
                yield (("model.loss_chunk_tokens", tokens),)
    yield from precision_changes(config)


def more_microbatches(config: RunConfig, ranks: int) -> list[int]:
    """Return larger numbers of microbatches that divide the batch, each twice the one before.

    At most `MOST_MICROBATCHES`: longer plans take longer to price than a refusal may.
    """
    train = config.train
    rows, rest = divmod(
        train.global_batch, config.parallel.dp or max(ranks // config.parallel.pp, 1)
    )
    numbers: list[int] = []
    last = train.num_microbatches
    for number in range(last + 1, 0 if rest else min(rows, MOST_MICROBATCHES) + 1):
        if rows % number == 0 and (number >= 2 * last or number == rows):
            numbers.append(number)
            last = number
    return numbers


def precision_changes(config: RunConfig) -> Iterator[Settings]:
    """Yield 16-bit layouts of a config that computes in wider numbers."""
    precision = config.precision
    if precision.compute in ("same", "float32", "float64"):
        yield (("precision.compute", "bfloat16"),)
        if precision.reduce in ("same", "float32", "float64"):
            yield (("precision.compute", "bfloat16"), ("precision.reduce", "bfloat16"))


def change_sentence(change: Change | None) -> str:
    """Return what to do, for an error text."""
    if change is None:
        return (
            "No change of one or two settings was found that fits; raise memory.budget_bytes, or "
            "let `mpisim plan` search all layouts."
        )
    exactness = " (numbers are rounded otherwise)" if change.changes_numbers else ""
    return (
        f"The smallest change that fits: {change.options}{exactness}, with a predicted peak of "
        f"{change.peak_total} bytes ({format_bytes(change.peak_total)})."
    )


def change_record(change: Change | None) -> Mapping[str, Any] | None:
    """Return a change as JSON can hold it."""
    if change is None:
        return None
    return {
        "options": change.options,
        "settings": dict(change.settings),
        "predicted_peak_bytes": change.peak_total,
        "changes_numbers": change.changes_numbers,
    }


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

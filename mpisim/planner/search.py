"""The grid of layouts: what may differ, which of them fit, and which of these is best."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisim.config import dump_config
from mpisim.config.schema import RunConfig
from mpisim.data.load import load_data
from mpisim.errors import ConfigError
from mpisim.train.changes import (
    MOST_MICROBATCHES,
    Layout,
    LayoutTrial,
    Settings,
    precision_changes,
    with_settings,
)
from mpisim.train.fit import NO_DATA, DataSizes, sizes_of
from mpisim.train.setup import Setup

PRECISIONS = ("keep", "if-needed", "any")
"""Whether layouts count that round numbers otherwise: never, where nothing else fits, always."""

_BUCKET_BYTES = (1 << 18, 1 << 16)
"""Sizes of gradient buckets that are tried beside the config's own, bytes."""
_SEGMENTS = (1, 2, 4)
"""Blocks that share a kept input, with recompute "full"."""


@dataclass(frozen=True)
class Search:
    """What a search found."""

    config: RunConfig
    """The config that was asked for, with the budget."""
    ranks: int
    fits: tuple[Layout, ...]
    """Best first."""
    rejected: tuple[Layout, ...]
    """Nearest first: by peak."""
    sizes: DataSizes
    with_data: bool
    """The bytes of the data set are in all figures."""

    @property
    def budget_bytes(self) -> int:
        """What a rank may hold."""
        return self.config.memory.budget_bytes

    @property
    def chosen(self) -> Layout | None:
        """The best layout that fits."""
        return self.fits[0] if self.fits else None


def search_layouts(
    config: RunConfig,
    ranks: int,
    budget_bytes: int | None = None,
    *,
    precision: str = "if-needed",
    with_data: bool = True,
) -> Search:
    """Search the layouts of a config that fit a budget.

    Parameters
    ----------
    config : RunConfig
    ranks : int
    budget_bytes : int, optional
        Of a rank; by default the config's own.
    precision : {"keep", "if-needed", "any"}
        See `PRECISIONS`.
    with_data : bool
        Load the data once, to know its bytes; without them figures are a lower bound.

    Returns
    -------
    Search

    Raises
    ------
    ConfigError
        There is no budget, or no layout at all for so many ranks.

    Notes
    -----
    Layouts that fit are ordered by what a step costs: bytes sent by all ranks, and flops that are
    recomputed, 16 of which count as a byte (`train.changes.Work`). Equals are ordered by messages,
    then by fewer microbatches, then by their settings; those that round numbers otherwise come
    last. What the global batch and the model are is never changed, nor how it is cut into stages:
    degree of axis pp, schedule, chunks and split are the config's.
    """
    budget = config.memory.budget_bytes if budget_bytes is None else budget_bytes
    if budget < 1:
        raise ConfigError(
            f"the budget must be at least 1 byte; got {budget}. Add --budget, like --budget 64MiB, "
            f"or set memory.budget_bytes."
        )
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}. Choose one."
        )
    config = with_settings(config, [("memory.budget_bytes", budget)])
    # What no layout could be gives its error here.
    setup = Setup(_plainest(config), ranks)
    sizes = sizes_of(config, load_data(config)) if with_data else NO_DATA
    trial = LayoutTrial(config, ranks, *sizes)
    few, many = _microbatches(config, setup.mesh.dp)
    found = list(_tried(trial, config, _grid(config, setup, few), ((),)))
    if many and _none_fits(found, budget):
        found += _tried(trial, config, _grid(config, setup, many), ((),))
    others = tuple(precision_changes(config))
    if others and precision != "keep" and (precision == "any" or _none_fits(found, budget)):
        found += _tried(trial, config, _grid(config, setup, few), others)
        if many and _none_fits(found, budget):
            found += _tried(trial, config, _grid(config, setup, many), others)
    return Search(
        config,
        ranks,
        tuple(sorted((x for x in found if x.peak_total <= budget), key=lambda x: x.rank_key)),
        tuple(
            sorted(
                (x for x in found if x.peak_total > budget),
                key=lambda x: (x.peak_total, x.rank_key),
            )
        ),
        sizes,
        with_data,
    )


def _plainest(config: RunConfig) -> RunConfig:
    plain = (("train.num_microbatches", 1), ("parallel.zero", 0), ("memory.recompute", "none"))
    return with_settings(config, plain)


def _tried(
    trial: LayoutTrial,
    config: RunConfig,
    grid: list[Settings],
    precisions: tuple[Settings, ...],
) -> Iterator[Layout]:
    for extra, settings in itertools.product(precisions, grid):
        layout = trial.layout(_changed(config, extra + settings))
        if layout is not None:
            yield layout


def _changed(config: RunConfig, settings: Settings) -> Settings:
    """Leave out what the config says already."""
    changed = []
    for name, value in settings:
        section, _, key = name.partition(".")
        if getattr(getattr(config, section), key) != value:
            changed.append((name, value))
    return tuple(changed)


def _none_fits(found: list[Layout], budget: int) -> bool:
    return all(layout.peak_total > budget for layout in found)


def _grid(config: RunConfig, setup: Setup, numbers: list[int]) -> list[Settings]:
    """Return the settings of every layout that the numbers of the config allow."""
    replicas = setup.mesh.dp
    blocks = setup.full_plan().blocks
    num_params = sum(param.size for param in setup.model.param_specs())
    grid: list[Settings] = []
    for micros, recompute, stage in itertools.product(
        numbers,
        _recomputes(config, setup, len(blocks)),
        range(4) if 1 < replicas <= num_params else (0,),
    ):
        base: Settings = (("train.num_microbatches", micros), *recompute, ("parallel.zero", stage))
        if stage == 3:
            grid += [(*base, ("parallel.prefetch", prefetch)) for prefetch in (False, True)]
            continue
        if setup.mesh.pp > 1:
            grid.append(base)
            continue
        whole = num_params * setup.itemsizes.reduce
        own = config.parallel.bucket_bytes
        for nbytes in (own, *(n for n in _BUCKET_BYTES if n < min(own, whole))):
            grid.append((*base, ("parallel.bucket_bytes", nbytes)))
    return grid


def _microbatches(config: RunConfig, replicas: int) -> tuple[list[int], list[int]]:
    """Return numbers that divide the batch, each about twice the last: few ones, and many.

    Long plans are tried only where shorter ones do not fit.
    """
    rows, own = config.train.global_batch // replicas, config.train.num_microbatches
    numbers, last = {own, rows}, 0
    for number in range(1, rows + 1):
        if rows % number == 0 and number >= 2 * last:
            numbers.add(number)
            last = number
    valid = sorted(number for number in numbers if rows % number == 0)
    most = max(own, MOST_MICROBATCHES)
    return [n for n in valid if n <= most], [n for n in valid if n > most]


def _recomputes(config: RunConfig, setup: Setup, num_blocks: int) -> list[Settings]:
    found: list[Settings] = [(("memory.recompute", "none"),)]
    if any(block.interior_bytes for block in setup.specs(1)):
        found.append((("memory.recompute", "selective"),))
    segments = {config.memory.recompute_every, *_SEGMENTS}
    for every in sorted(segments):
        if every == 1 or every < num_blocks - 1:
            found.append((("memory.recompute", "full"), ("memory.recompute_every", every)))
    return found


def write_config(search: Search, path: Path) -> str:
    """Write the chosen layout as a config file; returns the command that runs it.

    Raises
    ------
    ConfigError
        Nothing fits, or the file exists.
    """
    if search.chosen is None:
        raise ConfigError("a layout must fit to be written; got none. Raise the budget.")
    text = (
        f"# Written by mpisim plan: {search.ranks} ranks within {search.budget_bytes} bytes each, "
        f"predicted peak {search.chosen.peak_total}.\n{dump_config(search.chosen.config)}"
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"the file to write must be new; got {path}, which exists. Name another one."
        ) from None
    return f"mpisim train {path} --ranks {search.ranks}"


def layout_facts(layout: Layout, budget_bytes: int) -> dict[str, Any]:
    """Return a layout as plain data."""
    config, worst, work = layout.config, layout.worst, layout.work
    spare = budget_bytes - worst.peak_total
    return {
        "fits": spare >= 0,
        "num_microbatches": config.train.num_microbatches,
        "recompute": config.memory.recompute,
        "recompute_every": config.memory.recompute_every,
        "pp": config.parallel.pp,
        "schedule": config.parallel.schedule if config.parallel.pp > 1 else "",
        "chunks": config.parallel.chunks,
        "zero": config.parallel.zero,
        "prefetch": config.parallel.prefetch and config.parallel.zero == 3,
        "bucket_bytes": config.parallel.bucket_bytes,
        "compute": config.precision.compute,
        "reduce": config.precision.reduce,
        "changes_numbers": layout.changes_numbers,
        "peak_bytes": worst.peak_total,
        "spare_bytes": max(0, spare),
        "missing_bytes": max(0, -spare),
        "peak_rank": worst.rank,
        "peak_plan": worst.plan,
        "peak_op": worst.peak_op,
        "at_peak": worst.at_peak,
        "dominant": worst.dominant,
        "dominant_bytes": worst.at_peak[worst.dominant],
        "state_bytes": sum(worst.state.values()),
        "bytes_moved": work.bytes_moved,
        "messages": work.messages,
        "recomputed_flops": work.recomputed_flops,
        "score": work.score,
        "options": layout.options,
    }

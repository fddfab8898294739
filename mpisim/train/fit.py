"""Whether a run fits its budget: the fullest moment of all that it will execute, and the verdict.

Nothing is loaded or sent here. `loop` asks before it loads data and again before it builds the
state, `mpisim check` asks without data, and `changes` asks about other layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mpisim.data.footprint import sampling_bytes, sampling_peak_bytes
from mpisim.errors import ConfigError
from mpisim.layouts.metrics import MEMORY_CATEGORIES
from mpisim.plan.build import Plan
from mpisim.plan.forecast import comm_buffer_bytes, owned_range
from mpisim.train.setup import Setup
from mpisim.units import format_bytes

if TYPE_CHECKING:
    from mpisim.config.schema import RunConfig
    from mpisim.data.load import Dataset

STATE_CATEGORIES = ("params", "master_params", "grads", "optimizer")
"""What a rank holds of the model, whatever the batch."""
DRAWING = "drawing sample numbers"
"""The moment before a step's first op."""


class DataSizes(NamedTuple):
    """What of the data decides how much memory a run takes; zeros give a lower bound."""

    data_bytes: int = 0
    """Bytes that the loaded data set keeps."""
    eval_rows: int = 0
    """Rows of every evaluation; 0: none, or unknown."""
    short_rows: int = 0
    """Rows of the last batch of an epoch, if it is smaller and the run gets there; else 0."""


NO_DATA = DataSizes()
"""Nothing is known of the data: figures are a lower bound."""


@dataclass(frozen=True)
class WorstForecast:
    """The fullest moment of the fullest rank, over all plans that a run executes."""

    rank: int
    plan: str
    """Name of the plan."""
    peak_total: int
    at_peak: dict[str, int]
    """Bytes by category at that moment."""
    peak_op: str
    """The op, as the plan writes it."""
    state: dict[str, int]
    """Bytes by category of what that rank always holds of the model."""

    @property
    def dominant(self) -> str:
        """The category with the most bytes at the peak."""
        return max(self.at_peak, key=lambda name: self.at_peak[name])


def sizes_of(config: RunConfig, data: Dataset) -> DataSizes:
    """Return what the data of a run adds to its memory.

    Parameters
    ----------
    config : RunConfig
    data : Dataset
        Loaded.
    """
    train = config.train
    heldout = data.num_heldout
    short = data.num_train % train.global_batch
    reached = train.steps > data.num_train // train.global_batch
    return DataSizes(data.nbytes, min(train.eval_rows or heldout, heldout), short if reached else 0)


def worst_forecast(
    setup: Setup, data_bytes: int = 0, eval_rows: int = 0, short_rows: int = 0
) -> WorstForecast:
    """Return the fullest moment of the rank that needs most.

    Parameters
    ----------
    setup : Setup
    data_bytes, eval_rows, short_rows : int
        See `DataSizes`; with zeros the figure is a lower bound.

    Returns
    -------
    WorstForecast
        The first of equals: training before evaluation, lower ranks first.

    Notes
    -----
    Exact where the sizes are: an allocator hook with this peak as its cap lets the run pass, and
    with one byte less it does not. (A run whose every update is skipped, because its gradients are
    not finite, may get along with less.)
    """
    plans = [setup.full_plan()]
    plans += [setup.train_plan(short_rows)] if short_rows else []
    plans += [setup.eval_plan(eval_rows)] if eval_rows else []
    plans += [setup.eval_plan(eval_rows, base=True)] if eval_rows and setup.compresses else []
    worst: WorstForecast | None = None
    for plan in plans:
        seen = set()
        for rank in range(setup.mesh.size):
            alike = _alike(setup, plan, rank)
            if alike in seen:
                continue
            seen.add(alike)
            found = _forecast(setup, plan, rank, data_bytes)
            if worst is None or found.peak_total > worst.peak_total:
                worst = found
    assert worst is not None
    return worst


def _alike(setup: Setup, plan: Plan, rank: int) -> tuple:
    """Return all that a rank's forecast depends on beside the plan: most ranks are alike."""
    parts: set[int] = set()
    own = []
    for bucket in plan.rank_buckets(rank):
        lo, hi = owned_range(plan, bucket, rank)
        own.append(hi - lo)
        parts |= {
            min(hi, b) - max(lo, a) for a, b in bucket.offsets().values() if a < hi and b > lo
        }
    lengths = plan.lengths[rank] if plan.lengths else ()
    sizes = setup.itemsizes
    buffers = comm_buffer_bytes(plan, rank, sizes.wire, sizes.reduce)
    stage = plan.mesh.coordinate(rank)["pp"]
    return stage, plan.rows[rank], lengths, buffers, tuple(own), frozenset(parts)


def _forecast(setup: Setup, plan: Plan, rank: int, data_bytes: int) -> WorstForecast:
    memory = setup.forecast(plan, rank, data_bytes)
    peak_total, at_peak, peak_op = memory.peak_total, memory.at_peak, memory.peak_op
    # The sample numbers of the step are drawn between two plans, when nothing else is held.
    rows = sum(plan.rows[rank])
    drawing = sampling_peak_bytes(rows) if plan.kind == "train" else 8 * rows + 8
    beside = drawing - sampling_bytes(rows)
    between = dict(memory.live)
    if (total := sum(between.values()) + beside) > peak_total:
        between["temp"] += beside
        peak_total, at_peak, peak_op = total, between, DRAWING
    state = {name: memory.live[name] for name in STATE_CATEGORIES}
    return WorstForecast(rank, plan.name, peak_total, at_peak, peak_op, state)


def require_fit(setup: Setup, sizes: DataSizes = NO_DATA, *, with_data: bool = False) -> None:
    """Refuse a run whose plans need more than its budget, if the config wants that checked.

    Parameters
    ----------
    setup : Setup
    sizes : DataSizes
    with_data : bool
        The sizes are those of loaded data: the figures are exact, not a lower bound.

    Raises
    ------
    ConfigError
        With the missing bytes, what holds them, and the smallest change that fits.
    """
    memory = setup.config.memory
    if not (memory.budget_bytes and memory.static_check):
        return
    worst = worst_forecast(setup, *sizes)
    if worst.peak_total > memory.budget_bytes:
        from mpisim.train.changes import change_sentence, smallest_change

        change = smallest_change(setup.config, setup.mesh.size, *sizes, like=setup)
        advice = change_sentence(change)
        if change is None and sizes.data_bytes >= memory.budget_bytes:
            advice = (
                "The data set alone takes as much: use less of it (data.max_bytes, "
                "data.num_rows), or raise memory.budget_bytes."
            )
        elif not with_data:
            advice += " All figures are without the data set, which comes on top."
        raise ConfigError(f"{_refusal(memory.budget_bytes, worst, with_data)} {advice}")


def _refusal(budget: int, worst: WorstForecast, with_data: bool) -> str:
    missing = worst.peak_total - budget
    model_state = sum(worst.state.values())
    if model_state > budget:
        return (
            f"memory.budget_bytes must hold at least the parameters and what belongs to them; got "
            f"{budget} for {model_state} bytes on rank {worst.rank} "
            f"({breakdown(worst.state)}), {model_state - budget} bytes too few; the whole run "
            f"needs {worst.peak_total}."
        )
    least = "" if with_data else " at least"
    return (
        f"memory of a rank must stay within memory.budget_bytes = {budget}; got a predicted peak "
        f"of{least} {worst.peak_total}, {missing} bytes too many, on rank {worst.rank} in "
        f"{worst.peak_op} of plan {worst.plan} ({breakdown(worst.at_peak)})."
    )


def breakdown(by_category: dict[str, int]) -> str:
    """Return bytes by category as text, in the order of the ledger, without zeros."""
    names = [name for name in MEMORY_CATEGORIES if by_category.get(name)]
    return ", ".join(f"{name} {format_bytes(by_category[name])}" for name in names)

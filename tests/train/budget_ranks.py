"""Budgets on real ranks: what `test_budget` runs inside one launch."""

from __future__ import annotations

from mpisim.config import config_from_mapping
from mpisim.data.load import load_data
from mpisim.errors import MemoryBudgetExceeded
from mpisim.launch import Job
from mpisim.train.changes import with_settings
from mpisim.train.fit import sizes_of, worst_forecast
from mpisim.train.loop import train_on
from mpisim.train.setup import Setup

NO_LIMIT = 1 << 40
"""A budget that never bites: an evaluation is cut as with any budget."""


def budgeted(config, nbytes, **memory):
    values = {"budget_bytes": nbytes, "static_check": False} | memory
    return with_settings(config, [(f"memory.{name}", value) for name, value in values.items()])


def real_pairs(transport, folder):
    """Yield predicted and real verdict of six pairs, every ZeRO stage among them."""
    for number, zero in enumerate([0, 1, 2, 3, 0, 1]):
        config = config_from_mapping(
            {
                "run": {"dir": folder, "name": f"pair-{number}"},
                "data": {"kind": "regression", "num_rows": 300, "num_features": 6},
                "model": {"hidden": [40, 20], "dtype": "float32"},
                "train": {"steps": 1, "global_batch": 24, "num_microbatches": 1 + number % 2},
                "parallel": {"zero": zero, "overlap": False},
                "memory": {"budget_bytes": NO_LIMIT},
            }
        )
        setup = Setup(config, transport.size)
        sizes = sizes_of(config, load_data(config))
        plan = setup.full_plan()
        peaks = [setup.forecast(plan, r, sizes.data_bytes).peak_total for r in range(setup.mesh.dp)]
        # One byte below the least of all ranks' peaks every rank hits the wall in the same op, so
        # none is left waiting and the next pair can start. (The widths are such that no other op
        # comes as near to the peak as the few hundred bytes that rank 0 holds more.)
        fits = number % 3 != 2
        budget = worst_forecast(setup, *sizes).peak_total if fits else min(peaks) - 1
        config = budgeted(config, budget)
        try:
            train_on(
                transport, Setup(config, transport.size), Job(transport.rank, transport.size), True
            )
            hit = False
        except MemoryBudgetExceeded:
            hit = True
        transport.barrier()
        yield {"fits": fits, "hit": hit}

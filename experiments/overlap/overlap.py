"""Reads from a run's trace how much of the gradient rings was done before the backward ended.

Usage: python experiments/overlap/overlap.py RUN_DIR

Counts, over all ranks and steps, the ring steps of all gradient buckets but the last whose message
had arrived when the last Backward op ended. Prints one JSON row per rank and one for all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mpisim.report.traces import overlap, read_traces

WARMUP_STEPS = 2


def main() -> None:
    """Print the rows."""
    traces, _ = read_traces(Path(sys.argv[1]))
    rows = []
    for label, chosen in [("all", traces), *((trace.rank, [trace]) for trace in traces)]:
        found = overlap(chosen, first_step=WARMUP_STEPS)
        rows.append(
            {
                "rank": label,
                "ring_steps": found.ring_steps,
                "hidden": found.hidden,
                "share": round(found.share, 4),
            }
        )
    print("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]")


if __name__ == "__main__":
    main()

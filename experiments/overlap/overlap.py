"""Reads from a run's trace how much of the gradient rings was done before the backward ended.

Usage: python experiments/overlap/overlap.py RUN_DIR

For every training step and rank: the ring steps (receives) of all gradient buckets but the last
that were complete when the last Backward op ended, as a share of all of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from mpisim.trace.store import expand_messages, expand_ops, read_run


def overlap_shares(run_dir: Path, warmup_steps: int = 2) -> np.ndarray:
    """Return the share per (rank, step), shape (ranks, steps).

    Parameters
    ----------
    run_dir : Path
        A traced run.
    warmup_steps : int
        First steps to leave out.
    """
    shares = []
    for trace in read_run(run_dir):
        buckets = {
            ident: int(program.label.split()[1])
            for ident, program in trace.programs.items()
            if program.label.startswith("bucket")
        }
        last_bucket = max(buckets.values())
        ops, messages = expand_ops(trace), expand_messages(trace)
        wanted = [ident for ident, number in buckets.items() if number != last_bucket]
        receives = messages[~messages["is_send"] & np.isin(messages["program"], wanted)]
        mine = []
        for step in np.unique(ops["step"])[warmup_steps:]:
            rows = ops[ops["step"] == step]
            ends = [
                row["end_s"]
                for row in rows
                if trace.plans[int(row["plan"])].kinds[row["op_index"]] == "Backward"
            ]
            done = receives[receives["step"] == step]["completed_s"]
            mine.append(float(np.mean(done <= max(ends))))
        shares.append(mine)
    return np.array(shares)


def main() -> None:
    """Print the shares as JSON."""
    shares = overlap_shares(Path(sys.argv[1]))
    print(
        json.dumps(
            {
                "ranks": shares.shape[0],
                "steps": shares.shape[1],
                "median_share": float(np.median(shares)),
                "least_share_of_a_rank": float(np.median(shares, axis=1).min()),
                "least_share_of_a_step": float(shares.mean(axis=0).min()),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()

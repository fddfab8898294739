"""Measures our collectives and our tracing against baselines, interleaved in one process group.

    parent.py       starts the ranks, takes medians over launches, prints tables
    ranks.py        entry point of the started ranks
    collectives.py  rings beside the library's collectives and a memory copy
    tracing.py      a training step with tracing on and off
    quiet.py        which measurements other programs disturbed

Shared machines are noisy: figures are medians of ratios between calls of the same round, and
rounds during which other programs used more than 5% of the cores are dropped.
"""

from mpisim.bench.parent import BenchResult, bench_collectives, bench_trace

__all__ = ["BenchResult", "bench_collectives", "bench_trace"]

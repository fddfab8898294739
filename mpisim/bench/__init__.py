"""Measures us against baselines, interleaved in one process group.

    parent.py         starts the ranks, takes medians over launches, prints tables
    ranks.py          entry point of the started ranks
    collectives.py    rings beside the library's collectives and a memory copy
    tracing.py        a training step with tracing on and off
    step.py           the decoder's training step beside PyTorch's: config, start, table
    step_rank.py      the same, on the ranks: check of gradients, rounds
    step_profile.py   which kind of work the time of a step goes to
    torch_decoder.py  the decoder in PyTorch, in two variants
    torch_steps.py    its gradients and its training steps
    quiet.py          which measurements other programs disturbed

Shared machines are noisy: figures are medians of ratios between calls of the same round, and
rounds during which other programs used more than 5% of the cores are dropped.
"""

from mpisim.bench.parent import BenchResult, bench_collectives, bench_trace
from mpisim.bench.step import bench_step

__all__ = ["BenchResult", "bench_collectives", "bench_step", "bench_trace"]

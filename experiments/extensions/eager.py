"""Eager 1F1B: a schedule of your own. It runs further ahead than 1F1B, and so hides slow links.

A stage of 1F1B with n stages from itself to the last runs n forwards before its first backward. The
n-th comes back just in time if messages take no time; with a latency of L every round trip of
2 (n - 1) L is waited for, once in n microbatches. Here it runs 2 n - 1 ahead. With F and B seconds
of work per microbatch,

    n (F + B) + 2 (n - 1) L <= (2 n - 1) (F + B)    as long as    L <= (F + B) / 2

so up to that latency no round trip is waited for. The price: up to 2 n - 1 microbatches in flight.
"""

from mpisim.plan.ops import BackwardStage, ForwardStage
from mpisim.plan.schedules import register_schedule


def eager(num_stages, coordinate, num_microbatches, num_chunks):
    """Return what the rank at `coordinate` computes, in order."""
    ahead = min(2 * (num_stages - coordinate) - 1, num_microbatches)
    ops = [ForwardStage(micro) for micro in range(ahead)]
    for micro in range(num_microbatches):
        ops.append(BackwardStage(micro))
        if ahead + micro < num_microbatches:
            ops.append(ForwardStage(ahead + micro))
    return ops


register_schedule("eager-1f1b", eager)

"""Names of the figures that every rank reports per step, in the order they travel.

`engine/metrics.py` fills them in, GatherMetrics carries them to rank 0, `train` logs them, the
report and the plots read them back from metrics.jsonl.
"""

from __future__ import annotations

MEMORY_CATEGORIES = (
    "params",
    "master_params",
    "grads",
    "optimizer",
    "activations",
    "comm_buffers",
    "data",
    "temp",
)

CHANNELS = (
    ("dp", "all_reduce"),
    ("dp", "reduce_scatter"),
    ("dp", "all_gather"),
    ("pp", "activation"),
    ("pp", "grad"),
    ("pp", "all_reduce"),
    ("control", "all_reduce"),
    ("control", "gather"),
)
"""(axis, collective or kind of message) pairs whose traffic is counted apart."""

TRAFFIC_FIELDS = ("sent_messages", "sent_bytes", "received_messages", "received_bytes")

STALL_CAUSES = (
    ("dp", "recv"),
    ("dp", "send"),
    ("pp", "recv"),
    ("pp", "send"),
    ("control", "recv"),
    ("control", "send"),
)
"""(axis, what was waited for): a message, or the completion of a send."""

METRIC_NAMES = (
    "step_s",
    "compute_s",
    "rows",
    *(f"stall_{axis}_{cause}_s" for axis, cause in STALL_CAUSES),
    *(f"{axis}_{name}_{field}" for axis, name in CHANNELS for field in TRAFFIC_FIELDS),
    *(f"live_{category}_bytes" for category in MEMORY_CATEGORIES),
    *(f"peak_{category}_bytes" for category in MEMORY_CATEGORIES),
    "peak_total_bytes",
)

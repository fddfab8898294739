"""The textbook ladder: a training step in plain, single-process NumPy, one small function a step.

Read it in this order: `mlp` (forward, loss, backward by hand), `accumulation` (one update from
several microbatches), `recompute` (blocks run again instead of kept, dropout tickets),
`mixed_precision` (16-bit values, float32 masters, loss scale), `data_parallel` (the same update
from several workers and their ring), `optimizers` (SGD, AdamW, clipping), `zero` (optimizer state,
gradients and parameters split over ranks), `memory` (bytes of all that, and a loop that stays
below a budget), `decoder` (a whole transformer in float64); `chunks` and `checks` serve these.
Clarity comes before speed. Tests use these functions as the oracle that the engine is compared
with; nothing here sends a message or knows a config.
"""

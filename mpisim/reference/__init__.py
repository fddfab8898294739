"""The textbook ladder: a training step in plain, single-process NumPy, one small function a step.

Read it in this order: `mlp` (forward, loss, backward by hand), `accumulation` (one update from
several microbatches), `recompute` (blocks run again instead of kept, dropout tickets),
`mixed_precision` (16-bit values, float32 masters, loss scale), `data_parallel` (the same update
from several workers and their ring), `optimizers` (SGD, AdamW, clipping), `decoder` (a whole
transformer in float64); `chunks` and `checks` serve these. Clarity comes before speed. Tests use
these functions as the oracle that the engine is compared with; nothing here sends a message or
knows a config.
"""

"""The textbook ladder: a training step in plain, single-process NumPy, one small function a step.

Read it in this order: `mlp` (forward, loss, backward by hand), `accumulation` (one update from
several microbatches), `data_parallel` (the same update from several workers and their ring),
`optimizers` (SGD, AdamW, clipping); `chunks` and `checks` serve these four. Clarity comes before
speed. Tests use these functions as the oracle that the engine is compared with; nothing here
sends a message or knows a config.
"""

"""The mathematics of a model on one rank: layers, blocks, models, initial weights, updates.

    layers.py       the interface of a layer; the layers of the MLP, the token table
    transformer.py  RMSNorm, projections, SwiGLU, dropout
    attention.py    rotary attention with grouped keys and values
    losses.py       loss layers, the language head
    blocks.py       layers in a row with skips: the unit of bucketing and recompute
    models.py       blocks in a row, the MLP; decoder.py builds the transformer
    bottleneck.py   two linear maps at a boundary between stages, and how they start
    params.py       initial weights by name
    dropout.py      masks as a function of seed, step, row, position, feature
    precision.py    which dtype is used for what
    kernels.py      what a kernel set offers; kernels_numpy.py, kernels_numba.py (numba_loops.py)
    kernel_memory.py  what kernels allocate, as arithmetic on sizes
    halves.py       float16 conversions in NumPy
    optim.py        update rules, learning rate, clipping
    arrays.py, numerics.py   what several of these share

Pure functions of arrays. Nothing here sends a message, knows a rank, reads a config or keeps
state: the engine owns parameters, accumulation and buffers, and calls in here with plain values.
"""

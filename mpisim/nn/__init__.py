"""The mathematics of a model on one rank: layers, blocks, models, initial weights, updates.

Pure functions of arrays. Nothing here sends a message, knows a rank, reads a config or keeps
state: the engine owns parameters, accumulation and buffers, and calls in here with plain values.
"""

"""From a config to the stages of a pipeline, with what cannot be refused before anything starts."""

from __future__ import annotations

from dataclasses import replace

from mpisim.config.schema import RunConfig
from mpisim.errors import ConfigError
from mpisim.layouts.codecs import check_codec, codec_spec
from mpisim.layouts.specs import BlockSpec
from mpisim.mesh import Mesh
from mpisim.nn.bottleneck import decode_name, encode_name, insert_bottlenecks
from mpisim.nn.models import Model
from mpisim.nn.precision import Policy
from mpisim.plan.build import Pipeline
from mpisim.plan.partition import block_costs, split_evenly
from mpisim.plan.schedules import find_schedule


def build_pipeline(
    config: RunConfig, mesh: Mesh, blocks: tuple[BlockSpec, ...], policy: Policy
) -> Pipeline:
    """Return how the model is cut, in which order stages work and what they send.

    Parameters
    ----------
    config : RunConfig
    mesh : Mesh
    blocks : tuple of BlockSpec
        The model's blocks for a microbatch of one row.
    policy : Policy

    Raises
    ------
    ConfigError
        A name is unknown, or the blocks cannot be cut so.
    """
    parallel, compression = config.parallel, config.compression
    schedule = find_schedule(parallel.schedule)
    codecs = {
        "compression.activations": compression.activations,
        "compression.grads": compression.grads,
    }
    for key, name in codecs.items():
        try:
            check_codec(codec_spec(name), policy.compute)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
    if parallel.chunks > 1 and not schedule.takes_chunks:
        raise ConfigError(
            f"parallel.chunks must be 1 with parallel.schedule = {parallel.schedule!r}; got "
            f"{parallel.chunks}. Set parallel.schedule = 'interleaved'."
        )
    if mesh.pp == 1:
        if parallel.chunks > 1 or parallel.split:
            key = "chunks" if parallel.chunks > 1 else "split"
            raise ConfigError(
                f"parallel.{key} must be left alone without stages; got "
                f"{getattr(parallel, key)} with parallel.pp = 1. Set parallel.pp."
            )
        return Pipeline((), parallel.schedule)
    names = [block.name for block in blocks]
    stages, at = [], 0
    for count in _block_counts(config, mesh.pp * parallel.chunks, blocks):
        stages.append(tuple(names[at : at + count]))
        at += count
    return Pipeline(tuple(stages), parallel.schedule, *codecs.values())


def with_bottlenecks(config: RunConfig, model: Model, pipeline: Pipeline) -> tuple[Model, Pipeline]:
    """Return the model with a bottleneck at every boundary, and its stages.

    Raises
    ------
    ConfigError
        The width does not fit the activations.
    """
    compression = config.compression
    kind = "layernorm" if compression.start == "layernorm" else "calibrated"
    ends = {boundary: stage[-1] for boundary, stage in enumerate(pipeline.stages[:-1])}
    try:
        narrow = insert_bottlenecks(model, ends, compression.bottleneck, kind)
    except ConfigError as error:
        raise ConfigError(f"compression.bottleneck: {error}") from None
    last = len(pipeline.stages) - 1
    stages = tuple(
        (
            *([decode_name(number - 1)] if number else []),
            *stage,
            *([encode_name(number)] if number < last else []),
        )
        for number, stage in enumerate(pipeline.stages)
    )
    return narrow, replace(pipeline, stages=stages)


def _block_counts(
    config: RunConfig, num_stages: int, blocks: tuple[BlockSpec, ...]
) -> tuple[int, ...]:
    parallel, split = config.parallel, config.parallel.split
    listed = ", ".join(block.name for block in blocks)
    if num_stages > len(blocks):
        raise ConfigError(
            f"parallel.pp * parallel.chunks must be at most the {len(blocks)} blocks of the model "
            f"({listed}); got {parallel.pp} * {parallel.chunks} = {num_stages} stages. Use fewer "
            f"stages, or a deeper model."
        )
    if split:
        if len(split) != num_stages or sum(split) != len(blocks):
            raise ConfigError(
                f"parallel.split must give each of the {num_stages} stages some of the "
                f"{len(blocks)} blocks ({listed}); got {list(split)}, {len(split)} stages of "
                f"{sum(split)} blocks. Choose {num_stages} numbers that add up to {len(blocks)}."
            )
        return split
    inner = repeated_blocks(blocks)
    if parallel.chunks > 1 and inner % num_stages:
        fitting = [v for v in range(1, inner + 1) if inner % (parallel.pp * v) == 0]
        hint = f"Set parallel.chunks = {fitting[-1]}" if fitting else "Use another number of blocks"
        raise ConfigError(
            f"parallel.pp * parallel.chunks must divide the {inner} inner blocks of the model; got "
            f"{parallel.pp} * {parallel.chunks} = {num_stages}. {hint}, or say with parallel.split "
            f"which stage gets how many."
        )
    return split_evenly(block_costs(blocks), num_stages)


def repeated_blocks(blocks: tuple[BlockSpec, ...]) -> int:
    """Return the number of blocks that are neither the embedding nor the head.

    A model whose blocks are all alike has neither: all of them count.
    """
    shapes = [tuple(param.shape for param in block.params) for block in blocks]
    common = max(set(shapes), key=shapes.count)
    if shapes.count(common) == len(blocks):
        return len(blocks)
    outer = (blocks[0].params == () or shapes[0] != common) + (shapes[-1] != common)
    return len(blocks) - outer

"""A model of equal blocks for pipelines: each is one square linear map, the last one also the loss.

An extension: `model.kind = "chain"` with `model.num_blocks` blocks over data.num_features features.
Forward, gradient of the input and gradient of the weights take the same number of operations in
every block, the first one too; there is no embedding and no head.
"""

from __future__ import annotations

from mpisim.config.schema import RunConfig
from mpisim.errors import ConfigError
from mpisim.nn.blocks import Block
from mpisim.nn.layers import Linear
from mpisim.nn.losses import MeanSquaredError
from mpisim.nn.models import Model
from mpisim.train.extensions import register_model


def build_chain(config: RunConfig) -> Model:
    """Return the chain that a config describes."""
    data = config.data
    if data.kind != "regression" or data.num_targets != data.num_features:
        raise ConfigError(
            f'data must be of kind "regression" with as many targets as features for a chain; got '
            f"{data.kind!r}, {data.num_features} and {data.num_targets}. Set them."
        )
    width = data.num_features
    blocks = [
        Block(f"block{index}", (("linear", Linear(width, width, "xavier")),))
        for index in range(config.model.num_blocks - 1)
    ]
    last = (("linear", Linear(width, width, "xavier")), ("loss", MeanSquaredError()))
    blocks.append(Block(f"block{config.model.num_blocks - 1}", last))
    return Model(blocks=tuple(blocks), input_kind="features", input_width=width)


register_model("chain", build_chain)

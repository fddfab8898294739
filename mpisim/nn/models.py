"""Models: tuples of blocks, the last of which ends in the loss.

`build_mlp` turns plain sizes into blocks; another architecture is another builder, as in `decoder`.
The engine runs the blocks, `plan` and `cost` read `Model.spec`. No arrays live here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from mpisim.errors import ConfigError
from mpisim.layouts.specs import BlockSpec, Conditions, ParamSpec
from mpisim.nn.blocks import Block, BlockSaved
from mpisim.nn.layers import Activation, Arrays, Embedding, Layer, Linear
from mpisim.nn.losses import LanguageHead, MeanSquaredError, SoftmaxCrossEntropy
from mpisim.nn.transformer import Dropout

ACTIVATIONS: dict[str, Callable[[], Layer]] = {
    kind: partial(Activation, kind) for kind in ("relu", "tanh", "gelu")
}
"""Nonlinearities of the MLP by name; `register_activation` adds to them."""

InputKind = Literal["tokens", "features"]
OutputKind = Literal["classes", "targets"]


@dataclass(frozen=True)
class Model:
    """Blocks in forward order; the output of the last one is the summed loss."""

    blocks: tuple[Block, ...]
    """First to last; the last block's last layer is the loss."""
    input_kind: InputKind
    """`tokens`: ids of shape (B, input_width); `features`: floats of that shape."""
    input_width: int
    """Window length in tokens (the longest, if rows may be shorter), or number of features."""
    d_model: int = 0
    """Width of the residual stream, which dropout masks have; 0 in an MLP."""

    @property
    def loss_block_index(self) -> int:
        """Index of the block that needs the targets."""
        return len(self.blocks) - 1

    @property
    def loss_layer(self) -> SoftmaxCrossEntropy | MeanSquaredError | LanguageHead:
        """The last layer of the last block."""
        return self.blocks[-1].layers[-1][1]

    @property
    def has_token_targets(self) -> bool:
        """Whether every position has a target of its own, and rows may have any length."""
        return isinstance(self.loss_layer, LanguageHead)

    @property
    def num_dropout_sites(self) -> int:
        """Places where masks are applied; 0 without dropout."""
        return sum(isinstance(layer, Dropout) for block in self.blocks for _, layer in block.layers)

    def spec(
        self,
        batch_rows: int,
        dtype: np.dtype,
        length: int | None = None,
        conditions: Conditions = Conditions(),
    ) -> tuple[BlockSpec, ...]:
        """Return the costs of every block for a microbatch.

        Parameters
        ----------
        batch_rows : int
            Rows of the microbatch, >= 0.
        dtype : numpy.dtype
            Of parameters and activations: float32, float64, float16 or bfloat16.
        length : int, optional
            Tokens per row of the microbatch, padding included; `input_width` without.
        conditions : Conditions
            What working memory depends on beside shapes and dtype.

        Returns
        -------
        tuple of BlockSpec
            In forward order, parameters with their full names.
        """
        specs = []
        x_shape: tuple[int, ...] = (batch_rows, self.input_width if length is None else length)
        for block in self.blocks:
            specs.append(block.spec(x_shape, dtype, conditions))
            x_shape = specs[-1].output_shape
        return tuple(specs)

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """Return all parameters with their full names, in registration order."""
        return tuple(param for block in self.spec(1, np.dtype("f4")) for param in block.params)

    def tables(self, dtype: np.dtype) -> tuple[np.ndarray, ...]:
        """Return the constant arrays that layers share, each once; the first call makes them."""
        found: dict[int, np.ndarray] = {}
        for block in self.blocks:
            for _, layer in block.layers:
                if isinstance(layer, TableLayer):
                    found |= {id(table): table for table in layer.tables(dtype)}
        return tuple(found.values())

    def tables_bytes(self, dtype: np.dtype) -> int:
        """Return the `nbytes` of `tables`, without making them."""
        layers = {layer for block in self.blocks for _, layer in block.layers}
        sizes = {layer.tables_bytes(dtype) for layer in layers if isinstance(layer, TableLayer)}
        return sum(sizes)

    def split_params(self, params: Arrays) -> tuple[Arrays, ...]:
        """Sort arrays keyed by full name into one dict per block, keyed within the block.

        Parameters
        ----------
        params : dict of str to ndarray
            One array per parameter, keyed as in `param_specs`. Not copied.

        Returns
        -------
        tuple of dict
            ``split[i]`` is what ``blocks[i].forward`` takes; a borrowed parameter is the owner's
            array.
        """
        return tuple(
            {name: params[full_name] for name, full_name in block.full_names.items()}
            for block in self.blocks
        )

    def num_correct(self, saved: BlockSaved) -> int | None:
        """Count right answers of one microbatch.

        Parameters
        ----------
        saved : tuple of tuple of ndarray
            What the last block's forward saved, whatever it kept.

        Returns
        -------
        int or None
            Valid targets that got the largest score; None if the model has no classes.
        """
        if isinstance(self.loss_layer, MeanSquaredError):
            return None
        return int(saved[-1][-1])


@runtime_checkable
class TableLayer(Protocol):
    """What a layer offers that reads constant arrays, equal for all layers of its kind."""

    def tables(self, dtype: np.dtype) -> tuple[np.ndarray, ...]:
        """Return them for arrays of `dtype`."""
        ...

    def tables_bytes(self, dtype: np.dtype) -> int:
        """Return their `nbytes`."""
        ...


def register_activation(name: str, make: Callable[[], Layer]) -> None:
    """Make a layer without parameters known as a nonlinearity, for the config's model.activation.

    Parameters
    ----------
    name : str
        Not a built-in one. One that was registered before means this one from now on.
    make : callable without arguments
        Returns the layer: see `nn.layers.Layer` for what one has to offer. Its `spec` says what it
        saves and needs, to the byte, or predicted memory is wrong.

    Raises
    ------
    ConfigError
        The name is built in.
    """
    if not name.strip() or name in ("relu", "tanh", "gelu"):
        raise ConfigError(
            f"name of an activation must be a word of its own; got {name!r}. Choose one that is "
            f"not built in."
        )
    if not callable(make):
        raise ConfigError(f"maker of {name!r} must be a function; got {make!r}. Give one.")
    ACTIVATIONS[name] = make


def build_mlp(
    *,
    input_kind: InputKind,
    window: int = 0,
    vocab_size: int = 0,
    embed_dim: int = 0,
    num_features: int = 0,
    hidden: tuple[int, ...],
    activation: str,
    output: tuple[OutputKind, int],
) -> Model:
    """Build a multi-layer perceptron over tokens or features.

    Parameters
    ----------
    input_kind : {"tokens", "features"}
        Over tokens, block ``embed`` looks up and flattens the window.
    window, vocab_size, embed_dim : int
        Ids per row, number of ids, width of an embedding; >= 1, read for tokens only.
    num_features : int
        Input width, >= 1; read for features only.
    hidden : tuple of int
        Widths of the hidden layers; each is one block, ``block0``, ``block1``, and so on. Empty:
        a linear model.
    activation : str
        After every hidden layer; one of `ACTIVATIONS`.
    output : ("classes", n) or ("targets", n)
        Softmax cross-entropy over n classes, or squared error over n targets; block ``head``.

    Returns
    -------
    Model

    Raises
    ------
    ConfigError
        A name is unknown or a size is below 1.

    Notes
    -----
    Hidden weights start "he" before relu and gelu, "xavier" before tanh; the head "xavier" (see
    `mpisim.nn.layers.Linear`).

    Examples
    --------
    >>> model = build_mlp(input_kind="features", num_features=3, hidden=(4,), activation="relu",
    ...                   output=("targets", 1))
    >>> [param.name for param in model.param_specs()]
    ['block0.linear.weight', 'block0.linear.bias', 'head.linear.weight', 'head.linear.bias']
    """
    _require_one_of("input_kind", input_kind, ("tokens", "features"))
    _require_one_of("activation", activation, tuple(ACTIVATIONS))
    nonlinearity = _make_activation(activation)
    output_kind, num_outputs = output
    _require_one_of("output", output_kind, ("classes", "targets"))
    sizes = {"output": num_outputs}
    sizes |= {f"hidden[{index}]": size for index, size in enumerate(hidden)}
    if input_kind == "tokens":
        sizes |= {"window": window, "vocab_size": vocab_size, "embed_dim": embed_dim}
    else:
        sizes |= {"num_features": num_features}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} must be at least 1; got {size}. Choose a positive size.")

    blocks = []
    width = num_features
    if input_kind == "tokens":
        blocks.append(Block("embed", (("embedding", Embedding(vocab_size, embed_dim)),)))
        width = window * embed_dim
    hidden_init = "xavier" if activation == "tanh" else "he"
    for index, size in enumerate(hidden):
        # The first layer over features has an input without a gradient: a third of its work less.
        linear = Linear(width, size, hidden_init, input_grad=bool(blocks))
        blocks.append(Block(f"block{index}", (("linear", linear), ("activation", nonlinearity))))
        width = size
    loss = SoftmaxCrossEntropy(num_outputs) if output_kind == "classes" else MeanSquaredError()
    head = Linear(width, num_outputs, "xavier", input_grad=bool(blocks))
    blocks.append(Block("head", (("linear", head), ("loss", loss))))
    return Model(
        blocks=tuple(blocks),
        input_kind=input_kind,
        input_width=window if input_kind == "tokens" else num_features,
    )


def _make_activation(name: str) -> Layer:
    try:
        layer = ACTIVATIONS[name]()
        problem = "" if callable(getattr(layer, "backward_input", None)) else repr(layer)
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise ConfigError(
            f"activation {name!r} must be made by a function without arguments that returns a "
            f"layer; got {problem}. Correct it."
        )
    return layer


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name} must be one of {', '.join(allowed)}; got {value!r}. Choose one of them."
        )

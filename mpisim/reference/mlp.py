"""A multi-layer perceptron with its whole backward pass written by hand (A1).

Forward, two losses, and the gradient of every step, each a pure function: inputs are never
modified, results are new arrays. Rows come first, then features. Parameters are a plain dict from
name to array. Accumulation, workers and update rules live in the sibling modules, which call
`mlp_loss_and_gradients`.

Notation in the docstrings: R rows, I inputs, O outputs, C classes, L layers. "Any shape" means one
or more dims. Non-finite numbers are not looked for: they spread as IEEE arithmetic spreads them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from mpisim.errors import ConfigError
from mpisim.reference.checks import (
    COMPUTE_DTYPES,
    require_choice,
    require_float_array,
    require_int,
    require_number,
    require_same_dtype,
    require_saved,
    require_shape,
)

Params = dict[str, np.ndarray]
"""Parameters, or anything shaped like them (gradients, moments): name -> array."""


# --- data and parameters ---------------------------------------------------------------------


def make_synthetic_regression_batch(
    rng: np.random.Generator, num_rows: int, num_features: int, num_targets: int, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw rows of a linear teacher: ``y = x @ teacher + noise * standard normal``.

    Parameters
    ----------
    rng : numpy.random.Generator
        The only source of randomness; its state advances.
    num_rows : int
        R, rows to draw, >= 0.
    num_features : int
        I, input width, >= 1.
    num_targets : int
        O, output width, >= 1.
    noise : float
        Standard deviation of the noise on the targets, >= 0, in units of y (whose own standard
        deviation is about 1 without noise).

    Returns
    -------
    x : ndarray of shape (num_rows, num_features), float64
        Standard normal inputs.
    y : ndarray of shape (num_rows, num_targets), float64
        Targets.

    Raises
    ------
    ConfigError
        A size or the noise is out of range, or `rng` is not a Generator.

    Notes
    -----
    The teacher is drawn first, so every call on a fresh generator of one seed shares it. Draw the
    whole data set in one call and cut it, rather than one call per batch on a running generator.
    """
    if not isinstance(rng, np.random.Generator):
        raise ConfigError(
            f"rng must be a numpy.random.Generator; got type {type(rng).__name__}. "
            f"Create one with numpy.random.default_rng(seed)."
        )
    num_rows = require_int("num_rows", num_rows, 0)
    num_features = require_int("num_features", num_features, 1)
    num_targets = require_int("num_targets", num_targets, 1)
    noise = require_number("noise", noise, 0.0)
    teacher = rng.standard_normal((num_features, num_targets)) / math.sqrt(num_features)
    x = rng.standard_normal((num_rows, num_features))
    y = x @ teacher + noise * rng.standard_normal((num_rows, num_targets))
    return x, y


def layer_param_names(num_layers: int) -> list[tuple[str, str]]:
    """Return the names of the weight and the bias of every layer, first to last.

    Parameters
    ----------
    num_layers : int
        L >= 1.

    Returns
    -------
    list of (weight name, bias name), length num_layers
        The last layer is ``head``, those before it are ``block0``, ``block1`` and so on, as in
        the engine's models.

    Raises
    ------
    ConfigError
        `num_layers` is below 1.

    Examples
    --------
    >>> layer_param_names(2)[0]
    ('block0.linear.weight', 'block0.linear.bias')
    >>> layer_param_names(2)[1]
    ('head.linear.weight', 'head.linear.bias')
    """
    num_layers = require_int("num_layers", num_layers, 1)
    layers = [f"block{index}" for index in range(num_layers - 1)] + ["head"]
    return [(f"{layer}.linear.weight", f"{layer}.linear.bias") for layer in layers]


def mlp_layers(params: Params) -> list[tuple[str, str]]:
    """Return the (weight name, bias name) of every layer that `params` holds, first to last.

    Parameters
    ----------
    params : dict of str to ndarray
        As `init_mlp` returns it, in any order. Only the names are read.

    Returns
    -------
    list of (weight name, bias name)
        One entry per layer, at least one.

    Raises
    ------
    ConfigError
        The names are not exactly those of a whole MLP.
    """
    layers = layer_param_names(max(1, len(params) // 2))
    if set(params) != {name for names in layers for name in names}:
        raise ConfigError(
            f"params must hold the linear.weight and linear.bias of block0, block1 and so on "
            f"without gaps, and of head; got {sorted(params)}. Create them with init_mlp."
        )
    return layers


def init_mlp(
    rng_for: Callable[[str], np.random.Generator],
    sizes: Sequence[int],
    dtype: str | np.dtype = "float64",
) -> Params:
    """Create the parameters of an MLP, each tensor from the generator of its own name.

    Parameters
    ----------
    rng_for : callable, str -> numpy.random.Generator
        Gives a fresh generator for a parameter name. Called once per weight matrix. Initialising
        by name makes the values independent of which rank holds which layer.
    sizes : sequence of int
        Widths from input to output, at least two, each >= 1. ``(I, hidden, O)`` is a two-layer
        MLP; ``(I, O)`` is a linear model.
    dtype : str or numpy.dtype, default "float64"
        "float32" or "float64".

    Returns
    -------
    dict of str to ndarray
        Named by `layer_param_names`. The weight of layer i has shape (sizes[i], sizes[i + 1]):
        normal with standard deviation 1/sqrt(sizes[i]), drawn in float64 and then rounded to
        `dtype`. Its bias has shape (sizes[i + 1],): zeros. Owned by the caller.

    Raises
    ------
    ConfigError
        Fewer than two sizes, a size below 1, or another dtype.

    Examples
    --------
    >>> params = init_mlp(lambda name: np.random.default_rng(len(name)), (3, 4, 2))
    >>> {name: array.shape for name, array in params.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'block0.linear.weight': (3, 4), 'block0.linear.bias': (4,),
     'head.linear.weight': (4, 2), 'head.linear.bias': (2,)}
    """
    if len(sizes) < 2:
        raise ConfigError(
            f"sizes must name at least an input and an output width; got {tuple(sizes)}. "
            f"Pass two or more widths, such as (16, 32, 1)."
        )
    widths = [require_int(f"sizes[{index}]", size, 1) for index, size in enumerate(sizes)]
    dtype = np.dtype(dtype)
    if dtype.name not in COMPUTE_DTYPES:
        raise ConfigError(
            f"dtype must be one of {', '.join(COMPUTE_DTYPES)}; got {dtype.name}. "
            f"Use one of these names."
        )
    params = {}
    shapes = itertools.pairwise(widths)
    for (weight, bias), (num_in, num_out) in zip(
        layer_param_names(len(widths) - 1), shapes, strict=True
    ):
        draw = rng_for(weight).standard_normal((num_in, num_out)) / math.sqrt(num_in)
        params[weight] = draw.astype(dtype)
        params[bias] = np.zeros(num_out, dtype)
    return params


# --- linear layer ----------------------------------------------------------------------------


def linear_forward(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return ``x @ weight + bias``.

    Parameters
    ----------
    x : ndarray of shape (R, I), float32 or float64
        Inputs, R >= 0. Not modified.
    weight : ndarray of shape (I, O), same dtype
        Not modified.
    bias : ndarray of shape (O,), same dtype
        Not modified.

    Returns
    -------
    ndarray of shape (R, O), same dtype
        A new array.

    Raises
    ------
    ConfigError
        Shapes do not fit together, or dtypes differ.

    Examples
    --------
    >>> linear_forward(np.array([[1.0, 2.0]]), np.array([[3.0], [4.0]]), np.array([5.0])).tolist()
    [[16.0]]
    """
    require_float_array("x", x, 2)
    require_float_array("weight", weight, 2)
    require_float_array("bias", bias, 1)
    require_same_dtype(x=x, weight=weight, bias=bias)
    require_shape("x", x, (x.shape[0], weight.shape[0]))
    require_shape("bias", bias, (weight.shape[1],))
    return x @ weight + bias


def linear_backward(
    x: np.ndarray, weight: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of a linear layer: ``dy @ weight.T``, ``x.T @ dy``, sum of dy's rows.

    Parameters
    ----------
    x : ndarray of shape (R, I), float32 or float64
        The input that forward saw. Not modified.
    weight : ndarray of shape (I, O), same dtype
        The weight that forward used. Not modified.
    dy : ndarray of shape (R, O), same dtype
        Gradient of the loss in the layer's output. Not modified.

    Returns
    -------
    dx : ndarray of shape (R, I)
        Gradient in the input.
    dweight : ndarray of shape (I, O)
        Gradient in the weight, summed over rows: any 1/R belongs to the loss.
    dbias : ndarray of shape (O,)
        Gradient in the bias, summed over rows.

    Raises
    ------
    ConfigError
        Shapes do not fit together, or dtypes differ.
    """
    require_float_array("weight", weight, 2)
    dweight, dbias = first_layer_backward(x, dy)
    require_same_dtype(x=x, weight=weight, dy=dy)
    require_shape("weight", weight, (x.shape[1], dy.shape[1]))
    return dy @ weight.T, dweight, dbias


def first_layer_backward(x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight and bias gradients of the first layer, whose input needs no gradient.

    Parameters
    ----------
    x : ndarray of shape (R, I), float32 or float64
        The rows of data that forward saw. Not modified.
    dy : ndarray of shape (R, O), same dtype
        Gradient of the loss in the layer's output. Not modified.

    Returns
    -------
    dweight : ndarray of shape (I, O)
        ``x.T @ dy``.
    dbias : ndarray of shape (O,)
        Sum of the rows of dy.

    Raises
    ------
    ConfigError
        Shapes do not fit together, or dtypes differ.

    Notes
    -----
    Data is not trained, so the product ``dy @ weight.T``, a third of a linear layer's work in a
    training step, is left out.
    """
    require_float_array("x", x, 2)
    require_float_array("dy", dy, 2)
    require_same_dtype(x=x, dy=dy)
    require_shape("dy", dy, (x.shape[0], dy.shape[1]))
    return x.T @ dy, dy.sum(axis=0)


# --- activations -----------------------------------------------------------------------------


def relu_forward(z: np.ndarray) -> np.ndarray:
    """Return ``max(z, 0)`` of each element.

    Parameters
    ----------
    z : ndarray of any shape, float32 or float64
        Not modified.

    Returns
    -------
    ndarray of z's shape and dtype
        A new array.

    Raises
    ------
    ConfigError
        `z` is no float array.
    """
    require_float_array("z", z)
    return np.maximum(z, 0)


def relu_backward(z: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Return dy where z > 0 and zero elsewhere; the slope at exactly 0 is taken as 0.

    Parameters
    ----------
    z : ndarray of any shape, float32 or float64
        The input that forward saw. Not modified.
    dy : ndarray of z's shape and dtype
        Gradient in the output. Not modified.

    Returns
    -------
    ndarray of z's shape and dtype
        Gradient in z.

    Raises
    ------
    ConfigError
        Shapes or dtypes differ.
    """
    _require_activation_pair(z, dy)
    return np.where(z > 0, dy, np.zeros((), dy.dtype))


def tanh_forward(z: np.ndarray) -> np.ndarray:
    """Return ``tanh(z)`` of each element.

    Parameters
    ----------
    z : ndarray of any shape, float32 or float64
        Not modified.

    Returns
    -------
    ndarray of z's shape and dtype
        A new array, in [-1, 1].

    Raises
    ------
    ConfigError
        `z` is no float array.
    """
    require_float_array("z", z)
    return np.tanh(z)


def tanh_backward(z: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Return ``dy * (1 - tanh(z)**2)``.

    Parameters
    ----------
    z : ndarray of any shape, float32 or float64
        The input that forward saw (not its output). Not modified.
    dy : ndarray of z's shape and dtype
        Gradient in the output. Not modified.

    Returns
    -------
    ndarray of z's shape and dtype
        Gradient in z; exactly 0 where tanh has saturated to 1 or -1.

    Raises
    ------
    ConfigError
        Shapes or dtypes differ.
    """
    _require_activation_pair(z, dy)
    t = np.tanh(z)
    return dy * (1 - t * t)


GELU_SCALE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


def _gelu_tanh(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return z limited to [-10, 10] and the inner tanh of gelu.

    Beyond 10 the tanh is exactly 1 or -1 in float64 too, so the limit changes no value; it keeps
    the cube from overflowing and the slope from becoming 0 * inf.
    """
    limited = np.clip(z, -10, 10)
    return limited, np.tanh(GELU_SCALE * (limited + GELU_CUBIC * limited * limited * limited))


def gelu_forward(z: np.ndarray) -> np.ndarray:
    """Return ``z/2 * (1 + tanh(sqrt(2/pi) * (z + 0.044715 z^3)))``, the tanh form of gelu.

    Parameters
    ----------
    z : ndarray of any shape, float32 or float64
        Finite. Not modified.

    Returns
    -------
    ndarray of z's shape and dtype
        A new array.

    Raises
    ------
    ConfigError
        `z` is no float array.

    Notes
    -----
    Hendrycks and Gimpel (2016), section 2; differs from ``z * Phi(z)`` by at most about 5e-4.
    """
    require_float_array("z", z)
    return 0.5 * z * (1 + _gelu_tanh(z)[1])


def gelu_backward(z: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Return dy times the derivative of `gelu_forward`.

    Parameters
    ----------
    z : ndarray of any shape, float32 or float64
        The input that forward saw. Finite. Not modified.
    dy : ndarray of z's shape and dtype
        Gradient in the output. Not modified.

    Returns
    -------
    ndarray of z's shape and dtype
        Gradient in z.

    Raises
    ------
    ConfigError
        Shapes or dtypes differ.

    Notes
    -----
    With u = s (z + c z^3) and t = tanh(u):
    d gelu / dz = (1 + t)/2 + z/2 (1 - t^2) s (1 + 3 c z^2).
    """
    _require_activation_pair(z, dy)
    limited, t = _gelu_tanh(z)
    inner_slope = GELU_SCALE * (1 + 3 * GELU_CUBIC * limited * limited)
    return dy * (0.5 * (1 + t) + 0.5 * limited * (1 - t * t) * inner_slope)


ACTIVATIONS = {
    "relu": (relu_forward, relu_backward),
    "tanh": (tanh_forward, tanh_backward),
    "gelu": (gelu_forward, gelu_backward),
}
"""Name -> (forward, backward). Every backward takes (input of forward, gradient in output)."""


def _require_activation_pair(z: np.ndarray, dy: np.ndarray) -> None:
    require_float_array("z", z)
    require_float_array("dy", dy)
    require_same_dtype(z=z, dy=dy)
    require_shape("dy", dy, z.shape)


# --- losses ----------------------------------------------------------------------------------


def mean_squared_error(prediction: np.ndarray, target: np.ndarray) -> float:
    """Return the squared error, summed over outputs and averaged over rows.

    Parameters
    ----------
    prediction : ndarray of shape (R, O), float32 or float64
        R >= 1. Not modified.
    target : ndarray of shape (R, O), same dtype
        Not modified.

    Returns
    -------
    float
        ``sum((prediction - target)**2) / R``: no factor 1/2 and no division by O. The sum is
        taken in float64.

    Raises
    ------
    ConfigError
        Shapes or dtypes differ, or there is no row: the mean of nothing is undefined.

    Examples
    --------
    >>> mean_squared_error(np.array([[1.0, 2.0], [0.0, 0.0]]), np.zeros((2, 2)))
    2.5
    """
    num_rows = _require_mean_squared_error(prediction, target)
    return float(np.sum(np.square(prediction - target), dtype=np.float64)) / num_rows


def mean_squared_error_backward(
    prediction: np.ndarray, target: np.ndarray, seed: float = 1.0
) -> np.ndarray:
    """Return the gradient of ``seed * mean_squared_error`` in the prediction.

    Parameters
    ----------
    prediction : ndarray of shape (R, O), float32 or float64
        R >= 1. Not modified.
    target : ndarray of shape (R, O), same dtype
        Not modified.
    seed : float, default 1.0
        Gradient of whatever the loss feeds into, finite and >= 0. A microbatch of n of an
        update's N rows has seed n/N.

    Returns
    -------
    ndarray of shape (R, O), same dtype
        ``seed * 2 * (prediction - target) / R``.

    Raises
    ------
    ConfigError
        Shapes or dtypes differ, there is no row, or the seed is out of range.
    """
    num_rows = _require_mean_squared_error(prediction, target)
    seed = require_number("seed", seed, 0.0)
    return (prediction - target) * (2.0 * seed / num_rows)


def _require_mean_squared_error(prediction: np.ndarray, target: np.ndarray) -> int:
    """Check the arguments and return the number of rows."""
    require_float_array("prediction", prediction, 2)
    require_float_array("target", target, 2)
    require_same_dtype(prediction=prediction, target=target)
    require_shape("target", target, prediction.shape)
    return _require_rows(prediction.shape[0])


def _require_rows(num_rows: int) -> int:
    if num_rows == 0:
        raise ConfigError(
            "a mean loss must have at least one row; got 0 rows. Skip empty microbatches: "
            "they have share 0 of the update."
        )
    return num_rows


def softmax_cross_entropy_sum(
    logits: np.ndarray, class_ids: np.ndarray, valid: np.ndarray | None = None
) -> tuple[float, int]:
    """Return the cross entropy summed over valid rows, and how many rows that is.

    Parameters
    ----------
    logits : ndarray of shape (R, C), float32 or float64
        Unnormalised log probabilities, R >= 0, C >= 1, finite. Not modified.
    class_ids : ndarray of shape (R,), any integer dtype
        The right class of each row, 0 <= id < C; rows that are not valid may hold anything.
        Not modified.
    valid : ndarray of shape (R,), bool, optional
        False marks padding, which counts in neither sum nor count. None: all rows are valid.

    Returns
    -------
    loss_sum : float
        Natural-log units (nats), summed in float64.
    count : int
        Valid rows. Sums and counts may be added over microbatches and ranks and divided once at
        the end; means may not be averaged when counts differ.

    Raises
    ------
    ConfigError
        A shape or dtype does not fit, or a valid row's class is out of range.

    Examples
    --------
    >>> loss_sum, count = softmax_cross_entropy_sum(np.zeros((3, 4)), np.array([0, 1, 3]))
    >>> round(loss_sum / count, 12) == round(math.log(4), 12), count
    (True, 3)
    """
    rows, ids = _valid_rows(logits, class_ids, valid)
    shifted, exp_sum = _shifted_exp_sum(logits[rows])
    # log(exp_sum) - shifted: the subtraction of the row maximum cancels and nothing overflows.
    losses = np.log(exp_sum) - shifted[np.arange(ids.size), ids]
    return float(np.sum(losses, dtype=np.float64)), int(ids.size)


def softmax_cross_entropy_sum_backward(
    logits: np.ndarray,
    class_ids: np.ndarray,
    valid: np.ndarray | None = None,
    seed: float = 1.0,
) -> np.ndarray:
    """Return the gradient of ``seed`` times the summed cross entropy in the logits.

    Parameters
    ----------
    logits, class_ids, valid
        As in `softmax_cross_entropy_sum`. Not modified.
    seed : float, default 1.0
        Finite and >= 0; 1/N gives the gradient of the mean over N valid rows, wherever they are.

    Returns
    -------
    ndarray of shape (R, C), logits' dtype
        ``seed * (softmax(logits) - one_hot(class_ids))``; rows that are not valid are 0.

    Raises
    ------
    ConfigError
        As in `softmax_cross_entropy_sum`, or the seed is out of range.
    """
    rows, ids = _valid_rows(logits, class_ids, valid)
    seed = require_number("seed", seed, 0.0)
    shifted, exp_sum = _shifted_exp_sum(logits[rows])
    dvalid = np.exp(shifted) / exp_sum[:, np.newaxis]
    dvalid[np.arange(ids.size), ids] -= 1
    dlogits = np.zeros_like(logits)
    dlogits[rows] = dvalid * seed
    return dlogits


def softmax_cross_entropy(logits: np.ndarray, class_ids: np.ndarray) -> float:
    """Return the cross entropy averaged over rows, in nats.

    Parameters
    ----------
    logits : ndarray of shape (R, C), float32 or float64
        R >= 1, finite. Not modified.
    class_ids : ndarray of shape (R,), any integer dtype
        The right class of each row, 0 <= id < C. Not modified.

    Returns
    -------
    float
        ``softmax_cross_entropy_sum / R``.

    Raises
    ------
    ConfigError
        A shape, dtype or class does not fit, or there is no row.
    """
    loss_sum, count = softmax_cross_entropy_sum(logits, class_ids)
    return loss_sum / _require_rows(count)


def softmax_cross_entropy_backward(
    logits: np.ndarray, class_ids: np.ndarray, seed: float = 1.0
) -> np.ndarray:
    """Return the gradient of ``seed * softmax_cross_entropy`` in the logits.

    Parameters
    ----------
    logits : ndarray of shape (R, C), float32 or float64
        R >= 1, finite. Not modified.
    class_ids : ndarray of shape (R,), any integer dtype
        Not modified.
    seed : float, default 1.0
        Finite and >= 0; n/N for a microbatch of n of an update's N rows.

    Returns
    -------
    ndarray of shape (R, C), logits' dtype
        ``seed * (softmax(logits) - one_hot(class_ids)) / R``.

    Raises
    ------
    ConfigError
        A shape, dtype or class does not fit, there is no row, or the seed is out of range.
    """
    require_float_array("logits", logits, 2)
    seed = require_number("seed", seed, 0.0)
    num_rows = _require_rows(logits.shape[0])
    return softmax_cross_entropy_sum_backward(logits, class_ids, seed=seed / num_rows)


def _valid_rows(
    logits: np.ndarray, class_ids: np.ndarray, valid: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Check the arguments; return the indices of valid rows and their class ids."""
    require_float_array("logits", logits, 2)
    num_rows, num_classes = logits.shape
    require_int("the number of classes", num_classes, 1)
    if not isinstance(class_ids, np.ndarray) or class_ids.dtype.kind not in "iu":
        got = getattr(class_ids, "dtype", type(class_ids).__name__)
        raise ConfigError(
            f"class_ids must be an ndarray of integers; got {got}. "
            f"Pass class numbers, not one-hot rows or floats."
        )
    require_shape("class_ids", class_ids, (num_rows,))
    if valid is None:
        valid = np.ones(num_rows, bool)
    if not isinstance(valid, np.ndarray) or valid.dtype != bool or valid.shape != (num_rows,):
        got = f"{valid.dtype} {valid.shape}" if isinstance(valid, np.ndarray) else repr(valid)
        raise ConfigError(
            f"valid must be a bool ndarray of shape {(num_rows,)}; got {got}. "
            f"Pass one flag per row, or None."
        )
    rows = np.flatnonzero(valid)
    ids = class_ids[rows]
    wrong = ids[(ids < 0) | (ids >= num_classes)]
    if wrong.size:
        raise ConfigError(
            f"class ids must be in 0..{num_classes - 1}; got {int(wrong[0])}. "
            f"Mark padding rows with valid = False, or widen the logits."
        )
    return rows, ids


def _shifted_exp_sum(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return logits minus their row maximum, and the row sums of its exponentials (>= 1)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted, np.exp(shifted).sum(axis=1)


LOSSES = {
    "mean_squared_error": (mean_squared_error, mean_squared_error_backward),
    "softmax_cross_entropy": (softmax_cross_entropy, softmax_cross_entropy_backward),
}
"""Name -> (mean over rows, its backward with a seed). Only means: sums would be weighted twice."""


# --- the whole network -----------------------------------------------------------------------


def mlp_forward(
    params: Params, x: np.ndarray, activation: str = "relu"
) -> tuple[np.ndarray, tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]]:
    """Run an MLP of any depth: linear layers with an activation between each two.

    Parameters
    ----------
    params : dict of str to ndarray
        As `init_mlp` returns it, L >= 1 layers. Not modified.
    x : ndarray of shape (R, I), the dtype of the parameters
        R >= 0. Not modified.
    activation : {"relu", "tanh", "gelu"}
        Applied after every layer but the last.

    Returns
    -------
    prediction : ndarray of shape (R, O)
        Output of the last layer.
    saved : tuple (inputs, preactivations)
        What `mlp_backward` needs: the L inputs of the linear layers, ``inputs[0] is x``, and the
        L - 1 inputs of the activations. Drop it to free the activations.

    Raises
    ------
    ConfigError
        Names, shapes or dtypes do not fit together, or the activation is unknown.

    Notes
    -----
    ``saved`` keeps `x` itself, not a copy: do not overwrite `x` before the backward pass.
    """
    layers = mlp_layers(params)
    require_choice("activation", activation, ACTIVATIONS)
    activation_forward, _ = ACTIVATIONS[activation]
    inputs, preactivations = [], []
    h = x
    for weight, bias in layers:
        inputs.append(h)
        h = linear_forward(h, params[weight], params[bias])
        if (weight, bias) != layers[-1]:
            preactivations.append(h)
            h = activation_forward(h)
    return h, (tuple(inputs), tuple(preactivations))


def mlp_backward(
    params: Params,
    saved: tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]],
    dprediction: np.ndarray,
    activation: str = "relu",
) -> Params:
    """Return the gradient in every parameter: the chain rule from the last layer to the first.

    Parameters
    ----------
    params : dict of str to ndarray
        The parameters that forward used. Not modified.
    saved : tuple
        Second result of `mlp_forward` with the same parameters. Not modified.
    dprediction : ndarray of shape (R, O)
        Gradient of the loss in the prediction. Not modified.
    activation : {"relu", "tanh", "gelu"}
        The same as in forward.

    Returns
    -------
    dict of str to ndarray
        Same names, shapes and dtype as `params`, in backward order: last layer first. New arrays.

    Raises
    ------
    ConfigError
        `saved` is of another depth, shapes or dtypes do not fit, or the activation is unknown.
    """
    layers = mlp_layers(params)
    require_choice("activation", activation, ACTIVATIONS)
    _, activation_backward = ACTIVATIONS[activation]
    inputs, preactivations = saved
    require_saved(inputs, preactivations, len(layers), "mlp_forward")
    head_bias = params[layers[-1][1]]
    require_float_array("dprediction", dprediction, 2)
    require_shape("dprediction", dprediction, (inputs[-1].shape[0], head_bias.shape[0]))
    gradients = {}
    dz = dprediction
    for index in reversed(range(1, len(layers))):
        weight, bias = layers[index]
        dh, gradients[weight], gradients[bias] = linear_backward(inputs[index], params[weight], dz)
        dz = activation_backward(preactivations[index - 1], dh)
    weight, bias = layers[0]
    gradients[weight], gradients[bias] = first_layer_backward(inputs[0], dz)
    return gradients


def mlp_loss_and_gradients(
    params: Params,
    x: np.ndarray,
    y: np.ndarray,
    activation: str = "relu",
    loss: str = "mean_squared_error",
    seed: float = 1.0,
) -> tuple[float, Params]:
    """Run forward, loss and backward on one batch.

    Parameters
    ----------
    params : dict of str to ndarray
        As `init_mlp` returns it. Not modified.
    x : ndarray of shape (R, I), the dtype of the parameters
        R >= 1. Not modified.
    y : ndarray
        Targets: shape (R, O), same dtype, for "mean_squared_error"; integer class ids of shape
        (R,) for "softmax_cross_entropy". Not modified.
    activation : {"relu", "tanh", "gelu"}
        Between the layers.
    loss : {"mean_squared_error", "softmax_cross_entropy"}
        A mean over rows.
    seed : float, default 1.0
        The gradients are those of ``seed * loss``; n/N for a part of n of an update's N rows.

    Returns
    -------
    loss : float
        The mean loss of these rows, without the seed.
    gradients : dict of str to ndarray
        Gradients of ``seed * loss``, names and shapes of `params`. New arrays.

    Raises
    ------
    ConfigError
        Anything does not fit together, or there is no row.
    """
    require_choice("loss", loss, LOSSES)
    loss_forward, loss_backward = LOSSES[loss]
    prediction, saved = mlp_forward(params, x, activation)
    value = loss_forward(prediction, y)
    gradients = mlp_backward(params, saved, loss_backward(prediction, y, seed), activation)
    return value, gradients


def central_difference_gradient(
    function: Callable[[np.ndarray], float], point: np.ndarray, step: float = 1e-5
) -> np.ndarray:
    """Estimate a gradient by moving one element at a time: (f(p + h) - f(p - h)) / 2h.

    Parameters
    ----------
    function : callable, ndarray -> float
        Takes an array like `point`; called 2 * point.size times. It must not keep its argument.
    point : ndarray of any shape, float64
        Where to differentiate. Not modified.
    step : float, default 1e-5
        h, in units of `point`, > 0. The error is about h^2 from the third derivative and
        1e-16 * abs(f) / h from rounding; 1e-5 balances both near 1.

    Returns
    -------
    ndarray of point's shape, float64
        The estimate. A new array.

    Raises
    ------
    ConfigError
        `point` is not float64 or the step is out of range.

    Examples
    --------
    >>> point = np.array([1.0, 2.0])
    >>> central_difference_gradient(lambda p: float(p[0] * p[1]), point).round(6).tolist()
    [2.0, 1.0]
    """
    require_float_array("point", point)
    if point.dtype != np.float64:
        raise ConfigError(
            f"point must be float64; got {point.dtype}. Differences of size 1e-5 drown in the "
            f"rounding of float32, so convert the whole function to float64."
        )
    step = require_number("step", step, 0.0, low_open=True)
    moved = point.copy()
    gradient = np.zeros_like(point)
    for index in np.ndindex(*point.shape):
        moved[index] = point[index] + step
        above = float(function(moved))
        moved[index] = point[index] - step
        below = float(function(moved))
        moved[index] = point[index]
        gradient[index] = (above - below) / (2 * step)
    return gradient

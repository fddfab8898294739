"""Writes text with the weights of a finished run, one byte after the other.

Reads run.json and the weights, and runs plain forward passes in the weights' own dtype:
no ranks, no plan, no memory of earlier passes. Behind `mpisim sample`.

Shape suffixes: B batch rows, T positions, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from mpisim.config import config_from_mapping
from mpisim.config.schema import RunConfig
from mpisim.data.text import SEPARATOR
from mpisim.data.tokenizer import BOS, EOS, NUM_BYTES, encode
from mpisim.errors import CheckpointError, ConfigError
from mpisim.nn.layers import Arrays, LayerContext
from mpisim.nn.losses import LanguageHead
from mpisim.nn.models import Model
from mpisim.nn.params import rng_for_name
from mpisim.train.extensions import load_extensions, require_names
from mpisim.train.record import digest
from mpisim.train.rundir import read_json
from mpisim.train.setup import build_model
from mpisim.train.stage_files import WEIGHTS_FOLDER
from mpisim.train.stage_reader import load_run_weights

NextLogits = Callable[[list[int]], np.ndarray]
"""Ids so far -> logits of the next one, shape (V,), float64."""


def sample(
    run_dir: Path | str,
    prompt: str | bytes = "",
    num_tokens: int = 200,
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    stop_at_eos: bool = True,
    extensions: bool = False,
) -> bytes:
    """Continue a prompt with the model of a finished run.

    Parameters
    ----------
    run_dir : Path or str
        Run over text, with its weights.
    prompt : str or bytes
        May be empty. Of a longer one than the model can see only the tail is seen.
    num_tokens : int
        Bytes to write, >= 0.
    temperature : float
        Logits are divided by it, >= 0; 0 always takes the most probable byte.
    top_k : int
        Choose among this many most probable bytes, >= 0; 0 means all.
    seed : int
        Of the choices, >= 0: the same arguments give the same bytes.
    stop_at_eos : bool
        Stop where the model ends its document; otherwise it is not given that choice.
    extensions : bool
        Run the files of users that the run was trained with, if they are still the same: not by
        themselves, because the run directory may come from somebody else.

    Returns
    -------
    bytes
        Without the prompt; at most `num_tokens` long. Bytes only: special tokens are not among
        the choices. They need not be UTF-8, see `readable`.

    Raises
    ------
    ConfigError
        An argument is out of range, or the run's data are no text.
    CheckpointError
        run.json or the weights are missing, damaged, not of each other, or not finite.

    Notes
    -----
    The decoder starts from the begin-of-document token and sees the last `model.max_len` tokens;
    the MLP sees its window, filled up in front with the byte that separates documents, which also
    ends a document (data.kind "stdlib"). A shorter sample is the start of a longer one.
    """
    _check_arguments(num_tokens, temperature, top_k, seed)
    path = Path(run_dir)
    config = _read_config(path, extensions)
    try:
        ids = encode(prompt).tolist()
    except ValueError as error:
        raise ConfigError(f"prompt: {error}") from None
    if config.data.kind == "regression":
        raise ConfigError(
            f"a run must be over text to be sampled; got data.kind = 'regression' in {path}. Name "
            f"a run over text or the standard library."
        )
    _require_names(config, path)
    model = build_model(config)
    is_decoder = isinstance(model.loss_layer, LanguageHead)
    if is_decoder and model.loss_layer.vocab_size <= EOS:
        raise ConfigError(
            f"model.vocab_size must be above {EOS} (bytes, begin and end of a document) to be "
            f"sampled; got {model.loss_layer.vocab_size} in {path}. Name another run."
        )
    params, _ = load_run_weights(path, model.param_specs(), config.model.dtype)
    _require_finite(params, path)
    _require_own(params, path)
    split = model.split_params(params)
    if is_decoder:
        context, fill = config.model.max_len or config.data.window, 0
        ids, end = [BOS, *ids], EOS
    else:
        context = fill = config.data.window
        # Only there the byte stands between documents; elsewhere it is a byte like any other.
        end = SEPARATOR[0] if config.data.kind == "stdlib" else None

    def next_logits(seen: list[int]) -> np.ndarray:
        row = seen[-context:]
        row = [SEPARATOR[0]] * (fill - len(row)) + row
        return last_logits(model, split, np.array([row], dtype=np.int32))

    choose = _chooser(temperature, top_k, seed)
    written = _write(next_logits, ids, choose, end, stop_at_eos)
    # The count comes first: it must end before another byte is computed.
    return bytes(byte for _, byte in zip(range(num_tokens), written, strict=False))


def readable(text: bytes) -> str:
    """Return bytes as text that is safe to print.

    Parameters
    ----------
    text : bytes

    Returns
    -------
    str
        U+FFFD stands for bytes that are no UTF-8, and for characters that are not printable but
        for tab and line break: they could act on a terminal.

    Examples
    --------
    >>> ascii(readable(b"pi" + bytes([255, 27]))) == ascii("pi" + 2 * chr(0xFFFD))
    True
    """
    shown = (
        character if character.isprintable() or character in "\n\t" else chr(0xFFFD)
        for character in text.decode("utf-8", "replace")
    )  # fmt: skip
    return "".join(shown)


def last_logits(model: Model, params: tuple[Arrays, ...], ids: np.ndarray) -> np.ndarray:
    """Return the logits of the token after a row: the forward pass without its loss.

    Parameters
    ----------
    model : Model
        Whose loss is a cross-entropy over tokens or classes.
    params : tuple of dict
        As `Model.split_params` returns them. Not modified.
    ids : ndarray of shape (1, T), integer
        One document, or the end of one.

    Returns
    -------
    ndarray of shape (V,), float64

    Raises
    ------
    CheckpointError
        They are not finite.
    """
    ctx = LayerContext()
    x = ids
    # Weights that are finite may still overflow; the logits tell.
    with np.errstate(all="ignore"):
        for block, block_params in zip(model.blocks[:-1], params[:-1], strict=True):
            x, _ = block.forward(block_params, x, ctx)
        head = model.blocks[-1]
        loss_name, loss = head.layers[-1]
        without_loss = replace(head, layers=head.layers[:-1], borrows=())
        x, _ = without_loss.forward(params[-1], x, ctx)
        if isinstance(loss, LanguageHead):
            logits = x[0, -1] @ params[-1][f"{loss_name}.weight"].T
        else:
            logits = x[0]
    if not np.isfinite(logits).all():
        raise CheckpointError(
            "logits must be finite; got some that are not, from weights that are. The run has "
            "diverged: train it with a lower optimizer.lr or with optimizer.clip_norm."
        )
    return logits.astype(np.float64)


def _write(
    next_logits: NextLogits,
    ids: list[int],
    choose: Callable[[np.ndarray], int],
    end: int | None,
    stop_at_end: bool,
) -> Iterator[int]:
    """Yield byte after byte; ends only where the document does."""
    while True:
        logits = next_logits(ids)
        # Specials are no text, and neither is what a larger vocabulary has above them.
        allowed = np.arange(len(logits)) < NUM_BYTES
        if end is not None:
            allowed[end] = stop_at_end
        logits[~allowed] = -np.inf
        token = choose(logits)
        if token == end:
            return
        ids.append(token)
        yield token


def _chooser(temperature: float, top_k: int, seed: int) -> Callable[[np.ndarray], int]:
    """Return a function from logits to a token; equal logits go by the lower id."""
    rng = rng_for_name(seed, "sample")

    def choose(logits: np.ndarray) -> int:
        order = np.argsort(-logits, kind="stable")[: top_k or None]
        if temperature == 0:
            return int(order[0])
        order = order[np.isfinite(logits[order])]
        with np.errstate(over="ignore"):  # a tiny temperature is a greedy one
            scaled = (logits[order] - logits[order[0]]) / temperature
        totals = np.cumsum(np.exp(scaled))
        place = np.searchsorted(totals, rng.random() * totals[-1], side="right")
        # The product may round up to the last total.
        return int(order[min(place, len(order) - 1)])

    return choose


def _check_arguments(num_tokens: int, temperature: float, top_k: int, seed: int) -> None:
    for name, value in (("num_tokens", num_tokens), ("top_k", top_k), ("seed", seed)):
        if value < 0:
            raise ConfigError(f"{name} must be at least 0; got {value}. Choose another.")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ConfigError(
            f"temperature must be a number from 0 up; got {temperature}. Choose another."
        )


def _require_names(config: RunConfig, path: Path) -> None:
    """Refuse a model that only files of users know, unless they were run."""
    try:
        require_names(config)
    except ConfigError as error:
        files = ", ".join(config.run.extensions)
        if not files:
            raise CheckpointError(
                f"run.json must hold a config that this version of mpisim knows; got one that "
                f"breaks a rule ({error}) in {path}. Run the job again."
            ) from None
        raise ConfigError(
            f"the model of a run must be known; got {error} The run was trained with {files}: if "
            f"you trust these files, sample with --extensions, which runs them."
        ) from None


def _read_config(path: Path, extensions: bool = False) -> RunConfig:
    record = read_json(path / "run.json")
    try:
        config = config_from_mapping(record["config"])
        if extensions:
            load_extensions(config.run.extensions, dict(record["extensions"]))
        return config
    except (KeyError, TypeError):
        problem = "none"
    except ConfigError as error:
        problem = f"one that breaks a rule ({str(error).splitlines()[0].rstrip('.')})"
    raise CheckpointError(
        f"run.json must hold a config that this version of mpisim knows; got {problem} in {path}. "
        f"Run the job again."
    )


def _require_own(params: Arrays, path: Path) -> None:
    """Refuse weights that are not those the run ended with; a run cut short has no record."""
    if not (path / "summary.json").exists():
        return
    try:
        summary = read_json(path / "summary.json")
        # Of stages, no rank has the digest of all.
        whole = summary if (path / WEIGHTS_FOLDER).is_dir() else summary["ranks"][0]
        recorded = str(whole["params_sha256"])
    except (KeyError, IndexError, TypeError):
        return
    if digest(params) != recorded:
        raise CheckpointError(
            f"weights must be those that the run saved (sha256 {recorded[:16]}); got others in "
            f"{path}. Run the job again."
        )


def _require_finite(params: Arrays, path: Path) -> None:
    for name, array in params.items():
        bad = array.size - int(np.count_nonzero(np.isfinite(array)))
        if bad:
            raise CheckpointError(
                f"weights must be finite; got {bad} of {array.size} values that are not in "
                f"{name} of {path}. The run has diverged: train it with a lower optimizer.lr or "
                f"with optimizer.clip_norm."
            )

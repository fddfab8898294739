"""From the config to a data set: the one place that knows every kind of data.

Called once per rank before training, and by whoever needs the data's sizes or baselines. A new
kind of data is a class with the members of `Dataset` and a branch here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from mpisim.data.batch import Batch
from mpisim.data.load_documents import load_documents
from mpisim.data.synthetic import RegressionData
from mpisim.data.text import load_text
from mpisim.data.tokenizer import VOCAB_SIZE
from mpisim.errors import ConfigError

if TYPE_CHECKING:
    from mpisim.config.schema import RunConfig


class Dataset(Protocol):
    """What every kind of data offers; the batches are copies that the caller owns."""

    primary_baseline: str
    """Key of `baselines` that any model must beat."""

    @property
    def num_train(self) -> int:
        """Number of training samples."""
        ...

    @property
    def num_heldout(self) -> int:
        """Number of held-out samples, possibly 0; they are never trained on."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that stay in memory."""
        ...

    def batch_bytes(self, rows: int, length: int | None = None) -> int:
        """Return the bytes of a batch of `rows` rows, `length` tokens long (decoder)."""
        ...

    def batch_peak_bytes(self, rows: int, length: int | None = None) -> int:
        """Return the most bytes of new arrays alive while a batch is made, its own included.

        For indices that are an int64 array.
        """
        ...

    def train_batch(self, indices: np.ndarray) -> Batch:
        """Return the training samples with these numbers."""
        ...

    def heldout_batch(self, indices: np.ndarray) -> Batch:
        """Return the held-out samples with these numbers."""
        ...

    def count_targets(self, split: str, indices: np.ndarray) -> int:
        """Return the valid targets of samples of "train" or "heldout", without their batch."""
        ...

    def count_bytes(self, split: str, indices: np.ndarray) -> int:
        """Return those of the valid targets that are bytes: the divisor of bits per byte."""
        ...

    def baselines(self) -> dict[str, float | str]:
        """Return losses that need no training, keyed with their unit."""
        ...

    def record(self) -> dict[str, object]:
        """Return name, sha256 and sizes for the run record."""
        ...


def check_data_section(config: RunConfig) -> None:
    """Refuse data that the model cannot read, as far as the config tells.

    Raises
    ------
    ConfigError
        A decoder over regression rows, or a vocabulary too small for text.
    """
    data, vocab_size = config.data, config.model.vocab_size
    if config.model.kind != "decoder":
        return
    if data.kind == "regression":
        raise ConfigError(
            'data.kind must be "stdlib" or "text" for model.kind "decoder"; got '
            '"regression". Set data.kind, or model.kind = "mlp".'
        )
    is_text = data.kind == "stdlib" or not str(data.path).endswith(".npy")
    if is_text and 0 < vocab_size < VOCAB_SIZE:
        raise ConfigError(
            f"model.vocab_size must be at least {VOCAB_SIZE} for text (256 bytes and ten "
            f"specials); got {vocab_size}. Set it to 0, or give ids of your own as a .npy file."
        )


def load_data(config: RunConfig) -> Dataset:
    """Load the data that a config asks for.

    Parameters
    ----------
    config : RunConfig
        Sections `data` and `model`, `train.global_batch` and `run.seed` are read.

    Returns
    -------
    Dataset

    Raises
    ------
    ConfigError
        The file is missing, unreadable, a directory, empty or too short, the model cannot read
        such data, or there are fewer training rows than `train.global_batch`. The message names
        the field.
    """
    check_data_section(config)
    data = config.data
    dataset: Dataset
    if config.model.kind == "decoder":
        dataset = load_documents(
            kind=data.kind, path=data.path, window=data.window, layout=data.layout,
            max_bytes=data.max_bytes, vocab_size=config.model.vocab_size,
        )  # fmt: skip
    elif data.kind == "regression":
        dataset = RegressionData(
            num_rows=data.num_rows,
            num_features=data.num_features,
            num_targets=data.num_targets,
            noise=data.noise,
            seed=config.run.seed,
            dtype=config.model.dtype,
        )
    else:
        dataset = load_text(
            kind=data.kind, path=data.path, window=data.window, max_bytes=data.max_bytes
        )
    if config.train.global_batch > dataset.num_train:
        raise ConfigError(
            f"train.global_batch must be at most the number of training rows; got "
            f"{config.train.global_batch} with {dataset.num_train} rows of data.kind "
            f'"{data.kind}". Lower train.global_batch or use more data.'
        )
    return dataset

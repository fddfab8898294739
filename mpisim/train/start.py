"""The weights that a run starts from: opened and compared before anything is replaced or built."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from mpisim.errors import ConfigError
from mpisim.nn.params import fill_param
from mpisim.train.rundir import run_dir_of
from mpisim.train.setup import Setup
from mpisim.train.stage_reader import StageReader
from mpisim.train.weights import compare_names

READ_BYTES = 1 << 16
"""Working space while weights are read."""


class Start:
    """Where the first values of a rank's parameters come from.

    Parameters
    ----------
    setup : Setup
    rank : int
        Opens the files that hold its parameters, and no others.

    Attributes
    ----------
    digest : str
        Of what says which weights these are; the same on ranks that see the same files. Empty if
        the first values are random.
    has_bottlenecks : bool
        The weights are those of a run with the same bottlenecks: theirs are taken, too.

    Raises
    ------
    CheckpointError
        The weights are missing, damaged, or not those of this model.
    ConfigError
        They lie in the run directory itself, which is about to be replaced.
    """

    def __init__(self, setup: Setup, rank: int) -> None:
        config = setup.config
        self._setup, self._seed = setup, config.run.seed
        self._reader: StageReader | None = None
        self._names: set[str] = set()
        self.digest = ""
        self.has_bottlenecks = False
        source = config.run.init_from
        if source is None:
            return
        run_dir = run_dir_of(config).resolve()
        if Path(source).resolve() == run_dir or run_dir in Path(source).resolve().parents:
            raise ConfigError(
                f"run.init_from must lie outside of the run directory that this run writes; got "
                f"{source} with run.name = {config.run.name!r}. Choose another run.name."
            )
        # Outside NumPy: reading is no part of the memory that the run is measured by.
        scratch = np.frombuffer(bytearray(READ_BYTES), np.uint8)
        reader = self._reader = StageReader(source, scratch)
        try:
            self._compare(reader)
            own = {
                param.name
                for bucket in setup.full_plan().rank_buckets(rank)
                for param in bucket.params
            }
            reader.open_files(own & self._names)
            self.digest = hashlib.sha256(reader.identity()).hexdigest()
        except BaseException:
            self.close()
            raise

    def _compare(self, reader: StageReader) -> None:
        """Take all parameters of the model from the file, or all but those of bottlenecks."""
        shapes = {name: place.shape for name, place in reader.places.items()}
        wanted = {spec.name: spec.shape for spec in self._setup.model.param_specs()}
        base = {spec.name: spec.shape for spec in self._setup.base_model.param_specs()}
        self.has_bottlenecks = wanted != base and not wanted.keys() - shapes.keys()
        if not self.has_bottlenecks:
            wanted = base
        compare_names(reader.path, shapes, wanted)
        self._names = set(wanted)

    def fill(self, name: str, out: np.ndarray, lo: int) -> None:
        """Write elements from `lo` on of a parameter's first values: see `engine.buckets`."""
        if name in self._names:
            assert self._reader is not None
            self._reader.fill(name, out, lo)
        else:
            fill_param(self._setup.model, self._seed, name, out, lo)

    def close(self) -> None:
        """Close the files."""
        if self._reader is not None:
            self._reader.close()

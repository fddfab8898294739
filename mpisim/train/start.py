"""The weights that a run starts from: opened and compared before anything is replaced or built."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from mpisim.comm.transport import Transport
from mpisim.engine.state import EngineState
from mpisim.errors import CheckpointError, ConfigError, MpisimError
from mpisim.nn.bottleneck import is_bottleneck
from mpisim.nn.params import fill_param
from mpisim.train.record import array_digest
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
        Verifies the files that hold its parameters, and opens no others.

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
        try:
            self._open(source, rank)
        except (OSError, ValueError) as error:
            self.close()
            if isinstance(error, MpisimError):
                raise
            raise CheckpointError(
                f"run.init_from must name weights that can be read; got {error} for "
                f"{source[:80]!r}. Correct the path."
            ) from None
        except BaseException:
            self.close()
            raise

    def _open(self, source: str, rank: int) -> None:
        setup, run_dir = self._setup, run_dir_of(self._setup.config).resolve()
        if not Path(source).exists():
            raise ConfigError(
                f"run.init_from must name a run directory or a weights file; got {source[:200]}, "
                f"which does not exist. Correct the path; it is relative to where the command is "
                f"started."
            )
        # Outside NumPy: reading is no part of the memory that the run is measured by.
        scratch = np.frombuffer(bytearray(READ_BYTES), np.uint8)
        reader = self._reader = StageReader(source, scratch)
        for place in (Path(source).resolve(), reader.path.resolve()):
            if place == run_dir or run_dir in place.parents:
                raise ConfigError(
                    f"run.init_from must lie outside of the run directory that this run writes; "
                    f"got {source} with run.name = {setup.config.run.name!r}. Choose another "
                    f"run.name."
                )
        self._compare(reader)
        own = {
            param.name for bucket in setup.full_plan().rank_buckets(rank) for param in bucket.params
        }
        reader.verify_files(own & self._names)
        self.digest = hashlib.sha256(reader.identity()).hexdigest()

    def _compare(self, reader: StageReader) -> None:
        """Take all parameters of the model from the file, or all but those of bottlenecks."""
        shapes = {name: place.shape for name, place in reader.places.items()}
        wanted = {spec.name: spec.shape for spec in self._setup.model.param_specs()}
        base = {spec.name: spec.shape for spec in self._setup.base_model.param_specs()}
        self.has_bottlenecks = wanted != base and not wanted.keys() - shapes.keys()
        if not self.has_bottlenecks:
            wanted = base
            if any(is_bottleneck(name) for name in shapes):
                raise CheckpointError(
                    f"weights to start from must have the bottlenecks of the run, or none; got "
                    f"others in {reader.path}. Use compression.bottleneck and parallel.pp of the "
                    f"run that wrote them."
                )
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


def require_same_start(transport: Transport, state: EngineState) -> None:
    """Compare the first weights that several ranks hold: their files may be different ones.

    Raises
    ------
    ConfigError
        Two replicas of a stage, or the two ends of a tied table, differ. Shards, of which there is
        one each, are not compared.
    """
    mine = {}
    for store in state.stores:
        if state.zero < 3:
            mine[f"bucket {store.bucket.index}"] = array_digest(store.working)
        if store.bucket.twin >= 0:
            place = state.dp.index if state.zero else ""
            mine[f"tied {place} {sorted(store.offsets)}"] = array_digest(store.own_working)
    told: dict[str, tuple[int, str]] = {}
    for rank, text in enumerate(transport.exchange(json.dumps(mine))):
        for what, digest in json.loads(text).items():
            first, known = told.setdefault(what, (rank, digest))
            if digest != known:
                raise ConfigError(
                    f"all ranks must start from the same weights; got other numbers on rank {rank} "
                    f"than on rank {first}. Give every host the same files for run.init_from."
                )

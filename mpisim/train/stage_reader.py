"""Weights read from disk: a stage's, a range of one parameter, or all, whatever split wrote them.

A reader takes the bytes it wants and no others, and converts them tile by tile. It knows the files
of `stage_files` and the one of `weights`; `sample` and `mpisim weights` are behind it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mpisim.errors import CheckpointError, ConfigError
from mpisim.layouts.specs import ParamSpec
from mpisim.nn.numerics import tile_slices
from mpisim.nn.precision import dtype_of
from mpisim.train.stage_files import (
    CODES,
    FORMAT,
    MANIFEST_FILE,
    MAX_HEADER_BYTES,
    STAGE_KEY,
    VERSION,
    WEIGHTS_FOLDER,
    Place,
    StageRecord,
    check_set,
    file_order,
    make_header,
    metadata_text,
    model_fingerprint,
    parse_json,
    parse_place,
    parse_record,
    part_of,
    stage_file,
    write_part,
)
from mpisim.train.weights import (
    METADATA_KEY,
    WEIGHTS_FILE,
    compare_dtypes,
    compare_names,
    damaged,
    listed,
    load_weights,
    not_writable,
    parse_metadata,
)
from mpisim.units import format_bytes

TILE_BYTES = 1 << 20
"""Working space of a reader that is given none."""


class StageReader:
    """Weights on disk, of which any range can be read without the rest.

    Parameters
    ----------
    source : Path or str
        Run directory, folder with a manifest, or one safetensors file.
    scratch : ndarray of shape (n,), uint8, optional
        Working space, at least 16 bytes; without it `TILE_BYTES` are made when first needed. What
        needs no conversion is read in place.

    Attributes
    ----------
    places : dict of str to Place
    aliases : dict of str to str
    records : tuple of StageRecord
        By stage; one for a single file.
    metadata : dict of str to str
    bytes_read : int
        Bytes of parameters read so far, as stored.
    header_bytes_read : int
        Bytes of the manifest and of headers.

    Raises
    ------
    CheckpointError
        There are no weights, or the manifest breaks a rule.

    Notes
    -----
    A stage's file is opened when something in it is first wanted; its size and header must be what
    the manifest says before a number is read. Its sha256 is compared by `verify` only.
    """

    def __init__(self, source: Path | str, scratch: np.ndarray | None = None) -> None:
        self.path = _find(Path(source))
        self.is_split = self.path.name == MANIFEST_FILE
        self.bytes_read = self.header_bytes_read = 0
        self.metadata: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        self._scratch = scratch
        self._files: dict[str, BinaryIO] = {}
        self._verified = False
        try:
            self.records = self._parse_manifest() if self.is_split else (self._open_single(),)
        except BaseException:
            self.close()
            raise
        self.places = {
            name: place for record in self.records for name, place in record.params.items()
        }
        self._owners = {name: record for record in self.records for name in record.params}

    def __enter__(self) -> StageReader:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def verify_files(self, names: Iterable[str]) -> None:
        """Verify the stage files that hold these parameters, and no others.

        Raises
        ------
        CheckpointError
            A file is missing, or not what the manifest says, to the last bit.
        """
        owners = {self._owners[name].file: self._owners[name] for name in names}
        for _, record in sorted(owners.items()):
            if self.is_split:
                self._verify(record)

    def identity(self) -> bytes:
        """Return bytes that say which weights these are: the manifest, or a digest of the file.

        A manifest holds the sha256 of every stage's numbers.
        """
        if self.is_split:
            return self.path.read_bytes()
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    @property
    def scratch(self) -> np.ndarray:
        """Working space."""
        if self._scratch is None:
            self._scratch = np.empty(TILE_BYTES, np.uint8)
        return self._scratch

    def fill(self, name: str, out: np.ndarray, lo: int = 0) -> None:
        """Write elements ``[lo, lo + out.size)`` of a flattened parameter to `out`.

        Parameters
        ----------
        name : str
            Full name, or an alias.
        out : ndarray of shape (n,), float64, float32, float16 or bfloat16
            Receives the elements. 16-bit ones are the rounded float32 ones, as in `fill_param`.
        lo : int
            First element.

        Raises
        ------
        CheckpointError
            There is no such parameter, its file is damaged, or a finite number is beyond the range
            of `out` (bfloat16, whose range is almost that of float32, gets inf).
        ValueError
            The range is not within the parameter.

        Notes
        -----
        NumPy arrays made: `scratch`, if none was given; some bytes in a cast to bfloat16.
        """
        name = self.aliases.get(name, name)
        if name not in self.places:
            raise CheckpointError(
                f"{self.path} must hold {name}; got {len(self.places)} other parameters. Use the "
                f"weights of a run with the same model."
            )
        place, record = self.places[name], self._owners[name]
        if out.ndim != 1 or not 0 <= lo <= place.size - out.size:
            raise ValueError(
                f"elements must lie within the {place.size} of {name}; got {out.size} from {lo} "
                f"on. Pass a flat array that fits."
            )
        stored = place.stored
        file = self._open(record)
        file.seek(place.begin + lo * stored.itemsize)
        if out.dtype == stored and out.flags.c_contiguous:
            self._read(file, record, out.view(np.uint8))
            self.bytes_read += out.nbytes
            return
        # From float64 to 16 bits by way of float32, as fresh weights are rounded.
        by_float32 = 4 if stored.itemsize == 8 and out.itemsize == 2 else 0
        step = self.scratch.size // (stored.itemsize + by_float32)
        raw = self.scratch[: step * stored.itemsize]
        middle = self.scratch[raw.size : raw.size + by_float32 * step].view(np.float32)
        for tile in tile_slices(out.size, step):
            part = out[tile]
            nbytes = part.size * stored.itemsize
            self._read(file, record, raw[:nbytes])
            self.bytes_read += nbytes
            values = raw[:nbytes].view(stored)
            try:
                with np.errstate(over="raise", invalid="ignore", under="ignore"):
                    if by_float32:
                        middle[: part.size] = values
                        values = middle[: part.size]
                    part[...] = values
            except FloatingPointError:
                raise CheckpointError(
                    f"{name} must be within the range of {out.dtype.name}; got larger numbers in "
                    f"{self.path}. Load it as {place.dtype}, as it is stored."
                ) from None

    def load(
        self, specs: Sequence[ParamSpec], dtype: np.dtype | str | None = None
    ) -> dict[str, np.ndarray]:
        """Read whole parameters.

        Parameters
        ----------
        specs : sequence of ParamSpec
            What is wanted: any of the model's parameters, or their aliases.
        dtype : numpy.dtype or str, optional
            float64, float32, float16 or bfloat16; by default as stored.

        Returns
        -------
        dict of str to ndarray
            In the order of `specs`; the caller owns the arrays. Names of one shared parameter have
            one array, which was read once.

        Raises
        ------
        CheckpointError
            A parameter is missing, has another shape, or lies in a file that is damaged. All of
            that is found before any is read.
        ValueError
            The dtype is another.

        Notes
        -----
        Memory: the arrays and `scratch`.
        """
        target = None
        if dtype is not None:
            target = dtype_of(dtype if isinstance(dtype, str) else np.dtype(dtype).name)
        wanted = {spec.name: spec.shape for spec in specs}
        held = {name: self.aliases.get(name, name) for name in wanted}
        found = {
            name: self.places[owner].shape for name, owner in held.items() if owner in self.places
        }
        compare_names(self.path, found, wanted)
        for owner in held.values():
            self._open(self._owners[owner])
        made: dict[str, np.ndarray] = {}
        for name, owner in held.items():
            if owner not in made:
                place = self.places[owner]
                made[owner] = np.empty(wanted[name], target or np.dtype(place.dtype))
                self.fill(owner, made[owner].reshape(-1))
        return {name: made[owner] for name, owner in held.items()}

    def verify(self) -> None:
        """Read all files and compare their sha256 with the manifest's; once per reader.

        Raises
        ------
        CheckpointError
            A file was changed.
        """
        for record in () if self._verified else self.records:
            self._verify(record)
        self._verified = True

    def _verify(self, record: StageRecord) -> None:
        file = self._open(record)
        if not record.sha256:
            return
        file.seek(0)
        sha256 = hashlib.sha256()
        for tile in tile_slices(record.nbytes, self.scratch.size):
            piece = self.scratch[: tile.stop - tile.start]
            self._read(file, record, piece)
            sha256.update(memoryview(piece))
        if sha256.hexdigest() != record.sha256:
            raise damaged(
                self.path.with_name(record.file),
                f"sha256 {sha256.hexdigest()[:16]} where {MANIFEST_FILE} says {record.sha256[:16]}",
            )

    def raw(self, name: str) -> Iterator[memoryview]:
        """Yield the stored bytes of a parameter, in pieces that are valid until the next."""
        place, record = self.places[name], self._owners[name]
        file = self._open(record)
        file.seek(place.begin)
        for tile in tile_slices(place.end - place.begin, self.scratch.size):
            piece = self.scratch[: tile.stop - tile.start]
            self._read(file, record, piece)
            self.bytes_read += piece.size
            yield memoryview(piece)

    def _read(self, file: BinaryIO, record: StageRecord, out: np.ndarray) -> None:
        """Read bytes from where the file stands until `out` is full."""
        rest = memoryview(out)
        path = self.path.with_name(record.file)
        while rest:
            try:
                count = file.readinto(rest)
            except OSError as error:
                raise _unreadable(path, error) from None
            if not count:
                raise damaged(path, "its end too early: it was cut while it was read")
            rest = rest[count:]

    def _parse_manifest(self) -> tuple[StageRecord, ...]:
        path = self.path
        try:
            size = path.stat().st_size
            if size > MAX_HEADER_BYTES:
                raise damaged(path, f"{size} bytes, more than any manifest has")
            data = path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from None
        self.header_bytes_read += len(data)
        manifest = parse_json(path, data)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise damaged(path, f"no format {FORMAT!r}")
        if manifest.get("version") != VERSION:
            raise damaged(
                path, f"version {manifest.get('version')!r} where {VERSION} is the one known"
            )
        stages, alias = manifest.get("stages"), manifest.get("alias")
        if not isinstance(stages, list) or not isinstance(alias, dict):
            raise damaged(path, "no stages and alias")
        records = tuple(parse_record(path, values) for values in stages)
        for name, entry in alias.items():
            owner = entry.get("of") if isinstance(entry, dict) else None
            if not isinstance(owner, str):
                raise damaged(path, f"alias {name!r} of {entry!r}")
            self.aliases[name] = owner
        dtype = check_set(path, records, self.aliases)
        owners = {name: record.file for record in records for name in record.params}
        for name, owner in self.aliases.items():
            if alias[name].get("file") != owners[owner]:
                raise damaged(path, f"alias {name!r} in {alias[name].get('file')!r}")
        for key, value in (("dtype", CODES[dtype]), ("model", records[0].model)):
            if manifest.get(key) != value:
                raise damaged(path, f"{key} {manifest.get(key)!r} with stages of {value}")
        self.metadata = parse_metadata(path, json.dumps(manifest.get("metadata")))
        return records

    def _open_single(self) -> StageRecord:
        file = self._files[self.path.name] = _open_file(self.path)
        size, places, metadata = self._read_header(file, self.path)
        self.metadata = parse_metadata(self.path, metadata.get(METADATA_KEY, "{}"))
        blocks = tuple(dict.fromkeys(name.partition(".")[0] for name in places))
        model = model_fingerprint({name: place.shape for name, place in places.items()})
        return StageRecord(0, self.path.name, size, "", "", model, blocks, places)

    def _open(self, record: StageRecord) -> BinaryIO:
        """Return a stage's file, which is what the manifest says as far as its header tells."""
        if record.file in self._files:
            return self._files[record.file]
        path = self.path.with_name(record.file)
        file = _open_file(path)
        try:
            size, places, metadata = self._read_header(file, path, record.nbytes)
            # In the header, so that a file of another run of the same model is told apart unread.
            own = parse_metadata(path, metadata.get(STAGE_KEY, "{}"))
            for what, found, said in (
                ("size", size, record.nbytes),
                ("parameters", places, dict(record.params)),
                ("model", own.get("model"), record.model),
                ("data_sha256", own.get("data_sha256"), record.data_sha256),
            ):
                if found != said:
                    raise damaged(path, f"another {what} than {MANIFEST_FILE} says")
        except BaseException:
            file.close()
            raise
        self._files[record.file] = file
        return file

    def _read_header(
        self, file: BinaryIO, path: Path, said: int | None = None
    ) -> tuple[int, dict[str, Place], dict[str, str]]:
        """Return size, places and metadata of a safetensors file that has no gaps."""
        try:
            size = os.fstat(file.fileno()).st_size
            if said is not None and size != said:
                raise damaged(path, f"{size} bytes where {MANIFEST_FILE} says {said}")
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise damaged(path, f"a header of {length} bytes in a file of {size}")
            data = file.read(length)
        except OSError as error:
            raise _unreadable(path, error) from None
        self.header_bytes_read += len(start) + len(data)
        entries = parse_json(path, data)
        if not isinstance(entries, dict):
            raise damaged(path, "a header that is no JSON object")
        metadata = entries.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(t, str) for t in metadata.values()):
            raise damaged(path, "metadata that are no texts by name")
        last = 8 + length
        places = {
            name: parse_place(path, name, entry, "data_offsets", last)
            for name, entry in entries.items()
        }
        for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
            if place.begin != last:
                raise damaged(path, f"{name} at byte {place.begin} instead of {last}")
            last = place.end
        if last != size:
            raise damaged(path, f"{size} bytes where its header says {last}")
        return size, places, metadata


def open_weights(source: Path | str, scratch: np.ndarray | None = None) -> StageReader:
    """Open the weights of a run, however they are split (see `StageReader`)."""
    return StageReader(source, scratch)


def load_stage(
    source: Path | str,
    specs: Sequence[ParamSpec],
    dtype: np.dtype | str | None = None,
    *,
    verify: bool = False,
) -> dict[str, np.ndarray]:
    """Read the parameters that a stage needs, and no other bytes (see `StageReader.load`).

    Parameters
    ----------
    source : Path or str
    specs : sequence of ParamSpec
    dtype : numpy.dtype or str, optional
    verify : bool
        First compare the sha256 of all files, for which they are read whole.

    Returns
    -------
    dict of str to ndarray
    """
    with StageReader(source) as reader:
        if verify:
            reader.verify()
        return reader.load(specs, dtype)


def load_run_weights(
    run_dir: Path | str, specs: Sequence[ParamSpec], dtype: np.dtype | str | None = None
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read all weights of a finished run, in one file or in one per stage.

    Parameters
    ----------
    run_dir : Path or str
    specs : sequence of ParamSpec
        Of the run's model: exactly these must be there.
    dtype : numpy.dtype or str, optional
        What every array must be stored in; nothing is converted.

    Returns
    -------
    params : dict of str to ndarray
    metadata : dict of str to str

    Raises
    ------
    CheckpointError
        They are missing, damaged (of stage files the sha256 is compared), or not of this model.
    """
    run_dir = Path(run_dir)
    folder = run_dir / WEIGHTS_FOLDER
    if not folder.is_dir():
        return load_weights(run_dir / WEIGHTS_FILE, specs, dtype)
    with StageReader(run_dir) as reader:
        if not reader.is_split:
            return load_weights(reader.path, specs, dtype)
        shapes = {name: place.shape for name, place in reader.places.items()}
        compare_names(reader.path, shapes, {spec.name: spec.shape for spec in specs})
        codes = {name: CODES[place.dtype] for name, place in reader.places.items()}
        compare_dtypes(reader.path, codes, None if dtype is None else np.dtype(dtype).name)
        reader.verify()
        return reader.load(specs), reader.metadata


def _find(source: Path) -> Path:
    """Return the manifest or the file that holds the weights of `source`."""
    if source.is_file():
        return source
    folders = (source, source / WEIGHTS_FOLDER)
    for path in (*(folder / MANIFEST_FILE for folder in folders), source / WEIGHTS_FILE):
        if path.is_file():
            return path
    got = f"neither {WEIGHTS_FILE} nor {WEIGHTS_FOLDER}/{MANIFEST_FILE}"
    if any((folder / stage_file(0)).exists() for folder in folders):
        got = f"stage files without {MANIFEST_FILE}: they were not written to the end"
    raise CheckpointError(
        f"{source} must hold the weights of a finished run; got {got}. Train the run to its end "
        f"with this version of mpisim."
    )


def _open_file(path: Path) -> BinaryIO:
    if not path.is_file():
        got = "something that is no plain file" if path.exists() else "no such file"
        raise CheckpointError(
            f"{path} must hold the weights of a stage; got {got}. Copy all files of the run, or "
            f"train it again."
        )
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} must be readable; got {error.strerror or error}. Check its permissions."
    )


# For people -----------------------------------------------------------------------------------


def write_whole(reader: StageReader, path: Path | str, *, overwrite: bool = False) -> None:
    """Write all weights as one file, byte for byte what `save_weights` would.

    Parameters
    ----------
    reader : StageReader
        Its files are verified first.
    path : Path or str
        File to write.
    overwrite : bool
        Replace it if it exists.

    Raises
    ------
    ConfigError
        It exists, or lies among the stage files.
    CheckpointError
        The weights are damaged, or the file cannot be written.

    Notes
    -----
    Memory: the reader's working space, whatever the size of the model.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise ConfigError(
            f"the file to write must be new; got {path}, which exists. Choose another name, or "
            f"add --overwrite to replace it."
        )
    if reader.is_split and path.resolve().parent == reader.path.resolve().parent:
        raise ConfigError(
            f"the file to write must lie outside of the stage files' folder; got {path}. Choose "
            f"another place."
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"the file to write must lie in a folder that exists; got {path}. Make the folder "
            f"first."
        )
    reader.verify()
    order = file_order({name: place.dtype for name, place in reader.places.items()})
    header, _ = make_header(
        {name: (reader.places[name].dtype, reader.places[name].shape) for name in order},
        {METADATA_KEY: metadata_text(reader.metadata)},
    )
    data = (piece for name in order for piece in reader.raw(name))
    write_part(path, itertools.chain([header], data))
    try:
        part_of(path).replace(path)
    except OSError as error:
        raise not_writable(path, error) from None


def weights_rows(reader: StageReader) -> list[dict[str, Any]]:
    """Return one row per file of weights."""
    return [
        {
            "stage": record.stage,
            "file": record.file,
            "blocks": list(record.blocks),
            "parameters": len(record.params),
            "numbers": sum(place.size for place in record.params.values()),
            "bytes": record.param_bytes,
            "file_bytes": record.nbytes,
            "dtype": next((place.dtype for place in record.params.values()), None),
            "sha256": record.sha256 or None,
            "aliases": {
                name: owner for name, owner in reader.aliases.items() if owner in record.params
            },
        }
        for record in reader.records
    ]


def weights_text(reader: StageReader) -> str:
    """Return the rows as a table for people."""
    rows = weights_rows(reader)
    total = {key: sum(row[key] for row in rows) for key in ("parameters", "numbers", "bytes")}
    checked = f"; sha256 agrees in {len(rows)} of {len(rows)} files" if reader.is_split else ""
    dtypes = sorted({place.dtype for place in reader.places.values()})
    lines = [
        f"weights of {reader.path}: {total['parameters']} parameters, {total['numbers']} numbers, "
        f"{' and '.join(dtypes)}, {format_bytes(total['bytes'])}{checked}",
        "",
        f"{'stage':>5} {'parameters':>10} {'numbers':>12} {'bytes':>14}  {'file':<20} blocks",
    ]
    for row in rows:
        stage = row["stage"] if reader.is_split else "all"
        lines.append(
            f"{stage:>5} {row['parameters']:>10} {row['numbers']:>12} {row['bytes']:>14}  "
            f"{row['file']:<20} {listed(row['blocks'])}"
        )
    for row in rows:
        for name, owner in row["aliases"].items():
            lines.append(f"{name} is {owner}, stored once in {row['file']}")
    return "\n".join(lines)

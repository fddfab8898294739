"""The weights of a run as one safetensors file per stage: what is in them, and how they come to be.

    RUN/weights/stage-00.safetensors, ...   what each stage owns, a tied table once, by its owner
    RUN/weights/manifest.json               written last: without it there are no weights

The manifest says of every parameter where it lies, so that a reader can take the bytes it wants
whatever split wrote them: see `stage_reader`. The ranks that hold a stage write the files.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpisim.errors import CheckpointError
from mpisim.layouts.specs import ParamSpec
from mpisim.nn.models import Model
from mpisim.train.weights import DTYPES, METADATA_KEY, damaged, listed, not_writable

WEIGHTS_FOLDER = "weights"
"""Name of the folder in the run directory."""
MANIFEST_FILE = "manifest.json"
MAX_HEADER_BYTES = 1 << 24
"""Longest header or manifest that is read: room for 100,000 parameters."""

FORMAT, VERSION = "mpisim stage weights", 1
STAGE_KEY = "mpisim.stage"
_STAGE_FILE = re.compile(r"stage-\d{2,}\.safetensors(\.part)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
CODES = {dtype: code for code, dtype in DTYPES.items()}


# What is where --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where the numbers of one parameter lie."""

    dtype: str
    """float32 or float64; little-endian in the file."""
    shape: tuple[int, ...]
    begin: int
    """First byte within the file."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stored(self) -> np.dtype:
        """The dtype of the bytes."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.begin + self.size * self.stored.itemsize


@dataclass(frozen=True)
class StageRecord:
    """One stage file: what the manifest says of it."""

    stage: int
    file: str
    nbytes: int
    sha256: str
    """Of the whole file; empty for a file without a manifest."""
    data_sha256: str
    """Of the numbers alone; the file's own header has it, too."""
    model: str
    """`model_fingerprint` of the whole model."""
    blocks: tuple[str, ...]
    params: Mapping[str, Place]
    """By full name, in the order of the file."""

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters alone."""
        return sum(place.end - place.begin for place in self.params.values())

    def to_json(self) -> str:
        """Return it as text, for a message to the rank that writes the manifest."""
        return json.dumps(self.values())

    def values(self) -> dict[str, Any]:
        """Return it as the manifest holds it."""
        return {
            "stage": self.stage,
            "file": self.file,
            "bytes": self.nbytes,
            "sha256": self.sha256,
            "data_sha256": self.data_sha256,
            "model": self.model,
            "blocks": list(self.blocks),
            "params": {
                name: {
                    "dtype": CODES[place.dtype],
                    "shape": list(place.shape),
                    "offsets": [place.begin, place.end],
                }
                for name, place in self.params.items()
            },
        }

    @classmethod
    def from_json(cls, text: str) -> StageRecord:
        """Return the record that `to_json` wrote.

        Raises
        ------
        CheckpointError
            It breaks a rule.
        """
        path = Path("stage-record.json")
        return parse_record(path, parse_json(path, text.encode()))


def model_fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the sha256 of a model's parameter names and shapes, in no order."""
    text = json.dumps(sorted([name, list(shape)] for name, shape in shapes.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def aliases_of(model: Model) -> dict[str, str]:
    """Return the other names of shared parameters, such as a tied head's -> the owner's name."""
    return {
        f"{block.name}.{local}": owner for block in model.blocks for local, owner in block.borrows
    }


def stage_file(stage: int) -> str:
    """Return the name of a stage's file."""
    return f"stage-{stage:02d}.safetensors"


# Writing --------------------------------------------------------------------------------------


def save_stage(
    folder: Path | str,
    stage: int,
    params: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
    *,
    specs: Sequence[ParamSpec],
    blocks: Sequence[str] = (),
) -> StageRecord:
    """Write one stage's weights beside those that are there; `save_manifest` puts them in force.

    Parameters
    ----------
    folder : Path or str
        Such as ``RUN/weights``; made if it is missing.
    stage : int
        Coordinate on axis pp.
    params : mapping of str to ndarray
        Master weights that the stage owns, by full name, float32 or float64, in any memory order.
        Not modified.
    metadata : mapping of str to str, optional
        Facts about the run, kept in the file's header.
    specs : sequence of ParamSpec
        Of the whole model, so that no other model's stage can be mixed in.
    blocks : sequence of str
        Blocks of the stage, for the manifest.

    Returns
    -------
    StageRecord
        What `save_manifest` needs of every stage.

    Raises
    ------
    CheckpointError
        The file cannot be written.
    ValueError
        A parameter is none of the model's, or neither float32 nor float64.

    Notes
    -----
    One rank per stage calls it, in any order. Memory: a copy of one parameter, and only if it is
    not in row order. Equal arguments give equal bytes.
    """
    folder, path = Path(folder), Path(folder) / stage_file(stage)
    shapes = {spec.name: spec.shape for spec in specs}
    for name, array in params.items():
        if shapes.get(name) != array.shape:
            raise ValueError(
                f"{name} must be a parameter of the model with its shape, {shapes.get(name)}; got "
                f"{array.shape}. Pass what the stage owns."
            )
        if array.dtype.name not in CODES or not array.dtype.isnative:
            raise ValueError(
                f"weights must be float32 or float64; got {array.dtype} for {name}. Save the "
                f"master weights."
            )
    order = file_order({name: array.dtype.name for name, array in params.items()})

    def data() -> Iterator[memoryview]:
        for name in order:
            stored = params[name].dtype.newbyteorder("<")
            yield memoryview(np.asarray(params[name], stored, order="C").reshape(-1).view("u1"))

    data_sha256 = hashlib.sha256()
    for piece in data():
        data_sha256.update(piece)
    own = {"data_sha256": data_sha256.hexdigest(), "model": model_fingerprint(shapes),
           "stage": str(stage)}  # fmt: skip
    header, places = make_header(
        {name: (params[name].dtype.name, params[name].shape) for name in order},
        {METADATA_KEY: metadata_text(metadata or {}), STAGE_KEY: metadata_text(own)},
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(folder, error) from None
    sha256 = hashlib.sha256()
    nbytes = write_part(path, _watched(itertools.chain([header], data()), sha256))
    return StageRecord(
        stage, path.name, nbytes, sha256.hexdigest(), own["data_sha256"], own["model"],
        tuple(blocks), places,
    )  # fmt: skip


def save_manifest(
    folder: Path | str,
    records: Iterable[StageRecord | str],
    *,
    aliases: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Put in force what `save_stage` wrote on all ranks: one rank calls it, after all are done.

    Parameters
    ----------
    folder : Path or str
        As in `save_stage`, on a file system that all ranks share.
    records : iterable of StageRecord or str
        Of every stage; as text, `StageRecord.to_json`.
    aliases : mapping of str to str, optional
        Other names of parameters, see `aliases_of`.
    metadata : mapping of str to str, optional
        Facts about the run.

    Raises
    ------
    CheckpointError
        The stages are not those of one model, each parameter once; a file is not there; or the
        folder cannot be written. Until all that is checked, an earlier set stays as it is.

    Notes
    -----
    Names change in an order that leaves a reader the old set, none (for the time of some renames,
    or after a kill within it), or the new one; never a mixture.
    """
    folder = Path(folder)
    path = folder / MANIFEST_FILE
    parsed = [r if isinstance(r, StageRecord) else StageRecord.from_json(r) for r in records]
    parsed.sort(key=lambda record: record.stage)
    aliases, metadata = dict(aliases or {}), dict(metadata or {})
    metadata_text(metadata)
    dtype = check_set(path, parsed, aliases)
    for record in parsed:
        part = part_of(folder / record.file)
        size = part.stat().st_size if part.is_file() else None
        if size != record.nbytes:
            got = "no such file" if size is None else f"{size} bytes"
            raise CheckpointError(
                f"{part} must hold the {record.nbytes} bytes that its stage wrote; got {got}. Set "
                f"run.dir to a folder that all ranks share."
            )
    owners = {name: record.file for record in parsed for name in record.params}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "model": parsed[0].model,
        "dtype": CODES[dtype],
        "metadata": dict(sorted(metadata.items())),
        "stages": [record.values() for record in parsed],
        "alias": {
            name: {"of": owner, "file": owners[owner]} for name, owner in sorted(aliases.items())
        },
    }
    text = json.dumps(manifest, indent=1).encode() + b"\n"
    try:
        # The old manifest goes before any file that it names is replaced.
        path.unlink(missing_ok=True)
        _sync_folder(folder)
        for record in parsed:
            part_of(folder / record.file).replace(folder / record.file)
        _sync_folder(folder)
        write_part(path, [text])
        part_of(path).replace(path)
        _sync_folder(folder)
        # Of an earlier run with more stages: no reader looks at them.
        kept = {record.file for record in parsed}
        for found in sorted(folder.iterdir()):
            if _STAGE_FILE.fullmatch(found.name) and found.name not in kept:
                found.unlink()
    except OSError as error:
        raise not_writable(path, error) from None


def file_order(dtypes: Mapping[str, str]) -> list[str]:
    """Return names in the order in which the safetensors library writes them."""
    return sorted(dtypes, key=lambda name: (-np.dtype(dtypes[name]).itemsize, name))


def make_header(
    params: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Place]]:
    """Return a file's first bytes, the same as the library's, and where the numbers follow."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    places = {}
    for name, (dtype, shape) in params.items():
        places[name] = Place(dtype, tuple(shape), offset)
        end = places[name].end
        entries[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {
        name: Place(place.dtype, place.shape, place.begin + start)
        for name, place in places.items()
    }  # fmt: skip


def metadata_text(values: Mapping[str, str]) -> str:
    """Return facts as one text, the same for equal facts."""
    if not all(isinstance(text, str) for item in values.items() for text in item):
        raise ValueError(f"metadata must be texts by name; got {values!r}. Convert the values.")
    return json.dumps(dict(values), sort_keys=True)


def _watched(pieces: Iterable[Any], sha256: Any) -> Iterator[Any]:
    for piece in pieces:
        sha256.update(piece)
        yield piece


def part_of(path: Path) -> Path:
    """Return the temporary name of a file that is being written."""
    return path.with_name(path.name + ".part")


def write_part(path: Path, pieces: Iterable[Any]) -> int:
    """Write a file under a temporary name, down to the disk; return its bytes."""
    part = part_of(path)
    nbytes = 0
    try:
        with open(part, "wb") as file:
            for piece in pieces:
                nbytes += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        try:
            part.unlink(missing_ok=True)
        except OSError:
            pass  # the first error says more
        if isinstance(error, OSError):
            raise not_writable(path, error) from None
        raise
    return nbytes


def _sync_folder(folder: Path) -> None:
    """Let the renames in a folder reach the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# Checking -------------------------------------------------------------------------------------


def parse_json(path: Path, data: bytes) -> Any:
    """Return JSON whose objects have each key once."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            counts = collections.Counter(name for name, _ in pairs)
            raise damaged(path, f"{listed(sorted(n for n in counts if counts[n] > 1))} twice")
        return values

    try:
        return json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        problem = "JSON that is nested too deep" if isinstance(error, RecursionError) else error
        raise damaged(path, f"no JSON text ({problem})") from None


def parse_record(path: Path, values: Any) -> StageRecord:
    """Return a stage's record once every field of it keeps the rules."""

    def require(is_right: bool, problem: str) -> None:
        if not is_right:
            raise damaged(path, problem)

    require(isinstance(values, dict), "a stage that is no JSON object")
    stage, file = values.get("stage"), values.get("file")
    require(_is_count(stage), f"stage number {stage!r}")
    # The only name it may have: so it lies in the folder and nowhere else.
    require(file == stage_file(stage), f"file {file!r} for stage {stage}")
    nbytes, blocks, params = (values.get(key) for key in ("bytes", "blocks", "params"))
    require(_is_count(nbytes), f"{nbytes!r} bytes for {file}")
    for key in ("sha256", "data_sha256", "model"):
        text = values.get(key)
        require(isinstance(text, str) and bool(_SHA256.fullmatch(text)), f"{key} {text!r}")
    require(isinstance(blocks, list) and all(map(_is_name, blocks)), f"blocks {blocks!r}")
    require(isinstance(params, dict), f"params of {file} that are no JSON object")
    places = {
        name: parse_place(path, name, entry, "offsets") for name, entry in params.items()
    }  # fmt: skip
    last, before = 0, "the header"
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        require(place.begin >= last, f"{name} overlapping {before} in {file}")
        last, before = place.end, name
    require(last <= nbytes, f"{before} ending at byte {last} of {nbytes} in {file}")
    return StageRecord(
        stage, file, nbytes, values["sha256"], values["data_sha256"], values["model"],
        tuple(blocks), places,
    )  # fmt: skip


def parse_place(path: Path, name: str, entry: Any, key: str, start: int = 0) -> Place:
    """Return a parameter's place: its offsets must be those of its dtype and shape."""
    if not _is_name(name) or not isinstance(entry, dict):
        raise damaged(path, f"parameter {name!r} without dtype, shape and offsets")
    code, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get(key)
    if not isinstance(code, str) or code not in DTYPES:
        raise damaged(path, f"{name} of dtype {code!r}, which is neither F32 nor F64")
    for what, numbers in (("shape", shape), ("offsets", offsets)):
        if not isinstance(numbers, list) or not all(map(_is_count, numbers)):
            raise damaged(path, f"{name} with {what} {numbers!r}")
    # NumPy has no more dimensions, and neither has a size beyond the file that is compared next.
    if len(shape) > 32 or len(offsets) != 2:
        raise damaged(path, f"{name} with {len(shape)} dimensions and {len(offsets)} offsets")
    place = Place(DTYPES[code], tuple(shape), start + offsets[0])
    if place.end != start + offsets[1]:
        raise damaged(path, f"{name} with offsets {offsets} for {code} of shape {shape}")
    return place


def check_set(path: Path, records: Sequence[StageRecord], aliases: Mapping[str, str]) -> str:
    """Check that stages are one whole model; return the dtype."""
    found = [record.stage for record in records]
    if not found or found != list(range(len(found))):
        raise damaged(path, f"stages {found} instead of each from 0 on once")
    models = {record.model for record in records}
    if len(models) > 1:
        raise damaged(path, f"stages of {len(models)} different models")
    for what in ("params", "blocks"):
        seen: dict[str, int] = {}
        for record in records:
            for name in getattr(record, what):
                if name in seen:
                    first = f"stages {seen[name]} and {record.stage}"
                    raise damaged(path, f"{name} in {first}, where one may have it")
                seen[name] = record.stage
    places = {name: place for record in records for name, place in record.params.items()}
    if model_fingerprint({name: place.shape for name, place in places.items()}) not in models:
        raise damaged(path, f"{len(places)} parameters that are not those of the stages' model")
    dtypes = sorted({place.dtype for place in places.values()})
    if len(dtypes) != 1:
        raise damaged(path, f"parameters of {len(dtypes)} dtypes {dtypes}")
    for name, owner in aliases.items():
        if not _is_name(name) or name in places or owner not in places:
            raise damaged(path, f"alias {name!r} of {owner!r}")
    return dtypes[0]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_name(value: Any) -> bool:
    # Printable: it stands in messages and tables.
    return isinstance(value, str) and 0 < len(value) <= 1000 and value.isprintable()

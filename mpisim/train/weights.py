"""The trained weights of a run, as one safetensors file that other tools read, too.

`loop` writes it at the end of a run, `sample` reads it back. A header of names, dtypes, shapes and
offsets, then plain numbers: nothing in the file is unpickled or run. Optimizer moments and
counters are not in it, so a run cannot be continued from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mpisim.errors import CheckpointError
from mpisim.layouts.specs import ParamSpec

WEIGHTS_FILE = "weights.safetensors"
"""Name of the file in the run directory."""

# One key, because the library writes several in random order: the same run, the same bytes.
METADATA_KEY = "mpisim"
DTYPES = {"F32": "float32", "F64": "float64"}
_MOST_NAMED = 3


def save_weights(
    path: Path | str, params: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write weights in one piece: a reader sees the old file, the new one, or none.

    Parameters
    ----------
    path : Path or str
        File to write or replace, such as ``RUN/weights.safetensors``.
    params : mapping of str to ndarray
        Master weights by full parameter name, float32 or float64, in any memory order. Not
        modified.
    metadata : mapping of str to str, optional
        Facts about the run, kept in the file's header.

    Raises
    ------
    CheckpointError
        The file cannot be written; what was there before is still there.
    ValueError
        An array is neither float32 nor float64, or metadata is not text.

    Notes
    -----
    Memory: one copy of all weights. Equal arguments give equal bytes.
    """
    from safetensors.numpy import save

    path, metadata = Path(path), dict(metadata or {})
    # In row order: the library writes the memory of an array as it lies.
    arrays = {name: np.asarray(array, order="C") for name, array in params.items()}
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES.values() or not array.dtype.isnative:
            raise ValueError(
                f"weights must be float32 or float64; got {array.dtype} for {name}. Save the "
                f"master weights."
            )
    if not all(isinstance(text, str) for item in metadata.items() for text in item):
        raise ValueError(f"metadata must be texts by name; got {metadata!r}. Convert the values.")
    # Written here, not by the library, which tells no write error of the last piece.
    data = save(arrays, {METADATA_KEY: json.dumps(metadata, sort_keys=True)})
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        try:
            part.unlink(missing_ok=True)
        except OSError:
            pass  # the first error says more
        raise not_writable(path, error) from None


def load_weights(
    path: Path | str,
    specs: Sequence[ParamSpec] | None = None,
    dtype: np.dtype | str | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read weights that `save_weights` wrote.

    Parameters
    ----------
    path : Path or str
    specs : sequence of ParamSpec, optional
        Parameters of the model they are for: the file must hold exactly these names and shapes.
    dtype : numpy.dtype or str, optional
        float32 or float64: what every array must be; by default either.

    Returns
    -------
    params : dict of str to ndarray
        In the order of `specs`, else by name; writable arrays that the caller owns.
    metadata : dict of str to str

    Raises
    ------
    CheckpointError
        The file is missing, damaged, cut short, or not of this model. Names, shapes, dtypes and
        sizes are compared before any array is read.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        got = "something that is no plain file" if path.exists() else "no such file"
        raise CheckpointError(
            f"{path} must hold the weights of a finished run; got {got}. Train the run to its end "
            f"with this version of mpisim."
        )
    try:
        # The library checks that header, offsets, shapes and the length of the file agree.
        with safe_open(path, framework="numpy") as file:
            found = {name: file.get_slice(name) for name in file.keys()}
            shapes = {name: tuple(part.get_shape()) for name, part in found.items()}
            dtypes = {name: part.get_dtype() for name, part in found.items()}
            if specs is not None:
                compare_names(path, shapes, {spec.name: spec.shape for spec in specs})
            compare_dtypes(path, dtypes, None if dtype is None else np.dtype(dtype).name)
            metadata = parse_metadata(path, (file.metadata() or {}).get(METADATA_KEY, "{}"))
            names = sorted(found) if specs is None else [spec.name for spec in specs]
            return {name: np.array(file.get_tensor(name)) for name in names}, metadata
    except SafetensorError as error:
        raise damaged(path, str(error)) from None
    except OSError as error:
        raise CheckpointError(
            f"{path} must be readable; got {error.strerror or error}. Check its permissions."
        ) from None


def compare_names(
    path: Path, shapes: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> None:
    """Refuse other names or shapes than the model's."""
    missing, extra = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys())
    if missing or extra:
        parts = [f"no {listed(missing)}"] * bool(missing) + [listed(extra)] * bool(extra)
        raise CheckpointError(
            f"{path.name} must hold the {len(wanted)} parameters of the run's model; got "
            f"{' but '.join(parts)} in {path}. Use the weights that the run itself wrote."
        )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{name} must have shape {shape}; got {shapes[name]} in {path}. Use the weights "
                f"that the run itself wrote."
            )


def compare_dtypes(path: Path, dtypes: dict[str, str], wanted: str | None) -> None:
    """Refuse dtype codes that are not those of `wanted`, or of any weights."""
    for name, code in dtypes.items():
        dtype = DTYPES.get(code)
        if dtype is None or (wanted is not None and dtype != wanted):
            raise CheckpointError(
                f"{name} must be {wanted or 'float32 or float64'}; got {dtype or code} in {path}. "
                f"Use the weights that the run itself wrote."
            )


def parse_metadata(path: Path, text: str) -> dict[str, str]:
    """Return the facts that a file's text of metadata holds."""
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged(path, "metadata that are no texts by name")
    return metadata


def listed(names: list[str]) -> str:
    """Return the first few names as words."""
    shown = ", ".join(names[:_MOST_NAMED])
    rest = len(names) - _MOST_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown


def damaged(path: Path, problem: object) -> CheckpointError:
    """Return the error of a file, or of a manifest, that cannot be what was written."""
    # On one line, and without what could act on a terminal: parts of it come from the file.
    shown = "".join(c if c.isprintable() else "?" for c in " ".join(str(problem).split()))[:200]
    is_manifest = path.suffix == ".json"
    kind = "the list of one model's stage files" if is_manifest else "a whole safetensors file"
    return CheckpointError(f"{path.name} must be {kind}; got {path}: {shown}. Run the job again.")


def not_writable(path: Path, error: OSError) -> CheckpointError:
    """Return the error of a file that the system does not let be written."""
    return CheckpointError(
        f"{path.name} must be writable; got {error.strerror or error} for {path}. Make room or "
        f"choose another run.dir."
    )

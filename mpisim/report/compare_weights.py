"""Whether two runs ended with the same weights: by what they recorded, else by their files.

A digest covers the parameters of one stage. Runs that are cut into other stages have no digest in
common, so their files are read, tile by tile. Called by `compare.py`.
"""

from __future__ import annotations

import hashlib
from typing import Any

from mpisim.errors import MpisimError
from mpisim.report.load import Run, layout_of
from mpisim.report.rows import Row

_TILE = 1 << 16
"""Elements read at a time."""


def weights_row(runs: tuple[Run, Run], replicas: tuple[list[Row], list[Row]]) -> Row:
    """Return the section ``weights``.

    `compared` says by what: ``record`` (the digests), ``files``, or "" where nothing can be said.
    """
    digests = [_digest(rows) for rows in replicas]
    row: Row = {
        "section": "weights",
        "a_sha256": digests[0],
        "b_sha256": digests[1],
        "bitwise_equal": None,
        "compared": "",
        "common_params": None,
        "differing_params": None,
        "params_of_one": None,
        "largest_difference": None,
        "largest_difference_param": None,
    }
    if None in digests:
        return row
    same = digests[0] == digests[1]
    if same or all(layout_of(run).pp == 1 for run in runs):
        return {**row, "bitwise_equal": same, "compared": "record"}
    try:
        return {**row, **_compare_files(runs), "compared": "files"}
    except MpisimError:
        return row


def _digest(replicas: list[Row]) -> str | None:
    """Return one digest of all stages; None: there is none, or ranks of a stage differ."""
    if not replicas or not all(row["bitwise_equal"] for row in replicas):
        return None
    if len(replicas) == 1:
        return replicas[0]["params_sha256"]
    lines = "".join(f"{row['stage']} {row['params_sha256']}\n" for row in replicas)
    return hashlib.sha256(lines.encode()).hexdigest()


def _compare_files(runs: tuple[Run, Run]) -> dict[str, Any]:
    # Only here: a comparison by records answers without NumPy.
    from mpisim.train.stage_reader import open_weights

    with open_weights(runs[0].path) as a, open_weights(runs[1].path) as b:
        common = sorted(a.places.keys() & b.places.keys())
        differing, largest, where = 0, 0.0, None
        for name in common:
            mine, theirs = a.places[name], b.places[name]
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                differing += 1
                continue
            same, distance = _compare_param(a, b, name)
            differing += not same
            if distance > largest:
                largest, where = distance, name
        alone = len(a.places.keys() ^ b.places.keys())
    return {
        "bitwise_equal": not differing and not alone,
        "common_params": len(common),
        "differing_params": differing,
        "params_of_one": alone,
        "largest_difference": largest,
        "largest_difference_param": where,
    }


def _compare_param(a: Any, b: Any, name: str) -> tuple[bool, float]:
    """Return whether a parameter is the same bits in both, and its largest difference."""
    import numpy as np

    place, same, distance = a.places[name], True, 0.0
    for lo in range(0, place.size, _TILE):
        mine, theirs = (np.empty(min(_TILE, place.size - lo), place.dtype) for _ in range(2))
        a.fill(name, mine, lo)
        b.fill(name, theirs, lo)
        if mine.tobytes() != theirs.tobytes():
            same = False
            with np.errstate(invalid="ignore"):
                distance = max(distance, float(np.abs(mine - theirs).max()))
    return same, distance

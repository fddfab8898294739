"""What a finished run says: tables from its files, and its trace in the formats of viewers.

    load.py       run directory -> `Run`: plain data, no NumPy
    rows.py       `Run` -> flat rows, the one source of every number that is printed
    excess.py     what ranks left behind that passed their budget
    stages.py     rows of a pipeline: what the schedule costs, replayed and measured (NumPy)
    *text.py      rows -> tables for people
    compare*.py   two runs side by side
    traces.py     traces -> stalls, overlap, messages of stages (NumPy)
    perfetto.py   traces -> Chrome JSON (NumPy)

`cli` calls the three functions below, `plots/` calls `load_run` and `traces`. Nothing here trains,
and nothing here draws.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpisim.report.load import Run, load_run

__all__ = ["Run", "export_perfetto", "load_run", "report_rows", "report_text"]


def report_rows(run_dir: Path | str) -> list[dict[str, Any]]:
    """Return what a run directory says, as flat rows.

    Parameters
    ----------
    run_dir : Path or str

    Returns
    -------
    list of dict
        Each row has a ``section`` (see `mpisim.report.rows`) and units in its other keys. Values
        are strings, bools, ints, finite floats or None, so every row is plain JSON.

    Raises
    ------
    CheckpointError
        It is no run directory, or a file in it is damaged.
    """
    from mpisim.report.rows import make_rows

    return make_rows(load_run(run_dir))


def report_text(run_dir: Path | str) -> str:
    """Return what a run directory says, as tables.

    Parameters
    ----------
    run_dir : Path or str

    Returns
    -------
    str
        Lines of at most 100 characters, unless a name is longer. The first line says so when the
        run was cut short or a measured figure differs from the predicted one.

    Raises
    ------
    CheckpointError
        It is no run directory, or a file in it is damaged.
    """
    from mpisim.report.rows import make_rows
    from mpisim.report.text import make_text

    return make_text(make_rows(load_run(run_dir)))


def export_perfetto(
    run_dir: Path | str, out: Path | str, steps: tuple[int, int] | None = None
) -> None:
    """Write the trace of a run as Chrome JSON, in one piece (see `mpisim.report.perfetto`).

    Parameters
    ----------
    run_dir : Path or str
    out : Path or str
        File to write or replace.
    steps : (int, int), optional
        First step, and the first one that is left out again; by default all.

    Raises
    ------
    CheckpointError
        The run has no trace.
    OSError
        `out` cannot be written.
    """
    from mpisim.report.perfetto import export

    export(Path(run_dir), Path(out), steps)

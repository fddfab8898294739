"""Runs a test's function on real MPI ranks: `mpi_run` starts them, this file is what they run.

    results = mpi_run(function, ranks)      # in a test; function(transport) at the top of a module

The function's return value, or all that it yields, comes back per rank as JSON. What a rank
raises fails the calling test with that rank's traceback. `mpi_run` needs nothing but the package
and an installed MPI; a target can also be named by hand: FILE.py:FUNCTION.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 20.0


class RanksFailed(AssertionError):
    """A rank of `mpi_run` raised; the text holds the tracebacks of all that did."""

    def __init__(self, text: str, results: list[Any]) -> None:
        super().__init__(text)
        self.results = results
        """Per rank, what it had yielded or returned; an empty list if nothing."""


def mpi_run(
    function: Callable | str, ranks: int, *, synchronous: bool = False, **options: Any
) -> list[Any]:
    """Run ``function(transport, **options)`` on `ranks` MPI processes.

    Parameters
    ----------
    function : callable or str
        At the top level of its module; or ``path/to/file.py:name``.
    ranks : int
    synchronous : bool
        Every send waits for its receive.
    **options
        JSON values.

    Returns
    -------
    list
        Per rank what the function returned, or a list of what it yielded.

    Raises
    ------
    RanksFailed
        A rank raised, or ended without a result.
    """
    from mpisim.launch import launch

    if not isinstance(function, str):
        function = f"{inspect.getsourcefile(function)}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="mpisim-test-") as folder:
        told = json.dumps({"synchronous": synchronous, "options": options})
        command = [sys.executable, __file__, function, folder, told]
        status = launch(command, ranks)
        found = [_read(Path(folder, f"{rank}.json")) for rank in range(ranks)]
    results = [entry.get("value", []) for entry in found]
    failures = [
        f"--- rank {rank} of {ranks}\n{entry['error']}"
        for rank, entry in enumerate(found)
        if entry.get("error")
    ]
    if status or failures or not all(entry.get("done") for entry in found):
        text = "\n".join(failures) or "no rank left a traceback; see the captured output"
        raise RanksFailed(f"{function} ended with status {status}\n{text}", results)
    return results


def _read(path: Path) -> dict[str, Any]:
    """Join the lines that a rank wrote; it may have been killed between two of them."""
    found: dict[str, Any] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for entry in map(json.loads, lines):
        if "item" in entry:
            found.setdefault("value", []).append(entry["item"])
        else:
            found |= entry
    return found


def _load(target: str) -> Callable:
    path, _, name = target.rpartition(":")
    sys.path[:0] = [str(Path(path).resolve().parent)]
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _work(job: Any, target: str, folder: str, told: dict[str, Any]) -> None:
    transport = job.connect(timeout_s=TIMEOUT_S, synchronous=told["synchronous"])
    with open(Path(folder, f"{transport.rank}.json"), "w", encoding="utf-8") as out:

        def note(entry: dict[str, Any]) -> None:
            out.write(json.dumps(entry) + "\n")
            out.flush()

        try:
            outcome = _load(target)(transport, **told["options"])
            if inspect.isgenerator(outcome):
                for item in outcome:
                    note({"item": item})
            else:
                note({"value": outcome})
            transport.barrier()
        except BaseException:
            note({"error": traceback.format_exc()})
            raise
        note({"done": True})
    # No rank may end before all have written, or the launcher would end the others.
    transport.barrier()
    job.finish()


def main() -> int:
    """Be one rank: ``mpi_worker.py FILE.py:FUNCTION FOLDER OPTIONS``."""
    if importlib.util.find_spec("mpisim") is None:
        sys.path.append(str(ROOT))
    from mpisim.launch import limit_blas_threads, run_as_rank

    limit_blas_threads()
    target, folder, told = sys.argv[1:4]
    return run_as_rank(lambda job: _work(job, target, folder, json.loads(told)))


if __name__ == "__main__":
    sys.exit(main())

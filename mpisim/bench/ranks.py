"""Entry point of the ranks that a benchmark starts: ``python -m mpisim.bench.ranks KIND ARGS OUT``.

ARGS is JSON; rank 0 writes its rows to the file OUT as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mpisim.launch import Job, keep_freed_memory, limit_blas_threads, run_as_rank


def main() -> int:
    """Run one benchmark on this rank."""
    kind, arguments, out = sys.argv[1:4]
    limit_blas_threads()
    if kind != "collectives":
        # As training ranks do. The MPI library's own collectives are measured with the allocator
        # that its users have.
        keep_freed_memory()

    def work(job: Job) -> None:
        transport = job.connect()
        options = json.loads(arguments)
        if kind == "collectives":
            from mpisim.bench.collectives import measure, temporary_dir

            with temporary_dir() as folder:
                rows = measure(transport, options["sizes"], Path(folder))
        elif kind == "step":
            from mpisim.bench.step_rank import measure_step

            rows = measure_step(transport, **options)
        else:
            from mpisim.bench.tracing import measure_steps

            rows = measure_steps(transport, **options)
        if job.rank == 0:
            Path(out).write_text(json.dumps([rows, transport.library]), encoding="utf-8")
        transport.barrier()
        job.finish()

    return run_as_rank(work)


if __name__ == "__main__":
    sys.exit(main())

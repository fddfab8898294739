"""Draw every picture of a run: `python plots/all.py RUN_DIR`; `make plots RUN=...` calls it."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from common import NoData, save

from mpisim.errors import MpisimError

NAMES = (
    "timeline", "bytes_matrix", "bytes_by_kind", "stalls", "memory", "convergence", "step_time",
)  # fmt: skip
"""The scripts beside this one."""


def main() -> int:
    """Print each file that was written, or why a picture was not; returns the exit status."""
    parser = argparse.ArgumentParser(prog="plots/all.py", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    run_dir = parser.parse_args().run_dir
    for name in NAMES:
        module = importlib.import_module(name)
        try:
            print(save(run_dir, name, module.load, module.draw), flush=True)
        except NoData as reason:
            print(f"{name}: not drawn: {reason}", flush=True)
        except (MpisimError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

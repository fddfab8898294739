"""Static tables of a trace, and the event rows that a reader expands them to.

While a job runs only clock readings are stored ("stamps"); everything that the plan and the step
tables fix in advance - op, peer, tag, bytes, ring step - is written once. `expand_rank` joins the
two. Times are seconds on rank 0's clock; every field name carries its unit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

# What the time before a stamp was spent on, by code.
RECV, COMBINE, SEND, COPY = 0, 1, 2, 3
ACTIVITIES = ("recv", "combine", "send", "copy")


@dataclass(frozen=True, kw_only=True)
class ProgramTable:
    """The fixed part of one compiled collective: what each of its stamps means.

    A run of the program appends ``1 + len(activities)`` stamps: its start, then one at the end
    of each activity.
    """

    axis: str
    collective: str
    algorithm: str
    label: str
    dtype: str
    count: int
    tag: int
    rows: tuple[tuple[int, int, int, int, int, int], ...]
    """Per transfer: ring step, segment, world rank sent to, bytes sent, world rank received from,
    bytes received. A rank of -1 switches a side off."""
    activities: tuple[tuple[int, int], ...]
    """Per stamp after the first: activity code and row."""
    recv_posted: tuple[int, ...]
    """Per row: the stamp that precedes the posting of its receive, -1 if there is none."""
    send_posted: tuple[int, ...]
    """Per row: the stamp that precedes the posting of its send, -1 if there is none."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the trace file."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProgramTable:
        """Rebuild from `to_json` data."""
        lists = ("rows", "activities")
        fields = {
            key: tuple(tuple(item) for item in value) if key in lists
            else tuple(value) if isinstance(value, list) else value
            for key, value in data.items()
        }  # fmt: skip
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class PlanTable:
    """The fixed part of one plan on one rank: its ops, in order, as text and as kinds."""

    name: str
    kinds: tuple[str, ...]
    """Op class name per op, such as ``Forward``."""
    texts: tuple[str, ...]
    """One line per op, as the plan prints it."""
    waits: tuple[str, ...]
    """Per op: the axis it may wait on (``dp``, ``control``), or "" for compute."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the trace file."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PlanTable:
        """Rebuild from `to_json` data."""
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})


OP_DTYPE = np.dtype(
    [
        ("step", "i4"),
        ("plan", "i4"),
        ("op_index", "i4"),
        ("start_s", "f8"),
        ("end_s", "f8"),
    ]
)
"""One executed plan op."""

MESSAGE_DTYPE = np.dtype(
    [
        ("step", "i4"),
        ("program", "i4"),
        ("run", "i4"),
        ("row", "i4"),
        ("is_send", "?"),
        ("peer", "i4"),
        ("tag", "i4"),
        ("sequence", "i8"),
        ("ring_step", "i4"),
        ("nbytes", "i8"),
        ("posted_s", "f8"),
        ("completed_s", "f8"),
    ]
)
"""One message of a collective, one side of it. `sequence` counts the messages of this rank with
the same peer, tag and direction from 0, so send number n here is receive number n over there."""

ACTIVITY_DTYPE = np.dtype(
    [
        ("step", "i4"),
        ("program", "i4"),
        ("run", "i4"),
        ("row", "i4"),
        ("activity", "i1"),
        ("start_s", "f8"),
        ("end_s", "f8"),
    ]
)
"""What a collective did between two stamps (see `ACTIVITIES`)."""

STALL_DTYPE = np.dtype(
    [
        ("step", "i4"),
        ("op_index", "i4"),
        ("program", "i4"),
        ("activity", "i1"),
        ("peer", "i4"),
        ("start_s", "f8"),
        ("end_s", "f8"),
    ]
)
"""Time a rank waited inside a blocking op for a receive or for the completion of a send."""

MEMORY_DTYPE_FIELDS = ("step", "op_index", "time_s")


def program_rows(program: ProgramTable) -> np.ndarray:
    """Return `program.rows` as an int64 array of shape (rows, 6)."""
    return np.array(program.rows, dtype=np.int64).reshape(-1, 6)

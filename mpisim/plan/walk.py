"""What the proof of a plan holds of a rank while it walks its ops, and how it reports a place.

`check.py` and `check_pipeline.py` state the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

from mpisim.errors import PlanError
from mpisim.plan.build import Plan
from mpisim.plan.grid import draw_grid
from mpisim.plan.ops import ALL_MICROS, ExchangeTied, Op
from mpisim.plan.passes import batch_ends
from mpisim.plan.text import op_text

_CONTEXT_OPS = 3
_REORDER = "Fix the order of its ops."


@dataclass
class RankState:
    """What one rank holds while its ops are walked."""

    rank: int
    plan: Plan
    messages: Any
    """What all ranks of the plan have sent each other: `check_pipeline.Messages`."""
    position: int = 0
    loaded: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    """Microbatches that were ever loaded."""
    outputs: set[tuple[str, int]] = field(default_factory=set)
    saved: set[tuple[str, int]] = field(default_factory=set)
    kept: dict[tuple[str, int], str] = field(default_factory=dict)
    """What forwards kept that must be completed by a replay."""
    replayed: set[tuple[str, int]] = field(default_factory=set)
    """Outputs of replays that the next replay of the segment reads."""
    grads_of: set[tuple[str, int]] = field(default_factory=set)
    forwards: set[tuple[str, int]] = field(default_factory=set)
    backwards: set[tuple[str, int]] = field(default_factory=set)
    sums: set[str] = field(default_factory=set)
    started: list[tuple] = field(default_factory=list)
    """Collectives this rank has started on axis dp, in order: what, bucket, and which."""
    started_at: list[int] = field(default_factory=list)
    """Positions of the ops that started them."""
    waited: set[tuple] = field(default_factory=set)
    """Those it has waited for."""
    unsharded: dict[int, bool] = field(default_factory=dict)
    """Buckets whose parameters were asked for; True once they are here."""
    num_gathers: int = 0
    entered: list[tuple] = field(default_factory=list)
    """Collectives this rank has entered on axis control, in order."""
    checked: bool = False
    stepped: bool = False
    halves: set[tuple[str, int]] = field(default_factory=set)
    """Blocks whose input half of backward ran, and the weight half did not."""
    frames: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """(boundary, kind) -> microbatches whose frames were posted and not waited for."""
    exchanged: dict[int, ExchangeTied] = field(default_factory=dict)
    """Buckets whose two ends were added up, and the op that did it."""

    def __post_init__(self) -> None:
        self.blocks = self.plan.rank_blocks(self.rank)
        self.buckets = self.plan.rank_buckets(self.rank)
        self.batch_ends = batch_ends(self.plan.ranks[self.rank])

    @property
    def op(self) -> Op | None:
        """The op at the rank's position; None at the end."""
        ops = self.plan.ranks[self.rank]
        return ops[self.position] if self.position < len(ops) else None

    @property
    def num_micros(self) -> int:
        """Microbatches of a step."""
        return len(self.plan.rows[self.rank])

    @property
    def unreduced(self) -> list[int]:
        """Buckets that are not waited for yet."""
        plan = self.plan
        micros = range(self.num_micros) if plan.zero >= 2 else (ALL_MICROS,)
        return [
            bucket.index
            for bucket in self.buckets
            if any(("sync", bucket.index, micro) not in self.waited for micro in micros)
        ]

    @property
    def apart(self) -> list[int]:
        """Buckets whose other end was not added yet."""
        return [b.index for b in self.buckets if b.twin >= 0 and b.index not in self.exchanged]

    @property
    def in_flight(self) -> list[tuple]:
        """Collectives that were started and not waited for."""
        return [key for key in self.started if key not in self.waited]

    def drop_batch(self) -> None:
        """Forget the rows of a microbatch if the op is the last to read them."""
        if self.batch_ends.get(self.op.micro) is self.op:
            self.loaded.discard(self.op.micro)

    def start(self, key: tuple) -> None:
        """Queue a collective on axis dp."""
        self.started.append(key)
        self.started_at.append(self.position)


def require(
    state: RankState, holds: bool, rule: str, remedy: str = _REORDER, got: str = ""
) -> None:
    """Raise the error of `rule` at the rank's position unless it holds: see `fail`."""
    if not holds:
        fail(state, rule, remedy, got)


def require_known(state: RankState, block: str) -> None:
    """Require that a block is one of the rank's own."""
    known = block in state.plan.blocks
    require(state, known, "a block must be in the plan's head", "Name one that is.")
    require(state, block in state.blocks, f"block {block} must lie on the rank", "Give the op to "
            "the rank that holds the block, or name a block of this one.")  # fmt: skip


def require_params(state: RankState, block: str) -> None:
    """Require that the parameters a block reads are here, if they are sharded."""
    if state.plan.zero < 3:
        return
    for bucket in state.buckets:
        if block in bucket.blocks:
            here = state.unsharded.get(bucket.index, False)
            require(state, here, f"block {block} must find the parameters of bucket "
                    f"{bucket.index} gathered")  # fmt: skip


def fail(state: RankState, rule: str, remedy: str = _REORDER, got: str = "") -> NoReturn:
    """Raise the error of a rule that the op at the rank's position breaks.

    `got` is the value that is wrong, if it is one; `remedy` says what to do.
    """
    place = draw_place(state.plan, {state.rank: state.position})
    where = f"{got} on rank {state.rank}" if got else f"rank {state.rank}"
    raise PlanError(f"{rule}; got {where}:\n{place}\n{remedy}")


def draw_place(plan: Plan, marks: dict[int, int]) -> str:
    """Draw the ops around a position of each given rank, with a mark at the position.

    Above them a pipeline's grid, as far as it gets, with the same places marked.
    """
    lines = [draw_grid(plan, marks)] if plan.mesh.pp > 1 else []
    for rank, position in sorted(marks.items()):
        ops = plan.ranks[rank]
        for index in range(max(0, position - _CONTEXT_OPS), min(len(ops), position + 2)):
            mark = ">>" if index == position else "  "
            lines.append(f"  rank {rank} op {index:4d} {mark} {op_text(ops[index])}")
    return "\n".join(lines)

"""A plan as a text file: read, proved and priced without the config that it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisim.cost.price import Priced, price_rank
from mpisim.errors import ConfigError, PlanError
from mpisim.plan.build import Plan
from mpisim.plan.check import check_plan
from mpisim.plan.ops import GatherParams, StartSync, StartUnshard
from mpisim.plan.text import op_text, parse_plan

MAX_FILE_BYTES = 1 << 26

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_KNOWN = {
    "kind": ("train", "eval"), "dtype": _DTYPES, "params": _DTYPES,
    "algorithm": ("auto", "ring", "recursive_doubling", "halving_doubling"),
}  # fmt: skip
"""Words that a head line may say."""


@dataclass(frozen=True)
class PlanFile:
    """A plan that was proved."""

    path: Path
    plan: Plan
    priced: list[Priced]
    """Per rank."""

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per rank."""
        rows = []
        for rank, priced in enumerate(self.priced):
            row: dict[str, Any] = {"rank": rank, "ops": len(self.plan.ranks[rank])}
            for (axis, collective), counts in priced.items():
                row |= {f"{axis}_{collective}_{name}": value for name, value in counts.items()}
            rows.append(row)
        return rows

    def text(self) -> str:
        """Return a table for people."""
        plan = self.plan
        lines = [
            f"plan {plan.name}: {len(plan.ranks)} ranks, {len(plan.blocks)} blocks, "
            f"{len(plan.buckets)} gradient buckets",
            "ok: order, matching, deadlock, leaks",
            "",
            f"{'rank':>4} {'ops':>5} {'messages out':>12} {'bytes out':>12}",
        ]
        for rank, priced in enumerate(self.priced):
            messages = sum(counts["sent_messages"] for counts in priced.values())
            sent = sum(counts["sent_bytes"] for counts in priced.values())
            lines.append(f"{rank:>4} {len(plan.ranks[rank]):>5} {messages:>12} {sent:>12}")
        return "\n".join(lines)


def check_plan_file(path: Path) -> PlanFile:
    """Prove a plan text.

    Parameters
    ----------
    path : Path
        What `mpisim plan show` printed, perhaps edited.

    Raises
    ------
    ConfigError
        It cannot be read, or a line is none of a plan; its number is named.
    PlanError
        The plan breaks a rule; the op is named.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except FileNotFoundError:
        raise ConfigError(f"plan file must exist; got {path}. Check the path.") from None
    except OSError as error:
        raise ConfigError(
            f"plan file must be readable; got {path}: {error.strerror}. Name a file."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"plan file must be text; got {path}. Use the output of mpisim plan show."
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"plan file must be at most {MAX_FILE_BYTES} bytes long; got more in {path}. Is this "
            f"a plan?"
        )
    try:
        plan = parse_plan(text)
    except PlanError as error:
        raise ConfigError(f"{path}: {error}") from None
    for line, fault in _faulty_numbers(plan, text):
        raise PlanError(f"{path}: plan line {line} {fault}")
    check_plan(plan)
    return PlanFile(path, plan, [price_rank(plan, rank) for rank in range(len(plan.ranks))])


def _faulty_numbers(plan: Plan, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong) of numbers that the plan's own head contradicts."""
    for line_number, line in enumerate(text.splitlines(), start=1):
        word, _, value = line.partition(" ")
        if word in _KNOWN and value not in _KNOWN[word]:
            yield (
                line_number,
                f"must name one of {', '.join(_KNOWN[word])}; got {line!r}. Correct it.",
            )
    lines = iter(enumerate(text.splitlines(), start=1))
    if plan.mesh.size != len(plan.ranks):
        number = next(n for n, line in lines if line.startswith("mesh "))
        yield (
            number,
            f"must give a mesh of as many ranks as the plan lists; got {plan.mesh.size} with "
            f"{len(plan.ranks)} ranks. Correct the mesh, or the list.",
        )
        return
    op_lines = ((n, line) for n, line in lines if line.startswith("  "))
    for ops in plan.ranks:
        for op, (number, _) in zip(ops, op_lines, strict=False):
            if not isinstance(op, StartSync | StartUnshard | GatherParams):
                continue
            if not 0 <= op.bucket < len(plan.buckets):
                yield (
                    number,
                    f"must name a bucket in 0..{len(plan.buckets) - 1}; got {op_text(op)!r}. "
                    f"Correct its number.",
                )
            elif op.count != plan.buckets[op.bucket].count:
                yield (
                    number,
                    f"must move all {plan.buckets[op.bucket].count} elements of bucket "
                    f"{op.bucket}; got count={op.count}. Correct it, or the bucket's line.",
                )

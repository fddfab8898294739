"""Plan <-> text: a short head, then one line per op, rank by rank.

`mpisim plan show` prints it, golden files keep it, traces quote its lines.
"""

from __future__ import annotations

from dataclasses import fields

from mpisim.errors import PlanError
from mpisim.layouts.specs import ParamSpec
from mpisim.mesh import Mesh
from mpisim.plan.build import Plan
from mpisim.plan.ops import OP_TYPES, Op
from mpisim.plan.partition import Bucket

_FIRST_LINE = "mpisim plan 1"


def op_text(op: Op) -> str:
    """Return an op as one line.

    Examples
    --------
    >>> from mpisim.plan.ops import Forward
    >>> op_text(Forward("head", 2))
    'Forward block=head micro=2'
    """
    pairs = [f"{item.name}={getattr(op, item.name)}" for item in fields(op)]
    return " ".join([type(op).__name__, *pairs])


def plan_text(plan: Plan) -> str:
    """Return a plan as text that `parse_plan` reads back to an equal plan."""
    mesh = plan.mesh
    lines = [
        _FIRST_LINE,
        f"kind {plan.kind}",
        f"mesh dp={mesh.dp} pp={mesh.pp} tp={mesh.tp}",
        f"dtype {plan.dtype}",
        f"algorithm {plan.algorithm}",
        "blocks " + " ".join(plan.blocks),
    ]
    for bucket in plan.buckets:
        params = " ".join(
            f"{param.name}:{'x'.join(map(str, param.shape))}" for param in bucket.params
        )
        lines.append(f"bucket {bucket.index} blocks={','.join(bucket.blocks)} {params}")
    for rank, ops in enumerate(plan.ranks):
        lines.append(f"rank {rank} rows={','.join(map(str, plan.rows[rank]))}")
        lines += [f"  {op_text(op)}" for op in ops]
    return "\n".join(lines) + "\n"


def parse_plan(text: str) -> Plan:
    """Read a plan back from `plan_text`.

    Raises
    ------
    PlanError
        A line that is no plan line; its number is named.
    """
    head: dict[str, str] = {}
    buckets: list[Bucket] = []
    rows: list[tuple[int, ...]] = []
    ranks: list[list[Op]] = []
    lines = text.splitlines()
    if not lines or lines[0] != _FIRST_LINE:
        raise PlanError(
            f"plan text must start with {_FIRST_LINE!r}; got {lines[0] if lines else ''!r}. Use "
            f"the output of mpisim plan show."
        )
    for number, line in enumerate(lines[1:], start=2):
        word, _, rest = line.strip().partition(" ")
        try:
            if line.startswith("  "):
                ranks[-1].append(_parse_op(word, rest))
            elif word == "bucket":
                buckets.append(_parse_bucket(rest))
            elif word == "rank":
                rows.append(_ints(rest.partition("rows=")[2]))
                ranks.append([])
            elif word in ("kind", "mesh", "dtype", "algorithm", "blocks"):
                head[word] = rest
            else:
                raise ValueError("unknown word")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise PlanError(
                f"plan line {number} must be an op or a head line; got {line!r} ({error}). Use "
                f"the output of mpisim plan show."
            ) from None
    try:
        degrees = dict(pair.split("=") for pair in head["mesh"].split())
        mesh = Mesh(**{axis: int(degree) for axis, degree in degrees.items()})
        blocks = tuple(head["blocks"].split())
        return Plan(
            head["kind"], mesh, head["dtype"], head["algorithm"], tuple(rows), blocks,
            tuple(buckets), tuple(map(tuple, ranks)),
        )  # fmt: skip
    except (KeyError, ValueError, TypeError) as error:
        raise PlanError(
            f"plan text must have the lines kind, mesh, dtype, algorithm and blocks; got trouble "
            f"with {error}. Use the output of mpisim plan show."
        ) from None


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(",") if item)


def _parse_op(word: str, rest: str) -> Op:
    kind = OP_TYPES[word]
    values = dict(pair.split("=", 1) for pair in rest.split())
    known = {item.name: item.type for item in fields(kind)}
    if values.keys() != known.keys():
        raise ValueError(f"{word} has the fields {', '.join(known) or 'none'}")
    return kind(
        **{name: int(value) if known[name] == "int" else value for name, value in values.items()}
    )


def _parse_bucket(rest: str) -> Bucket:
    index, blocks, *params = rest.split()
    specs = []
    for param in params:
        name, _, shape = param.rpartition(":")
        specs.append(ParamSpec(name=name, shape=tuple(map(int, shape.split("x")))))
    return Bucket(int(index), tuple(blocks.removeprefix("blocks=").split(",")), tuple(specs))

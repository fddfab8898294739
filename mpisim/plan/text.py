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
_HEAD = ("kind", "mesh", "dtype", "algorithm", "zero", "params", "blocks")
_OPTIONAL = ("tag",)


def op_text(op: Op) -> str:
    """Return an op as one line.

    Examples
    --------
    >>> from mpisim.plan.ops import Forward
    >>> op_text(Forward("head", 2))
    'Forward block=head micro=2 keep=all'
    """
    pairs = [f"{item.name}={_value_text(getattr(op, item.name))}" for item in fields(op)]
    return " ".join([type(op).__name__, *pairs])


def _value_text(value: int | str | tuple[int, ...]) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def plan_text(plan: Plan) -> str:
    """Return a plan as text that `parse_plan` reads back to an equal plan."""
    lines = [
        _FIRST_LINE,
        f"kind {plan.kind}",
        _mesh_text(plan.mesh),
        f"dtype {plan.dtype}",
        f"algorithm {plan.algorithm}",
        f"zero {plan.zero}",
        f"params {plan.param_dtype}",
        "blocks " + " ".join(plan.blocks),
    ]
    if plan.tag:
        lines.append(f"tag {plan.tag}")
    if plan.stages:
        lines.append("stages " + " ".join(map(",".join, plan.stages)))
    lines += map(_bucket_text, plan.buckets)
    for rank, ops in enumerate(plan.ranks):
        lengths = plan.lengths[rank] if plan.lengths else None
        lines.append(_rank_text(rank, plan.rows[rank], lengths))
        lines += [f"  {op_text(op)}" for op in ops]
    return "\n".join(lines) + "\n"


def parse_plan(text: str) -> Plan:
    """Read a plan back from `plan_text`.

    Raises
    ------
    PlanError
        A line is none that `plan_text` writes there; its number is named. Or a head line is
        missing.
    """
    head: dict[str, str] = {}
    mesh = Mesh()
    buckets: list[Bucket] = []
    stages: list[tuple[str, ...]] = []
    rows: list[tuple[int, ...]] = []
    lengths: list[tuple[int, ...]] = []
    ranks: list[list[Op]] = []
    lines = text.splitlines()
    if not lines or lines[0] != _FIRST_LINE:
        raise PlanError(
            f"plan text must start with {_FIRST_LINE!r}; got {lines[0] if lines else ''!r}. Use "
            f"the output of mpisim plan show."
        )
    for number, line in enumerate(lines[1:], start=2):
        word, _, rest = line.strip().partition(" ")
        # What was understood is written again: a line that says more, or less, is refused.
        again = line
        try:
            if line.startswith("  "):
                ranks[-1].append(_parse_op(word, rest))
                again = f"  {op_text(ranks[-1][-1])}"
            elif word == "bucket":
                buckets.append(_parse_bucket(len(buckets), rest))
                again = _bucket_text(buckets[-1])
            elif word == "stages" and not stages:
                stages += [tuple(names.split(",")) for names in rest.split()]
                again = "stages " + " ".join(map(",".join, stages))
            elif word == "rank":
                values = dict(pair.split("=") for pair in rest.split()[1:])
                rows.append(_ints(values["rows"]))
                given = _ints(values["lengths"]) if "lengths" in values else None
                lengths += [] if given is None else [given]
                again = _rank_text(len(ranks), rows[-1], given)
                ranks.append([])
            elif word in (*_HEAD, *_OPTIONAL) and word not in head:
                head[word] = rest
                if word == "mesh":
                    degrees = dict(pair.split("=") for pair in rest.split())
                    mesh = Mesh(**{axis: int(degree) for axis, degree in degrees.items()})
                    again = _mesh_text(mesh)
                elif word == "zero":
                    again = f"zero {int(rest)}"
            else:
                raise ValueError("unknown word, or one that came before")
            if again != line:
                raise ValueError(f"read as {again.strip()!r}")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise PlanError(
                f"plan line {number} must be an op or a head line; got {line!r} ({error}). Use "
                f"the output of mpisim plan show."
            ) from None
    missing = [word for word in _HEAD if word not in head]
    if missing:
        raise PlanError(
            f"plan text must have the lines {', '.join(_HEAD)}; got none for "
            f"{', '.join(missing)}. Use the output of mpisim plan show."
        )
    return Plan(
        head["kind"], mesh, head["dtype"], head["algorithm"], tuple(rows),
        tuple(head["blocks"].split()), tuple(buckets), tuple(map(tuple, ranks)), tuple(lengths),
        int(head["zero"]), head["params"], tuple(stages), head.get("tag", ""),
    )  # fmt: skip


def _mesh_text(mesh: Mesh) -> str:
    return f"mesh dp={mesh.dp} pp={mesh.pp} tp={mesh.tp}"


def _bucket_text(bucket: Bucket) -> str:
    params = " ".join(f"{param.name}:{'x'.join(map(str, param.shape))}" for param in bucket.params)
    place = f" at={bucket.coordinate}" if bucket.coordinate else ""
    twin = f" twin={bucket.twin}" if bucket.twin >= 0 else ""
    return f"bucket {bucket.index}{place}{twin} blocks={','.join(bucket.blocks)} {params}"


def _rank_text(rank: int, rows: tuple[int, ...], lengths: tuple[int, ...] | None) -> str:
    text = f"rank {rank} rows={','.join(map(str, rows))}"
    return text + ("" if lengths is None else f" lengths={','.join(map(str, lengths))}")


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(item) for item in text.split(",") if item)


def _parse_op(word: str, rest: str) -> Op:
    kind = OP_TYPES[word]
    values = dict(pair.split("=", 1) for pair in rest.split())
    known = {item.name: item.type for item in fields(kind)}
    if values.keys() != known.keys():
        raise ValueError(f"{word} has the fields {', '.join(known) or 'none'}")
    parse = {"int": int, "str": str, "tuple[int, ...]": _parse_shape}
    return kind(**{name: parse[known[name]](value) for name, value in values.items()})


def _parse_shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x"))) if text else ()


def _parse_bucket(index: int, rest: str) -> Bucket:
    words = rest.split()[1:]
    head = {}
    while words and (name := words[0].partition("=")[0]) in ("at", "twin", "blocks"):
        head[name] = words.pop(0).partition("=")[2]
    specs = []
    for param in words:
        name, _, shape = param.rpartition(":")
        specs.append(ParamSpec(name=name, shape=_parse_shape(shape)))
    return Bucket(
        index, tuple(head["blocks"].split(",")), tuple(specs), int(head.get("at", 0)),
        int(head.get("twin", -1)),
    )  # fmt: skip

"""What `mpisim plan show` prints of a pipeline: the grid, the stages, what is idle; and all ops."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mpisim
from mpisim.config.schema import RunConfig
from mpisim.cost.price import message_bytes
from mpisim.cost.simulate import Link, simulate_plan
from mpisim.errors import ConfigError, MpisimError
from mpisim.layouts.specs import BlockSpec
from mpisim.mesh import stages_text
from mpisim.plan.build import Plan
from mpisim.plan.check_pipeline import in_flight
from mpisim.plan.grid import draw_grid, flight_note, lay_out
from mpisim.plan.ops import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Op,
    Recompute,
)
from mpisim.plan.partition import block_costs
from mpisim.plan.text import plan_text
from mpisim.train.setup import Setup


@dataclass
class PlanView:
    """The plan of a full step in the forms in which it is shown."""

    plan: Plan
    title: str
    """What is drawn: schedule, stages, microbatches."""
    ops: str
    """All ops as text, which `mpisim plan check` reads."""
    overview: str
    """Grid, stages and bubble; of one stage nothing."""


def view_plan(config: RunConfig, ranks: int) -> PlanView:
    """Return the plan of a full step of a config, ready to be shown.

    Parameters
    ----------
    config : RunConfig
    ranks : int

    Raises
    ------
    ConfigError, PlanError
        The layout is impossible, or its plan breaks a rule.
    """
    setup = Setup(config, ranks)
    plan = setup.full_plan()
    micros = len(plan.rows[0])
    mesh = plan.mesh
    if mesh.pp == 1:
        title = f"accumulation: {_count(mesh.size, 'rank')}, {_count(micros, 'microbatch')}"
        return PlanView(plan, title, plan_text(plan), "")
    title = f"{config.parallel.schedule}: {stages_text(mesh.pp, len(plan.stages) // mesh.pp)}, "
    title += _count(micros, "microbatch") + (f", {mesh.dp} replicas" if mesh.dp > 1 else "")
    parts = [title, "", draw_grid(plan), "", *_stage_lines(setup, plan), "", *_idle_lines(setup)]
    return PlanView(plan, title, plan_text(plan), "\n".join(parts))


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{number} {what if number == 1 else plural}"


def _stage_lines(setup: Setup, plan: Plan) -> list[str]:
    """Return a table with a line per place on axis pp."""
    rows = max(max(counts) for counts in plan.rows)
    costs = dict(zip(plan.blocks, block_costs(setup.specs(rows)), strict=True))
    total = sum(costs.values())
    table = [("rank", "parameters", "share of cost", "in flight", "blocks")]
    for rank in range(plan.mesh.pp):
        names = ["rank", *map(str, plan.mesh.group(rank, "dp"))]
        table.append(
            (
                ", ".join(names[1:4]) + (" .." if len(names) > 4 else ""),
                f"{sum(bucket.count for bucket in plan.rank_buckets(rank)):,}",
                f"{sum(costs[block] for block in plan.rank_blocks(rank)) / total:.1%}",
                f"{round(in_flight(plan, rank), 2):,}",
                " | ".join(map(_span, plan.chunks(rank))),
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        numbers = [text.rjust(width) for text, width in zip(row, widths, strict=True)][1:-1]
        lines.append("  " + "  ".join([row[0].ljust(widths[0]), *numbers, row[-1]]))
    return [*lines, f"  {flight_note(len(plan.stages) // plan.mesh.pp)}"]


def _span(blocks: tuple[str, ...]) -> str:
    """Return neighbouring blocks by their ends."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} .. {blocks[-1]}"


def _idle_lines(setup: Setup) -> list[str]:
    plan, cluster = setup.full_plan(), setup.config.cluster
    idle = lay_out(plan).idle_share
    line = simulate_plan(
        plan,
        lambda rank, op: op_flops(setup, plan, rank, op) / cluster.flops_per_s,
        Link(cluster.latency_s, cluster.bytes_per_s),
        message_bytes=lambda op: message_bytes(plan, op),
    )
    links = "messages that take no time"
    if cluster.latency_s or cluster.bytes_per_s:
        rate = f"{cluster.bytes_per_s:g} bytes/s" if cluster.bytes_per_s else "any rate"
        links = f"links of {cluster.latency_s:g} s and {rate}"
    return [
        f"  idle in this grid: {idle.numerator}/{idle.denominator} = {float(idle):.1%}",
        f"  predicted stall share: {float(line.stall_share):.1%} of a step of {line.step_s:.3g} s, "
        f"with the flops of these stages at",
        f"  {cluster.flops_per_s:g} per second and {links} (see [cluster])",
    ]


def op_flops(setup: Setup, plan: Plan, rank: int, op: Op) -> int:
    """Return the floating-point operations of an op; 0 of one that computes no block."""
    if not isinstance(op, (Forward, Recompute, Backward, BackwardInput, BackwardWeight)):
        return 0
    specs = setup.specs(plan.rows[rank][op.micro], plan.length(rank, op.micro))
    spec = specs[plan.blocks.index(op.block)]
    if isinstance(op, Recompute):
        return _replay_flops(setup, spec)
    return {
        Forward: spec.forward_flops,
        Backward: spec.backward_flops,
        BackwardInput: spec.input_flops,
        BackwardWeight: spec.weight_flops,
    }[type(op)]


def _replay_flops(setup: Setup, spec: BlockSpec) -> int:
    full = setup.config.memory.recompute == "full"
    return spec.forward_flops if full else spec.interior_flops


def require_picture(out: Path) -> None:
    """Require what `write_picture` needs, before anything else is done.

    Raises
    ------
    ConfigError
        The script is not there, what it draws with is not installed, or the file cannot be written.
    """
    script = _script()
    if not script.is_file():
        raise ConfigError(
            f"pictures must be drawn from a checkout, where plots/ is; got no {script}. Write the "
            f"ops to a file (--ops) and draw it there: python plots/plan.py FILE."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "pictures must have matplotlib; got none installed. Install mpisim[plots]."
        )
    # What is drawn lies beside the file until it is whole.
    part = out.with_name(out.name + ".part")
    try:
        part.open("ab").close()
        part.unlink()
    except OSError as error:
        raise ConfigError(
            f"a picture must go into a folder that exists and can be written to; got {out} "
            f"({error.strerror}). Make the folder, or name another file."
        ) from None


def _script() -> Path:
    return Path(mpisim.__file__).parents[1] / "plots" / "plan.py"


def write_picture(view: PlanView, out: Path) -> None:
    """Draw the grid of a plan into a PNG file, with the script plots/plan.py.

    Raises
    ------
    ConfigError
        See `require_picture`.
    MpisimError
        The script failed; the text is its own.
    """
    require_picture(out)
    script = _script()
    root = script.parents[1]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(script), "-", "--out", str(out), "--title", view.title],
        input=view.ops, text=True, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    if done.returncode:
        raise MpisimError(done.stderr.strip() or f"{script} must draw; got none. Run it by hand.")

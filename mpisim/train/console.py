"""What rank 0 shows while a run goes on: a progress bar on a terminal, whole lines elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpisim.config.effects import settings_without_effect
from mpisim.config.schema import RunConfig
from mpisim.launch import Job
from mpisim.layouts.metrics import STALL_CAUSES
from mpisim.mesh import stages_text
from mpisim.plan.build import Plan
from mpisim.train.setup import Setup
from mpisim.units import format_bytes

_LINES = 20
_HEAD = (
    f"{'step':>6} {'loss':>8} {'tokens/s':>10} {'messages':>9} {'bytes out':>11} {'stall':>6} "
    f"{'peak memory':>11}"
)


class Console:
    """Rank 0's table.

    Parameters
    ----------
    config : RunConfig
    job : Job
        Says whether a person watches, and how wide the terminal is.
    primary_baseline : str
        Baseline that the held-out loss is compared with.
    """

    def __init__(self, config: RunConfig, job: Job, primary_baseline: str) -> None:
        self.config = config
        self.primary = primary_baseline
        self._screen = job.screen
        self._unit = "" if config.data.kind == "regression" else " nats"
        self._every = config.train.log_every or max(1, config.train.steps // _LINES)
        self._bar: Any = None
        if job.terminal:
            from tqdm import tqdm

            self._bar = tqdm(
                total=config.train.steps, file=job.screen, ncols=job.columns, unit="step",
                dynamic_ncols=False, leave=False,
            )  # fmt: skip

    def start(self, baselines: dict[str, Any], record: dict[str, Any], setup: Setup) -> None:
        """Say what is trained on, what a model must beat, and on what layout."""
        plan, mesh = setup.full_plan(), setup.mesh
        params = sum(param.size for param in setup.model.param_specs())
        ranks = f"{mesh.size} rank{'s' * (mesh.size > 1)}"
        if mesh.pp > 1:
            ranks += f" (dp {mesh.dp} x pp {mesh.pp})"
        self._line(
            f"{self.config.run.name}: {params} parameters in {len(plan.blocks)} blocks, "
            f"{len(plan.buckets)} gradient buckets, {ranks}; data "
            f"{record.get('name')} ({record.get('num_train')} training rows, "
            f"{record.get('num_heldout')} held out)"
        )
        if mesh.pp > 1:
            self._line(_pipeline(self.config, plan))
        for sentence in settings_without_effect(self.config):
            self._line(f"note: {sentence}")
        emulated = self.config.compute.mode == "emulated"
        if emulated:
            rate = self.config.cluster.flops_per_s
            self._line(
                f"emulated: forward and backward sleep for their operations at {rate:g} per second;"
                f" losses are zeros"
            )
        for name, value in ({} if emulated else baselines).items():
            if isinstance(value, float):
                mark = "  <- any model must beat this" if name == self.primary else ""
                self._line(f"baseline {name} = {value:.4f}{mark}")
        self._line(_HEAD)

    def step(self, row: dict[str, Any]) -> None:
        """Show one step: every `log_every` steps a line, always the first and the last."""
        step, last = row["step"], self.config.train.steps - 1
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {_shown(row['loss'])}", refresh=False)
            self._bar.update(1)
        if row["skipped"]:
            self._line(
                f"{step:>6} skipped: gradients are not finite at loss scale {row['loss_scale']:g}; "
                f"no rank updated"
            )
        if step % self._every and step != last:
            return
        ranks = row["ranks"]
        stall = sum(ranks[f"stall_{axis}_{cause}_s"][2] for axis, cause in STALL_CAUSES)
        messages = sum(v[0] for name, v in ranks.items() if name.endswith("sent_messages"))
        sent = sum(v[0] for name, v in ranks.items() if name.endswith("sent_bytes"))
        self._line(
            f"{step:>6} {_shown(row['loss']):>8} {row['tokens_per_s']:>10.0f} {messages:>9.0f} "
            f"{format_bytes(sent):>11} {stall / max(ranks['step_s'][2], 1e-12):>6.1%} "
            f"{format_bytes(ranks['peak_total_bytes'][3]):>11}"
        )

    def passed(self, result: dict[str, Any]) -> None:
        """Print an evaluation that is not one of a step: see `History.passes`."""
        top1 = f", top-1 {result['heldout_top1']:.1%}" if "heldout_top1" in result else ""
        self._line(
            f"{result['pass']}: held-out loss {result['heldout_loss']:.4f}{top1} "
            f"({result['heldout_rows']} rows)"
        )

    def evaluated(self, result: dict[str, Any], baselines: dict[str, Any]) -> None:
        """Show a held-out evaluation beside the baseline."""
        loss = result["heldout_loss"]
        text = f"loss {loss:.4f}{self._unit}"
        value, name = loss, self.primary
        if "heldout_bits_per_byte" in result and "unigram_bits_per_byte" in baselines:
            value, name = result["heldout_bits_per_byte"], "unigram_bits_per_byte"
            text += f", {value:.4f} bits/byte, perplexity {result['heldout_perplexity']:.2f}"
        if "heldout_top1" in result:
            text += f", top-1 {result['heldout_top1']:.1%}"
        if baseline := baselines[name]:
            side = "below" if value <= baseline else "above"
            text += f", {abs(1 - value / baseline):.1%} {side} {name}"
        self._line(
            f"{result['step']:>6} held out: {text} ({result['heldout_rows']} rows, "
            f"{result['heldout_targets']} targets)"
        )

    def finish(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def summary(self, run_dir: Path, totals: list[dict[str, Any]]) -> None:
        """Say where the run is and whether its bytes are the predicted ones."""
        difference = 0
        for entry in totals:
            for name, counts in entry["traffic"].items():
                predicted = entry["predicted_traffic"].get(name, {})
                difference += sum(
                    abs(value - predicted.get(field, 0)) for field, value in counts.items()
                )
        self._line(
            f"done: bytes and messages measured - predicted = {difference}; {_replicas(totals)}"
        )
        self._line(f"run directory: {run_dir} (next: mpisim report {run_dir})")

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._screen)
        else:
            self._screen.write(text + "\n")
        self._screen.flush()


def _pipeline(config: RunConfig, plan: Plan) -> str:
    """Say how the model is cut, and in which order its stages work."""
    parallel, compression = config.parallel, config.compression
    # Place by place on axis pp: that of a rank in the first replica is its number.
    cuts = [[len(chunk) for chunk in plan.chunks(place)] for place in range(plan.mesh.pp)]
    counts = ", ".join("+".join(map(str, cut)) for cut in cuts)
    where = "stage" if parallel.chunks == 1 else "place, chunk by chunk,"
    text = (
        f"pipeline: schedule {parallel.schedule}, {stages_text(plan.mesh.pp, parallel.chunks)}, "
        f"{config.train.num_microbatches} microbatches; blocks per {where} {counts}"
    )
    codecs = {"activations": compression.activations, "gradients": compression.grads}
    named = [f"{what} as {codec}" for what, codec in codecs.items() if codec != "none"]
    return text + (f"; {', '.join(named)}" if named else "")


def _replicas(totals: list[dict[str, Any]]) -> str:
    """Say whether the ranks of each stage hold the same bits, and the ends of a tied table."""
    held: dict[int, set[tuple]] = {}
    for entry in totals:
        digests = held.setdefault(entry.get("stage", 0), set())
        digests.add((entry["params_sha256"], entry.get("working_sha256")))
    ends = {entry["tied_sha256"] for entry in totals if "tied_sha256" in entry}
    parts = []
    if len(held) < len(totals) or len(totals) == 1:
        of = " of each stage" if len(held) > 1 else ""
        equal = all(len(digests) == 1 for digests in held.values())
        parts.append(f"replicas{of} {'bitwise equal' if equal else 'DIFFER'}")
    if ends:
        parts.append(f"ends of the tied table {'bitwise equal' if len(ends) == 1 else 'DIFFER'}")
    return ", ".join(parts) or "no replicas"


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"

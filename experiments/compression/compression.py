"""Bytes across stage boundaries against held-out loss: codecs, bottlenecks, error feedback.

Two parts: decoders trained from scratch with everything compressed that crosses a boundary; and
bottlenecks put into trained models, by how they start. Run by `make compression`, which puts
experiments/ and plots/ on the module path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from common import BLACK, BLUE, DARK_GREY, GREEN, GREY, ORANGE, PURPLE, VERMILION, heading
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter
from variants import (
    Finished,
    Row,
    Variant,
    config_of,
    machine,
    run_variants,
    table,
    write,
)

from mpisim.comm.codecs import roundtrip
from mpisim.cost.price import price_rank
from mpisim.data.load import load_data
from mpisim.data.sampler import spread_indices
from mpisim.layouts.codecs import codec_spec
from mpisim.nn.bottleneck import LayerNorm
from mpisim.nn.layers import LayerContext
from mpisim.train.setup import Setup
from mpisim.train.stage_reader import load_run_weights

NAME = "compression"
SEEDS = (1, 2, 3)
STAGES = 3
HEADER_BYTES = 64
MLP = (
    "model.kind=mlp", "model.hidden=[96,96,96,96]", "data.window=8", "train.global_batch=512",
    "train.eval_rows=4096", "optimizer.lr=3e-3", "optimizer.warmup_steps=0",
    "optimizer.weight_decay=0.0", "optimizer.clip_norm=0.0",
)  # fmt: skip
"""A model without norms of its own, over the same text."""
AGAIN = (
    "train.steps=20", "optimizer.lr=1e-3", "optimizer.warmup_steps=0", "optimizer.schedule=constant"
)  # fmt: skip
"""A few more steps from trained weights."""
STARTS = {"pca": "principal components", "layernorm": "behind a layer norm", "random": "random"}
NO_START = "none"
"""In place of a start: no bottleneck, only the further steps."""
KINDS = {
    "none": ("nothing compressed", BLACK),
    "half": ("fp16, bf16", GREY),
    "tensor": ("a scale a tensor", BLUE),
    "token": ("a scale a token", GREEN),
    "grads": ("gradients only", ORANGE),
    "bottleneck": ("bottleneck", PURPLE),
}
"""Kind of compression -> what the picture calls it, and its colour."""
LABELS = {
    "none": ((0, 10), "center"), "tensor": ((5, 7), "left"), "grads": ((8, 0), "left"),
    "bottleneck": ((-6, -7), "right"),
}  # fmt: skip
"""Where a point's label stands, points."""


@dataclass(frozen=True)
class Scheme:
    """What is done to all that crosses a boundary."""

    kind: str
    activations: str = "none"
    grads: str = "none"
    width: int = 0
    """Of the bottleneck; 0 means none."""
    error_feedback: bool = False

    @property
    def name(self) -> str:
        """Name of its runs, without the seed."""
        parts = [f"width{self.width}"] * bool(self.width) + [self.grads]
        if self.activations != self.grads:
            parts.append("grads-only")
        return "-".join([*parts, *["feedback"] * self.error_feedback])

    @property
    def label(self) -> str:
        """What the table calls it."""
        text = self.grads
        if self.activations != self.grads:
            text += " (gradients only)"
        if self.width:
            text = f"bottleneck {self.width}, {text}"
        return text

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of the config."""
        return (
            f"compression.activations={self.activations}", f"compression.grads={self.grads}",
            f"compression.bottleneck={self.width}",
            f"compression.error_feedback={str(self.error_feedback).lower()}",
        )  # fmt: skip


def schemes() -> list[Scheme]:
    """Return what is compared."""
    found = [Scheme("none")]
    found += [Scheme("half", name, name) for name in ("fp16", "bf16")]
    for bits in range(8, 1, -1):
        for kind, name in (("tensor", f"int{bits}"), ("token", f"int{bits}-token")):
            found.append(Scheme(kind, name, name))
            if bits <= 4:
                found.append(Scheme(kind, name, name, error_feedback=True))
    for bits in (4, 3, 2):
        for feedback in (False, True):
            found.append(Scheme("grads", "none", f"int{bits}", error_feedback=feedback))
    for width in (32, 16):
        for name in ("int8", "int4"):
            found.append(Scheme("bottleneck", name, name, width))
            if name == "int4":
                found.append(Scheme("bottleneck", name, name, width, error_feedback=True))
    return found


def formula_bytes(scheme: Scheme, rows: int, micros: int, window: int, width: int) -> int:
    """Return what all ranks send across boundaries in a step, from the formats alone."""
    tokens = rows // micros * window
    values = tokens * (scheme.width or width)
    total = 0
    for codec in (scheme.activations, scheme.grads):
        if codec == "none":
            payload = 4 * values
        elif codec in ("fp16", "bf16"):
            payload = 2 * values
        else:
            bits, per_token = int(codec[3]), codec.endswith("-token")
            payload = math.ceil(values * bits / 8) + 4 * (tokens if per_token else 1)
        total += micros * (STAGES - 1) * (HEADER_BYTES + payload)
    return total


def moved_bytes(run: Finished) -> tuple[int, int]:
    """Return the bytes across boundaries of the last step, measured and priced from the plan."""
    plan = Setup(config_of(NAME, run.variant.changes), run.variant.ranks).full_plan()
    ranks = run.steps[-1]["ranks"]
    kinds = ("activation", "grad")
    # The log keeps the mean over ranks.
    measured = sum(round(ranks[f"pp_{kind}_sent_bytes"][2] * run.variant.ranks) for kind in kinds)
    priced = sum(
        price_rank(plan, rank)["pp", kind]["sent_bytes"]
        for rank in range(run.variant.ranks)
        for kind in kinds
    )
    return measured, priced


def sweep_row(scheme: Scheme, seed: int, run: Finished) -> Row:
    """Return what one decoder came to that was trained with compression from the start."""
    config = config_of(NAME, run.variant.changes)
    measured, priced = moved_bytes(run)
    return {
        "part": "from scratch",
        "scheme": scheme.name,
        "label": scheme.label,
        "kind": scheme.kind,
        "error_feedback": scheme.error_feedback,
        "seed": seed,
        "settings": run.variant.changes,
        "boundary_bytes_per_step": measured,
        "priced_bytes_per_step": priced,
        "formula_bytes_per_step": formula_bytes(
            scheme, config.train.global_batch, config.train.num_microbatches, config.data.window,
            config.model.d_model,
        ),
        "heldout_loss": run.heldout["heldout_loss"],
        "heldout_top1": run.heldout["heldout_top1"],
        "last_loss": run.losses[-1],
        **machine(run),
    }  # fmt: skip


def start_row(model: str, start: str, seed: int, run: Finished) -> Row:
    """Return what became of a trained model that was given bottlenecks."""
    return {
        "part": "starts",
        "model": model,
        "stages": run.variant.ranks,
        "start": start,
        "seed": seed,
        "settings": run.variant.changes,
        "passes": run.summary["passes"],
        "heldout": run.heldout,
        "losses": run.losses,
        **machine(run),
    }


def with_shares(group: list[Row]) -> list[Row]:
    """Add the shares of the base's top-1 that are kept; `group` starts with the one without."""
    base = next(p["heldout_top1"] for p in group[1]["passes"] if p["pass"] == "base")
    for row in group:
        untrained = [p["heldout_top1"] for p in row["passes"] if p["pass"] == "calibrated"]
        row["base_top1"] = base
        row["kept_untrained"] = (untrained or [base])[0] / base
        row["kept_trained"] = row["heldout"]["heldout_top1"] / base
    return group


def zero_rows(seed: int, run: Finished) -> list[Row]:
    """Return which share of what crosses a boundary int4 makes 0, one scale a tensor or a token.

    Of the first micro-batch of training rows, computed here by one process from trained weights.
    """
    config = config_of(NAME, run.variant.changes)
    setup = Setup(config, run.variant.ranks)
    params, _ = load_run_weights(run.path, setup.model.param_specs())
    rows = config.train.global_batch // config.train.num_microbatches
    batch = load_data(config).train_batch(np.arange(rows))
    ends = {stage[-1] for stage in setup.full_plan().stages[:-1]}
    crossing: dict[tuple[str, str], np.ndarray] = {}
    kept, y = [], batch.x
    for block, values in zip(setup.model.blocks, setup.model.split_params(params), strict=True):
        targets = batch.targets if block is setup.model.blocks[-1] else None
        context = LayerContext(starts=batch.starts, targets=targets)
        y, saved = block.forward(values, y, context)
        kept.append((block, values, saved, context))
        if block.name in ends:
            crossing[block.name, "activation"] = y
    dy = 1.0 / batch.num_targets
    for block, values, saved, context in reversed(kept):
        if block.name in ends:
            crossing[block.name, "gradient"] = dy
        dy, _ = block.backward(values, saved, dy, context)

    def zeros(x: np.ndarray, codec: str) -> float:
        return float(np.mean(roundtrip(codec_spec(codec), x) == 0))

    return [
        {
            "part": "zeros",
            "seed": seed,
            "after": after,
            "kind": kind,
            "tensor": zeros(x, "int4"),
            "token": zeros(x, "int4-token"),
        }
        for (after, kind), x in crossing.items()
    ]


def norm_rows(model: str, seed: int, run: Finished) -> list[Row]:
    """Return what a layer norm alone does where a trained model is cut, by boundary.

    Notes
    -----
    Computed here by one process over the held-out rows. `scale` is the mean over tokens of their
    standard deviation over features, what a layer norm divides by; `spread` the standard deviation
    of these over their mean; `half` the share of the variance over tokens that the first half of
    the principal components holds. `top1` is without any norm, with one at all boundaries (nothing
    narrow, nothing rounded), and with `scale` multiplied back in behind it.
    """
    config = config_of(NAME, run.variant.changes)
    setup = Setup(config, run.variant.ranks)
    params, _ = load_run_weights(run.path, setup.model.param_specs())
    data = load_data(config)
    batch = data.heldout_batch(spread_indices(data.num_heldout, config.train.eval_rows))
    ends = [stage[-1] for stage in setup.full_plan().stages[:-1]]
    rows: dict[str, Row] = {}

    def top1(change: Callable[[str, np.ndarray], np.ndarray]) -> float:
        y = batch.x
        for block, values in zip(setup.model.blocks, setup.model.split_params(params), strict=True):
            targets = batch.targets if block is setup.model.blocks[-1] else None
            y, saved = block.forward(values, y, LayerContext(starts=batch.starts, targets=targets))
            if block.name in ends:
                y = change(block.name, y)
        return setup.model.num_correct(saved) / batch.num_targets

    def measure(name: str, x: np.ndarray) -> np.ndarray:
        tokens = x.reshape(-1, x.shape[-1]).astype(np.float64)
        scales = tokens.std(axis=1)
        variances = np.linalg.eigvalsh(np.cov(tokens.T))
        rows[name] = {
            "part": "norm",
            "model": model,
            "seed": seed,
            "after": name,
            "scale": float(scales.mean()),
            "spread": float(scales.std() / scales.mean()),
            "half": float(variances[len(variances) // 2 :].sum() / variances.sum()),
        }
        return x

    def normalise(name: str, x: np.ndarray) -> np.ndarray:
        return LayerNorm(x.shape[-1]).forward({}, x, LayerContext())[0]

    def scale_back(name: str, x: np.ndarray) -> np.ndarray:
        return normalise(name, x) * np.float32(rows[name]["scale"])

    found = [top1(change) for change in (measure, normalise, scale_back)]
    return [row | {"top1": found} for row in rows.values()]


def train_all() -> list[Row]:
    """Train everything; the rows of both parts."""
    compared = [(scheme, seed) for scheme in schemes() for seed in SEEDS]
    runs = run_variants(
        NAME,
        [
            Variant(
                f"{scheme.name}-seed{seed}",
                f"{scheme.label}{', error feedback' * scheme.error_feedback}, seed {seed}",
                (*scheme.settings, f"run.seed={seed}"),
                STAGES,
            )
            for scheme, seed in compared
        ],
    )
    rows = [sweep_row(*key, run) for key, run in zip(compared, runs, strict=True)]
    decoders = {seed: run for (scheme, seed), run in zip(compared, runs, strict=True)
                if scheme.kind == "none"}  # fmt: skip
    mlps = dict(zip(SEEDS, run_variants(NAME, [
        Variant(f"mlp-seed{seed}", f"multi-layer perceptron, seed {seed}",
                (*MLP, f"run.seed={seed}"), STAGES)
        for seed in SEEDS
    ]), strict=True))  # fmt: skip
    cases = [("decoder", 32, STAGES, seed, decoders[seed].path, ()) for seed in SEEDS]
    cases += [("decoder", 32, 4, SEEDS[0], decoders[SEEDS[0]].path, ())]
    cases += [("mlp", 48, STAGES, seed, mlps[seed].path, MLP) for seed in SEEDS]
    for model, width, stages, seed, source, settings in cases:
        group = []
        for start in (NO_START, *STARTS):
            changes = (
                *settings, *AGAIN, f"run.seed={seed}", f"run.init_from={source}",
                f"parallel.pp={stages}",
            )  # fmt: skip
            if start != NO_START:
                changes += (
                    f"compression.bottleneck={width}", "compression.activations=int8",
                    f"compression.start={start}",
                )  # fmt: skip
            name = f"{model}-{stages}stages-{start}-seed{seed}"
            label = f"{model} on {stages} stages, half width, 8 bits, start {start}, seed {seed}"
            (run,) = run_variants(NAME, [Variant(name, label, changes, stages)])
            group.append(start_row(model, start, seed, run))
        rows += with_shares(group)
    for seed in SEEDS:
        rows += zero_rows(seed, decoders[seed])
    for model, found in (("decoder", decoders), ("mlp", mlps)):
        for seed in SEEDS:
            rows += norm_rows(model, seed, found[seed])
    return rows


def means(rows: Iterable[Row]) -> list[Row]:
    """Return one row per scheme, with the mean and the extremes over its seeds."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["part"] == "from scratch":
            groups.setdefault((row["label"], row["error_feedback"]), []).append(row)
    found = []
    for group in groups.values():
        losses = [row["heldout_loss"] for row in group]
        found.append(
            group[0]
            | {
                "loss": fmean(losses),
                "least": min(losses),
                "most": max(losses),
                "top1": fmean(row["heldout_top1"] for row in group),
            }
        )
    return found


def text_of(rows: list[Row]) -> str:
    """Return all tables."""
    sweep = table(
        means(rows),
        {
            "compressed": lambda r: r["label"],
            "error feedback": lambda r: "yes" if r["error_feedback"] else "no",
            "bytes per step": lambda r: f"{r['boundary_bytes_per_step']:,}",
            "from the plan": lambda r: f"{r['priced_bytes_per_step']:,}",
            "held-out loss": lambda r: f"{r['loss']:.3f}",
            "least to most": lambda r: f"{r['least']:.3f} to {r['most']:.3f}",
            "top-1": lambda r: f"{r['top1']:.1%}",
        },
    )

    zeros = table(
        [row for row in rows if row["part"] == "zeros"],
        {
            "seed": lambda r: str(r["seed"]),
            "boundary after": lambda r: r["after"],
            "what": lambda r: r["kind"],
            "zeros in int4": lambda r: f"{r['tensor']:.0%}",
            "in int4-token": lambda r: f"{r['token']:.0%}",
        },
    )
    starts = table(
        [row for row in rows if row["part"] == "starts"],
        {
            "model": lambda r: r["model"],
            "stages": lambda r: str(r["stages"]),
            "seed": lambda r: str(r["seed"]),
            "start": lambda r: STARTS.get(r["start"], "no bottleneck"),
            "base": lambda r: f"{r['base_top1']:.1%}",
            "untrained": lambda r: f"{r['kept_untrained'] * r['base_top1']:.1%}",
            "kept": lambda r: f"{r['kept_untrained']:.1%}",
            "after 20 steps": lambda r: f"{r['kept_trained'] * r['base_top1']:.1%}",
            "kept then": lambda r: f"{r['kept_trained']:.1%}",
        },
    )
    norms = table(
        [row for row in rows if row["part"] == "norm"],
        {
            "model": lambda r: r["model"],
            "seed": lambda r: str(r["seed"]),
            "boundary after": lambda r: r["after"],
            "scale of a token": lambda r: f"{r['scale']:.2f}",
            "spread over tokens": lambda r: f"{r['spread']:.0%}",
            "variance in half the components": lambda r: f"{r['half']:.1%}",
            "top-1": lambda r: f"{r['top1'][0]:.1%}",
            "normalised": lambda r: f"{r['top1'][1]:.1%}",
            "and scaled back": lambda r: f"{r['top1'][2]:.1%}",
        },
    )
    return f"{sweep}\n\n{zeros}\n\n{starts}\n\n{norms}"


def main() -> None:
    """Train, compare, write."""
    rows = train_all()
    write(NAME, rows, text_of(rows), lambda fig: draw(fig, rows))


def draw(fig, rows: list[Row]) -> None:
    """Draw bytes against loss, and what each start keeps."""
    fig.set_size_inches(13, 5.4)
    left, right = fig.subplots(1, 2, width_ratios=(3, 2))
    draw_losses(left, means(rows))
    draw_starts(right, [row for row in rows if row["part"] == "starts"])
    entries = means(rows)
    plain = next(row for row in entries if row["kind"] == "none")
    eight = next(row for row in entries if row["scheme"] == "int8")
    kept = min(row["kept_untrained"] for row in rows
               if row["part"] == "starts" and row["start"] == "pca")  # fmt: skip
    heading(
        fig, f"Compressed stage boundaries ({STAGES} stages, real text, mean of "
        f"{len(SEEDS)} seeds)",
        f"int8 sends {eight['boundary_bytes_per_step'] / plain['boundary_bytes_per_step']:.0%} of "
        f"the bytes (loss {eight['loss']:.3f} beside {plain['loss']:.3f}); calibrated bottlenecks "
        f"keep at least {math.floor(1000 * kept) / 10:g}% of top-1 untrained",
    )  # fmt: skip


def draw_losses(axes, entries: list[Row]) -> None:
    """Draw every scheme; one with error feedback is a ring, joined to the one without."""
    plain = next(row for row in entries if row["kind"] == "none")
    kib = 1 << 10
    axes.axhline(plain["loss"], color=DARK_GREY, linewidth=0.8, linestyle=":")
    for kind, (_, colour) in KINDS.items():
        mine = [row for row in entries if row["kind"] == kind]
        without = [row for row in mine if not row["error_feedback"]]
        if kind in ("tensor", "token"):
            axes.plot([r["boundary_bytes_per_step"] / kib for r in without],
                      [r["loss"] for r in without], color=colour, linewidth=0.9)  # fmt: skip
        for row in mine:
            at = row["boundary_bytes_per_step"] / kib
            ring = row["error_feedback"]
            axes.plot([at, at], [row["least"], row["most"]], color=colour, linewidth=0.8)
            axes.plot(at, row["loss"], "o", color=colour, markersize=9 if ring else 5,
                      markerfacecolor="none" if ring else colour)  # fmt: skip
    for row in entries:
        if row["error_feedback"] or row["kind"] in ("half", "token"):
            continue
        text = row["label"].replace("bottleneck ", "").replace(" (gradients only)", "")
        offset, side = LABELS[row["kind"]]
        axes.annotate(
            text, (row["boundary_bytes_per_step"] / kib, row["loss"]), ha=side, va="center",
            fontsize=7, xytext=offset, textcoords="offset points",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_yticks(range(2, 9))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(left=32)
    axes.set_xlabel("bytes across boundaries in a step, activations and gradients (KiB)")
    axes.set_ylabel("held-out loss (nats per token)")
    marks = [Line2D([], [], color=colour, marker="o", linestyle="", label=label)
             for label, colour in KINDS.values()]  # fmt: skip
    marks.append(Line2D([], [], color=BLACK, marker="o", markersize=9, linestyle="",
                        markerfacecolor="none", label="with error feedback"))  # fmt: skip
    axes.legend(handles=marks, loc="upper right", fontsize=8)


def draw_starts(axes, rows: list[Row]) -> None:
    """Draw the share of top-1 that each start keeps, at once and after a few steps."""
    cases = list(dict.fromkeys((row["model"], row["stages"]) for row in rows))
    colours = dict(zip(STARTS, (BLUE, ORANGE, VERMILION), strict=True))
    for place, case in enumerate(cases):
        for offset, (start, colour) in enumerate(colours.items()):
            mine = [r for r in rows if (r["model"], r["stages"]) == case and r["start"] == start]
            at = place + (offset - 1) * 0.27
            axes.bar(at, fmean(r["kept_untrained"] for r in mine), 0.25, color=colour,
                     label=STARTS[start] if not place else None)  # fmt: skip
            axes.plot([at] * len(mine), [r["kept_untrained"] for r in mine], ".", color=BLACK,
                      markersize=4)  # fmt: skip
            axes.plot(at, fmean(r["kept_trained"] for r in mine), "_", color=DARK_GREY,
                      markersize=16, markeredgewidth=2)  # fmt: skip
    axes.axhline(0.9, color=DARK_GREY, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(cases)), [f"{model}\n{stages} stages" for model, stages in cases])
    axes.set_ylim(0, 1.3)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 1.0])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("kept of top-1: half width, 8 bits")
    handles, labels = axes.get_legend_handles_labels()
    handles += [
        Line2D([], [], color=DARK_GREY, linewidth=2),
        Line2D([], [], color=BLACK, marker=".", linestyle=""),
    ]
    axes.legend(handles, [*labels, "after 20 steps", "a seed"], loc="upper left", fontsize=8,
                ncols=2)  # fmt: skip


if __name__ == "__main__":
    main()

"""The parent side of `bench step`: its config, its start, its table.

The ranks' side is step_rank.py. PyTorch is an optional extra that nothing but this benchmark needs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpisim.bench.parent import BenchResult, start_ranks
from mpisim.config import RunConfig, config_from_mapping
from mpisim.config.load import parse_override
from mpisim.errors import ConfigError
from mpisim.launch import EXIT_DONE

DTYPES = ("float32", "float64", "bfloat16", "float16")
KERNELS = ("auto", "numpy", "numba")

_MODEL = {
    "kind": "decoder", "d_model": 256, "num_blocks": 4, "num_heads": 4, "d_ff": 1024, "tied": True,
}  # fmt: skip
_OPTIMIZER = {"kind": "adamw", "lr": 3e-4, "weight_decay": 0.1}


def bench_step(
    *,
    ranks: int = 1,
    dtype: str = "float32",
    kernels: str = "auto",
    rounds: int = 15,
    rows: int = 8,
    overrides: Sequence[str] = (),
) -> BenchResult:
    """Time a training step of the decoder beside the same in PyTorch eager, interleaved.

    Parameters
    ----------
    ranks : int
        1: PyTorch runs alone, too. More: beside DistributedDataParallel over gloo, in the same
        processes.
    dtype : {"float32", "float64", "bfloat16", "float16"}
        Of activations and working weights on both sides. Ours keeps float32 masters and gradients
        under the 16-bit ones; PyTorch then holds everything in 16 bits, for reference only.
    kernels : {"auto", "numpy", "numba"}
        Who computes our element-wise work.
    rounds : int
        Rounds to keep; in each, every side makes one update.
    rows : int
        Rows of a rank.
    overrides : iterable of str
        ``section.key=value`` texts that change the model or the run, such as ``model.d_model=128``.

    Returns
    -------
    BenchResult
        One row. `tokens_per_s` and `torch_tokens_per_s` of all ranks together, from median times
        of the slowest rank; `ratio` is ours over PyTorch's, the median of the rounds' ratios;
        `profile` the seconds and the share per kind of work of one step of ours; `float32`, under
        16-bit storage, our float32 step in the same rounds and the `cost` of ours beside it.

    Raises
    ------
    ConfigError
        PyTorch is missing, or the config asks for what PyTorch's side does not do.

    Notes
    -----
    Before the clock starts, loss and every gradient are compared with PyTorch's, on small
    configs and on the timed one; a difference ends the job with the tensor's name.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "PyTorch must be installed for `bench step`; got no module torch. Install it beside "
            "mpisim (pip install 'mpisim[torch]'; its CPU build is enough)."
        )
    for text in overrides:
        if text.partition("=")[0].strip() in ("precision.compute", "model.dtype"):
            raise ConfigError(
                f"--set must leave the dtype to --dtype; got {text}. Use --dtype alone."
            )
    config = bench_config(ranks, dtype, kernels, rows, overrides)
    options = {"config": config.model_dump(mode="json"), "rounds": rounds}
    status, found = start_ranks("step", options, ranks)
    if status != EXIT_DONE:
        return BenchResult(status, [], "")
    row, library = found
    return BenchResult(status, [row], step_text(row, library))


def bench_config(
    ranks: int, dtype: str, kernels: str, rows: int, overrides: Iterable[str] = ()
) -> RunConfig:
    """Return the config of the timed step.

    Parameters
    ----------
    ranks, dtype, kernels, rows, overrides
        As for `bench_step`.

    Returns
    -------
    RunConfig

    Raises
    ------
    ConfigError
        A field breaks a rule of the schema, or makes the two sides differ.
    """
    values: dict[str, dict[str, Any]] = {
        "data": {"kind": "stdlib", "window": 128},
        "model": dict(_MODEL) | {"dtype": "float64" if dtype == "float64" else "float32"},
        "precision": {"compute": "same" if dtype in ("float32", "float64") else dtype},
        "compute": {"kernels": kernels},
        "optimizer": dict(_OPTIMIZER),
        "train": {"global_batch": rows * ranks},
    }
    if dtype == "float16":
        # Low enough that no step of the measurement overflows and is skipped.
        values["precision"] |= {"loss_scale": "static", "init_scale": 1024.0}
    for text in overrides:
        section, key, value = parse_override(text)
        if not section:
            raise ConfigError(
                f"--set must name a field of a section; got {text!r}. "
                f"Write for example --set model.d_model=128."
            )
        values.setdefault(section, {})[key] = value
    config = config_from_mapping(values)
    for name, value, allowed in (
        ("model.kind", config.model.kind, "decoder"),
        ("model.dropout", config.model.dropout, 0.0),
        ("optimizer.kind", config.optimizer.kind, "adamw"),
        ("optimizer.clip_norm", config.optimizer.clip_norm, 0.0),
        ("train.global_batch", config.train.global_batch, rows * ranks),
    ):
        if value != allowed:
            raise ConfigError(
                f"{name} must be {allowed} in `bench step`, where both sides do the same; got "
                f"{value}. Leave it out; rows of a rank are set by --rows."
            )
    return config


def step_text(row: Mapping[str, Any], library: str) -> str:
    """Return the row of `bench_step` as a table for people."""
    model = row["model"]
    tokens = row["ranks"] * model["rows"] * model["window"]
    kv = model["num_kv_heads"]
    ranks = "1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks"
    lines = [
        f"{library}; {ranks} of one thread; medians of {row['rounds']} rounds"
        + ("" if row["quiet"] else ", DISTURBED by other programs"),
        f"decoder: d_model {model['d_model']}, {model['num_blocks']} blocks, "
        f"{model['num_heads']} heads ({kv} of keys and values), feed-forward {model['d_ff']}, "
        f"vocabulary {model['vocab_size']}, {'tied' if model['tied'] else 'untied'}; "
        f"{model['rows']} rows of {model['window']} tokens per rank",
        "forward, backward and AdamW; loss and gradients equal PyTorch's within "
        + ", ".join(f"{error:.1e} ({dtype})" for dtype, error in row["gradient_error"].items()),
        "",
        f"{'':<34} {'ms/step':>9} {'tokens/s':>9} {'ours/this':>9}",
    ]

    def line(name: str, rate: float, ratio: float | None = None) -> None:
        shown = "" if ratio is None else f"{ratio:.2f}"
        lines.append(f"{name:<34} {tokens / rate * 1e3:>9.1f} {rate:>9.0f} {shown:>9}".rstrip())

    line(f"mpisim {row['dtype']}, {row['kernels']} kernels", row["tokens_per_s"])
    if row["float32"] is not None:
        line("mpisim float32", row["float32"]["tokens_per_s"])
    kind = "DDP" if row["ranks"] > 1 else "eager"
    for variant, found in row["torch_variants"].items():
        line(
            f"PyTorch {row['torch_version']} {kind}, {variant}",
            found["tokens_per_s"],
            found["ratio"],
        )
    lines += ["", f"ratio {row['ratio']:.2f}: ours over PyTorch's faster variant"]
    if row["float32"] is not None:
        lines.append(f"{row['dtype']} takes {row['float32']['cost']:.2f}x the time of float32")
    lines.append("")
    total = sum(part["seconds"] for part in row["profile"].values())
    lines.append(f"one step of ours by kind of work, timed apart ({total * 1e3:.1f} ms)")
    for kind, part in row["profile"].items():
        lines.append(f"  {kind:<10} {part['seconds'] * 1e3:>8.2f} ms {part['share']:>6.1%}")
    return "\n".join(lines)

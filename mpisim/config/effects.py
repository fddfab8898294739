"""Settings that were changed and do nothing in this config: said, so that nobody waits for them.

The rules are facts about the schema; which fields matter when stands here and nowhere else.
"""

from __future__ import annotations

from typing import Any

from mpisim.config.schema import RunConfig

_DECODER = (
    "d_model", "num_blocks", "num_heads", "num_kv_heads", "d_ff", "tied", "vocab_size", "max_len",
    "rope_theta", "norm_eps", "dropout", "loss_chunk_tokens",
)  # fmt: skip
_DYNAMIC = ("growth_interval", "growth_factor", "backoff_factor", "min_scale")


def settings_without_effect(config: RunConfig) -> list[str]:
    """Return one sentence per field that differs from its default and is not read.

    Examples
    --------
    >>> from mpisim.config import config_from_mapping
    >>> settings_without_effect(config_from_mapping({"memory": {"recompute_every": 4}}))
    ['memory.recompute_every = 4 has no effect with memory.recompute = none.']
    """
    found = []
    for section, names, field in _unread(config):
        chosen = config
        for part in field.split("."):
            chosen = getattr(chosen, part)
        for name in names:
            value = getattr(getattr(config, section), name)
            if value != _default(section, name):
                found.append(f"{section}.{name} = {value} has no effect with {field} = {chosen}.")
    return found


def _unread(config: RunConfig) -> list[tuple[str, tuple[str, ...], str]]:
    """Return (section, fields that are not read, field whose value says so)."""
    unread: list[tuple[str, tuple[str, ...], str]] = []
    if config.model.kind == "decoder":
        unread.append(("model", ("hidden", "activation", "embed_dim"), "model.kind"))
    elif config.model.kind == "mlp":
        unread.append(("model", _DECODER, "model.kind"))
        unread.append(("data", ("layout",), "model.kind"))
        if config.memory.recompute == "selective":
            # There is no attention whose weights could be computed again.
            unread.append(("memory", ("recompute",), "model.kind"))
    if config.data.kind == "regression":
        unread.append(("data", ("window", "max_bytes"), "data.kind"))
        unread.append(("model", ("embed_dim",), "data.kind"))
    else:
        names = ("num_rows", "num_features", "num_targets", "noise")
        unread.append(("data", names, "data.kind"))
    if config.optimizer.kind == "adamw":
        unread.append(("optimizer", ("momentum",), "optimizer.kind"))
    else:
        unread.append(("optimizer", ("beta1", "beta2", "eps"), "optimizer.kind"))
    if config.optimizer.schedule == "constant":
        unread.append(("optimizer", ("min_lr_ratio",), "optimizer.schedule"))
    scale = config.precision.loss_scale
    if scale == "auto":
        precision = config.precision
        halves = (precision.compute, precision.reduce, precision.wire)
        scale = "dynamic" if "float16" in halves else "none"
    if scale != "dynamic":
        names = _DYNAMIC if scale == "static" else ("init_scale", *_DYNAMIC)
        unread.append(("precision", names, "precision.loss_scale"))
    if config.parallel.zero != 3:
        unread.append(("parallel", ("prefetch",), "parallel.zero"))
    else:
        # Every block is gathered, and so summed, by itself.
        unread.append(("parallel", ("bucket_bytes",), "parallel.zero"))
    if config.parallel.zero:
        # Shards come from rings only; the few numbers of the control group choose for themselves.
        unread.append(("comm", ("algorithm",), "parallel.zero"))
    compression = config.compression
    if config.parallel.pp == 1:
        names = ("activations", "grads", "error_feedback", "bottleneck", "start",
                 "calibration_tokens")  # fmt: skip
        unread.append(("compression", names, "parallel.pp"))
    else:
        # Every block is summed by itself, so that the split changes no order of additions.
        unread.append(("parallel", ("bucket_bytes",), "parallel.pp"))
        if not compression.bottleneck:
            names = ("start", "calibration_tokens")
            unread.append(("compression", names, "compression.bottleneck"))
        elif compression.start == "random":
            unread.append(("compression", ("calibration_tokens",), "compression.start"))
        if compression.grads == "none":
            unread.append(("compression", ("error_feedback",), "compression.grads"))
    if config.compute.mode == "real":
        unread.append(("cluster", ("flops_per_s",), "compute.mode"))
    if not config.memory.budget_bytes:
        unread.append(("memory", ("static_check",), "memory.budget_bytes"))
    if config.memory.recompute != "full":
        unread.append(("memory", ("recompute_every",), "memory.recompute"))
    return unread


def _default(section: str, name: str) -> Any:
    return getattr(RunConfig.model_fields[section].default, name)

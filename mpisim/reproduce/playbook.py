"""Page playbook: the memory figures of the Ultra-Scale Playbook."""

from __future__ import annotations

from fractions import Fraction

from mpisim.memory.published import (
    playbook_activation_bytes,
    playbook_num_params,
    playbook_param_bytes,
    playbook_zero_figure,
)
from mpisim.reproduce.rounding import RULE
from mpisim.reproduce.rows import Page
from mpisim.reproduce.zero import STAGES, Read

VOCAB = 128256
# Name -> hidden size, heads, layers of Llama 3.1 and 3.2.
_MODELS = {
    "1B": (2048, 32, 16),
    "3B": (3072, 24, 28),
    "8B": (4096, 32, 32),
    "70B": (8192, 64, 80),
    "405B": (16384, 128, 126),
}
_LENGTHS = {"none": (1024, 2048, 4096, 8192), "selective": (1024, 8192), "full": (1024, 8192)}
_LLAMA_8B_PARAMS = 8_030_261_248
_GIB = 1 << 30


def build(read: Read) -> Page:
    """Make the page."""
    oracle = read("playbook")
    source = oracle["provenance"]
    page = Page(
        "playbook",
        "The Ultra-Scale Playbook: memory of Llama 3.1",
        f"Parameters in float32 (gradients take the same, Adam twice that) and activations by "
        f"recompute, in {oracle['unit']}; ZeRO bars of 8B on 8 ranks. Source: {oracle['source']}. "
        f"GiB here where ZeRO prints GB: 15 GiB are 16.1 GB. Ours: the named closed forms of "
        f"memory.published, at the sizes of the models.",
        f"{RULE}; a ZeRO bar is a whole number of GiB divided by 8",
    )
    for name, (h, _, layers) in _MODELS.items():
        ours = Fraction(playbook_param_bytes(h, layers, VOCAB, 1024), _GIB)
        page.printed(f"{name}, parameters at 1024", oracle["params_fp32"][name], ours, source)
    for mode, lengths in _LENGTHS.items():
        for name, (h, a, layers) in _MODELS.items():
            for s in lengths:
                ours = playbook_activation_bytes(h, a, layers, s, mode) / _GIB
                cell = oracle[mode][name][str(s)]
                page.printed(f"{name}, activations at {s}, recompute {mode}", cell, ours, source)
    bars = oracle["zero_8B_dp8"]
    for zero in STAGES:
        ours_by_part = playbook_zero_figure(_LLAMA_8B_PARAMS, 8, zero)
        for part, cell, ours in zip(bars["order"], bars[f"zero{zero}"], ours_by_part, strict=True):
            page.printed(f"8B on 8, zero {zero}, {part}", cell, ours, source)
    params = playbook_num_params(*(_MODELS["8B"][n] for n in (0, 2)), VOCAB, 1024)
    page.flaws = [
        f"its 8B has {params / 1e9:.2f}e9 parameters (GPT-2's formula with this vocabulary), not "
        f"8.03e9; its ZeRO bars take the true number: two counts of one model",
        "its ZeRO, TP, PP and CP bars count 8 bytes a parameter of optimizer state: the float32 "
        "master copy, 4 more, is missing",
        "its ZeRO bars are rounded to whole GiB before they are divided (1.875 is 15 / 8; the "
        "formula gives 1.870)",
        "its pipeline bar gives every stage the same activations: that stage r of 1F1B keeps p - r "
        "microbatches cannot be seen",
    ]
    return page

"""Closed forms that others published, as named functions with their source.

Each returns what its source says, right or wrong; `reproduce` puts them beside the printed values
and beside ours (`formulas.py`). All are exact: whole numbers or fractions, never floats. Bytes
unless a name says otherwise. Sources:

    ZeRO         Rajbhandari et al. 2020, arXiv 1910.02054, section 3 and Tables 1 and 2
    Korthikanti  Korthikanti et al. 2022, arXiv 2205.05198, sections 4 and 5, appendix A
    playbook     The Ultra-Scale Playbook, Hugging Face 2025, memory figures
    DeepSpeed    estimate_zero2/3_model_states_mem_needs in deepspeed/runtime/zero, and its docs
    Megatron     Megatron-LM, docs of the distributed optimizer
    EleutherAI   cookbook, calc_transformer_mem
    llm-analysis cli99/llm-analysis, memory analysis of training
    Calculon     calculon-ai/calculon, the errors of its own validation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

# ZeRO -----------------------------------------------------------------------------------------

ZERO_ADAM_BYTES = 12
"""K of the paper: float32 weights, momentum and variance, bytes per parameter."""


def zero_model_state_bytes(num_params: int, ranks: int, zero: int) -> Fraction:
    """Return ZeRO's model states per rank: 2 + 2 + K bytes a parameter, sharded by stage.

    Source: ZeRO paper, section 3 and Figure 1. `zero` 1 is called P_os there, 2 P_os+g, 3 P_os+g+p.

    Examples
    --------
    >>> [float(zero_model_state_bytes(7_500_000_000, 64, zero)) / 1e9 for zero in range(4)]
    [120.0, 31.40625, 16.640625, 1.875]
    """
    return sum(zero_parts(num_params, ranks, zero).values(), Fraction(0))


def zero_parts(num_params: int, ranks: int, zero: int) -> dict[str, Fraction]:
    """Return the three parts that Figure 1 of the ZeRO paper stacks."""

    def held(sharded_from: int) -> Fraction:
        return Fraction(num_params, ranks if zero >= sharded_from else 1)

    return {
        "parameters": 2 * held(3),
        "gradients": 2 * held(2),
        "optimizer states": ZERO_ADAM_BYTES * held(1),
    }


def zero_largest_model(memory_bytes: int, ranks: int, zero: int) -> Fraction:
    """Return how many parameters' model states fill `memory_bytes` of a rank (ZeRO, Table 2)."""
    return Fraction(memory_bytes) / zero_model_state_bytes(1, ranks, zero)


def zero_sent_elements(num_params: int, zero: int) -> int:
    """Return the elements that a rank sends per step by the ZeRO paper, section 7.

    On a ring it is (N - 1) / N times that. One microbatch: with M of them the gradients of stage 2
    travel M times.
    """
    return (3 if zero == 3 else 2) * num_params


# Korthikanti et al. ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A run of Korthikanti's Table 3, in the paper's letters."""

    a: int
    """Attention heads."""
    h: int
    """Hidden size."""
    L: int
    """Layers."""
    t: int
    """Tensor parallel degree."""
    p: int
    """Pipeline stages."""
    v: int
    """Interleaved model chunks of a stage; 1: no interleaving."""
    B: int
    """Sequences of a global batch."""
    b: int
    """Sequences of a microbatch."""
    s: int = 2048
    """Sequence length, tokens."""
    vocab: int = 51200

    @property
    def gpus(self) -> int:
        """Devices of a model: t * p (no data parallelism)."""
        return self.t * self.p


ACTIVATION_MODES = ("none", "tp", "tp_sp", "tp_selective", "tp_sp_selective", "full")
"""Tensor parallelism, sequence parallelism and recompute, in the order of the paper's Table 2."""


def korthikanti_layer_bytes(run: Transformer, mode: str) -> Fraction:
    """Return the activation bytes of one layer on one device.

    Source: Korthikanti et al., equations 1, 2 and 4 and Table 2; 16-bit activations, 1-byte masks.

    Parameters
    ----------
    run : Transformer
    mode : str
        One of `ACTIVATION_MODES`.
    """
    sbh = run.s * run.b * run.h
    scores = Fraction(5 * run.a * run.s, run.h)
    return {
        "none": sbh * (34 + scores),
        "tp": sbh * (10 + Fraction(24, run.t) + scores / run.t),
        "tp_sp": sbh * (34 + scores) / run.t,
        "tp_selective": sbh * (10 + Fraction(24, run.t)),
        "tp_sp_selective": Fraction(34 * sbh, run.t),
        "full": Fraction(2 * sbh),
    }[mode]


def korthikanti_layer_parts(run: Transformer) -> dict[str, Fraction]:
    """Return the parts of a layer without parallelism and recompute (section 4.1)."""
    sbh = run.s * run.b * run.h
    return {
        "attention": Fraction(11 * sbh + 5 * run.a * run.s**2 * run.b),
        "MLP": Fraction(19 * sbh),
        "layer norms": Fraction(4 * sbh),
    }


def korthikanti_first_stage_bytes(run: Transformer, mode: str) -> Fraction:
    """Return the activation bytes of the first stage, which holds L layers' worth under 1F1B.

    Source: section 4.2.3; interleaving holds 1 + (p - 1) / (p v) times as much. What the embedding
    and the output keep is `korthikanti_extra_bytes`; the paper's Figure 1 is without it.
    """
    interleave = 1 + Fraction(run.p - 1, run.p * run.v) if run.v > 1 else 1
    return korthikanti_layer_bytes(run, mode) * run.L * interleave


def korthikanti_extra_bytes(run: Transformer) -> Fraction:
    """Return what embedding and output keep: dropout masks; without a pipeline logits as well."""
    sbh = run.s * run.b * run.h
    masks = Fraction(sbh * run.p, run.t)
    if run.p > 1:
        return masks
    return masks + Fraction(4 * sbh, run.t) * (1 + Fraction(run.vocab, run.h))


def korthikanti_weights_optimizer_bytes(run: Transformer) -> Fraction:
    """Return weights and optimizer state of a device: 18 bytes for each of 12 L h^2 / (t p)."""
    return Fraction(18 * 12 * run.L * run.h**2, run.t * run.p)


def korthikanti_model_flops(run: Transformer) -> Fraction:
    """Return the floating point operations of an iteration that any implementation needs.

    Source: appendix A. Three times the forward: two products for each weight, all of the scores
    (no half for the causal mask), the logits.
    """
    return _iteration_flops(run, Fraction(run.s, 6 * run.h))


def korthikanti_hardware_flops(run: Transformer) -> Fraction:
    """Return the operations that the paper counts with selective recompute.

    Source: appendix A. It doubles the term of the scores, s / 6h to s / 3h, as if all three of
    their forwards' worth came twice; one more forward makes it 4/3 of s / 6h
    (`hardware_flops_one_more_forward`). The printed HFU follow the doubled term.
    """
    return _iteration_flops(run, Fraction(run.s, 3 * run.h))


def hardware_flops_one_more_forward(run: Transformer) -> Fraction:
    """Return the operations with the products of the scores computed once more, and no others."""
    return _iteration_flops(run, Fraction(4, 3) * Fraction(run.s, 6 * run.h))


def _iteration_flops(run: Transformer, scores: Fraction) -> Fraction:
    products = 72 * run.B * run.L * run.s * run.h**2
    return products * (1 + scores + Fraction(run.vocab, 12 * run.h * run.L))


def utilization_percent(
    flops: Fraction | int, seconds: Fraction, gpus: int, peak_flops_per_s: int
) -> Fraction:
    """Return the share of the peak: MFU of model operations, HFU of hardware operations."""
    return 100 * Fraction(flops) / (seconds * gpus * peak_flops_per_s)


# The Ultra-Scale playbook ---------------------------------------------------------------------


def playbook_num_params(h: int, layers: int, vocab: int, s: int) -> int:
    """Return the parameters of a GPT-2 with untrained length: the playbook's for every model.

    It has learned positions and biases and a feed-forward of 4 h, which Llama has not.
    """
    return h * vocab + s * h + layers * (12 * h**2 + 13 * h) + 2 * h


def playbook_param_bytes(h: int, layers: int, vocab: int, s: int) -> int:
    """Return the bytes of its float32 parameters; its gradients take the same, Adam twice that."""
    return 4 * playbook_num_params(h, layers, vocab, s)


def playbook_activation_bytes(h: int, a: int, layers: int, s: int, recompute: str) -> Fraction:
    """Return its activations of one sequence; `recompute` is none, selective or full."""
    per_token = {"none": 34 + Fraction(5 * a * s, h), "selective": 34, "full": 2}[recompute]
    return Fraction(layers * s * h * per_token + s * h)


def playbook_zero_figure(num_params: int, ranks: int, zero: int) -> tuple[Fraction, ...]:
    """Return its ZeRO bars in GiB: 16-bit parameters and gradients, 8 bytes of optimizer state.

    The bars of stage 0 are whole GiB, and the others are these divided by `ranks`.
    """
    bars = []
    for nbytes, sharded_from in ((2, 3), (2, 2), (8, 1)):
        whole = int(Fraction(nbytes * num_params, 1 << 30) + Fraction(1, 2))
        bars.append(Fraction(whole, ranks if zero >= sharded_from else 1))
    return tuple(bars)


# Estimators of model states -------------------------------------------------------------------


@dataclass(frozen=True)
class Estimator:
    """A published estimate of the model states of one rank."""

    name: str
    source: str
    total: Callable[[int, int, int], Fraction | None]
    """(parameters, ranks, zero) -> bytes as its source writes it; None: it says nothing."""
    parts: Callable[[int, int, int], dict[str, Fraction]]
    """The same bytes by what they are: weights, grads (16-bit), main_grads (float32), master,
    moments. An absent part is one that it does not count."""


def _stages(**forms: Callable[[int, int], Fraction]) -> Callable[[int, int, int], Fraction | None]:
    def total(num_params: int, ranks: int, zero: int) -> Fraction | None:
        form = forms.get(f"zero{zero}")
        return None if form is None else form(num_params, ranks)

    return total


def _parts(**rule: tuple[int, int]) -> Callable[[int, int, int], dict[str, Fraction]]:
    """Return parts from (bytes a parameter, first stage that shards them; 4: none does)."""

    def parts(num_params: int, ranks: int, zero: int) -> dict[str, Fraction]:
        return {
            name: Fraction(nbytes * num_params, ranks if zero >= sharded_from else 1)
            for name, (nbytes, sharded_from) in rule.items()
        }

    return parts


def deepspeed_zero2_bytes(num_params: int, ranks: int) -> Fraction:
    """Return what the code estimates for stage 2: 2 P + 18 P / N."""
    return 2 * num_params + Fraction(18 * num_params, ranks)


def deepspeed_zero3_bytes(num_params: int, ranks: int, largest_layer: int = 0) -> Fraction:
    """Return what the code estimates for stage 3: 18 P / N and 4 bytes of the largest layer."""
    return Fraction(18 * num_params, ranks) + 4 * largest_layer


def deepspeed_docs_zero2_bytes(num_params: int, ranks: int) -> Fraction:
    """Return what its documentation still says of stage 2: 4 P + 16 P / N."""
    return 4 * num_params + Fraction(16 * num_params, ranks)


def megatron_distributed_optimizer_bytes(num_params: int, ranks: int) -> Fraction:
    """Return 16-bit weights, float32 gradients and 12 / d bytes of state a parameter."""
    return 6 * num_params + Fraction(12 * num_params, ranks)


def eleuther_model_state_bytes(num_params: int, ranks: int, zero: int) -> Fraction:
    """Return 2 bytes of weights, 4 of gradients, 12 of state, sharded by stage."""
    weights = Fraction(2 * num_params, ranks if zero >= 3 else 1)
    grads = Fraction(4 * num_params, ranks if zero >= 2 else 1)
    return weights + grads + Fraction(12 * num_params, ranks if zero >= 1 else 1)


def llm_analysis_model_state_bytes(num_params: int, ranks: int, zero: int) -> Fraction:
    """Return its weights, gradients and optimizer state at 2, 4 and 12 bytes a parameter."""
    shards = [1, 1, 1]
    for stage, part in ((1, 2), (2, 1), (3, 0)):
        if zero >= stage:
            shards[part] = ranks
    return sum(
        (Fraction(n * num_params, k) for n, k in zip((2, 4, 12), shards, strict=True)), Fraction(0)
    )


def playbook_model_state_bytes(num_params: int, ranks: int, zero: int) -> Fraction:
    """Return what the playbook's figures count: 2 + 2 + 8 bytes, no master copy."""
    unsharded = {0: 12, 1: 4, 2: 2, 3: 0}[zero]
    return unsharded * num_params + Fraction((12 - unsharded) * num_params, ranks)


_FLOAT32_GRADS = _parts(weights=(2, 3), main_grads=(4, 2), master=(4, 1), moments=(8, 1))


def _deepspeed_parts(num_params: int, ranks: int, zero: int) -> dict[str, Fraction]:
    """Return parts of the code's 18 bytes: stage 2 has a 16-bit shard of gradients among them."""
    parts = _FLOAT32_GRADS(num_params, ranks, zero)
    if zero == 2:
        parts["grads"] = Fraction(2 * num_params, ranks)
    return parts


ESTIMATORS = (
    Estimator(
        "ZeRO paper", "arXiv 1910.02054, Figure 1", zero_model_state_bytes,
        _parts(weights=(2, 3), grads=(2, 2), master=(4, 1), moments=(8, 1)),
    ),
    Estimator(
        "DeepSpeed code", "deepspeed/runtime/zero, estimate_zero*_model_states_mem_needs",
        _stages(zero2=deepspeed_zero2_bytes, zero3=deepspeed_zero3_bytes), _deepspeed_parts,
    ),
    Estimator(
        "DeepSpeed docs", "deepspeed.readthedocs.io, memory requirements (stale)",
        _stages(zero2=deepspeed_docs_zero2_bytes),
        _parts(weights=(2, 3), grads=(2, 4), main_grads=(4, 2), master=(4, 1), moments=(8, 1)),
    ),
    Estimator(
        "Megatron", "Megatron-LM docs, distributed optimizer: 6 + 12 / d",
        _stages(zero1=megatron_distributed_optimizer_bytes), _FLOAT32_GRADS,
    ),
    Estimator(
        "EleutherAI", "EleutherAI/cookbook, calc_transformer_mem", eleuther_model_state_bytes,
        _FLOAT32_GRADS,
    ),
    Estimator(
        "llm-analysis", "cli99/llm-analysis, training memory", llm_analysis_model_state_bytes,
        _FLOAT32_GRADS,
    ),
    Estimator(
        "playbook", "Ultra-Scale Playbook, ZeRO figure", playbook_model_state_bytes,
        _parts(weights=(2, 3), grads=(2, 2), moments=(8, 1)),
    ),
)  # fmt: skip


def scaled_weight_bytes(num_params: int, hundredths_of_a_byte: int) -> Fraction:
    """Return the bytes of weights at a rounded number of bytes each, scales of blocks included.

    Source: estimates for a 32e9-parameter model, which round the bytes a weight takes to two
    digits first: 2.00 (bfloat16), 1.06 (8 bits and a float32 scale for 64: 1.0625), 0.52 (4 bits
    and doubly quantized scales: 0.516).
    """
    return Fraction(num_params * hundredths_of_a_byte, 100)


# Collectives ----------------------------------------------------------------------------------


def busbw_factor(collective: str, n: int) -> Fraction:
    """Return bus bandwidth over algorithm bandwidth; 0 for a single rank, where nothing travels.

    Source: nccl-tests, doc/PERFORMANCE.md. Size is the whole buffer: for an all-gather its total
    output, for a reduce-scatter its total input.
    """
    if n == 1:
        return Fraction(0)
    if collective in ("broadcast", "reduce"):
        return Fraction(1)
    share = Fraction(n - 1, n)
    if collective == "all_reduce":
        return 2 * share
    if collective in ("reduce_scatter", "all_gather", "all_to_all"):
        return share
    raise ValueError(
        f"collective must be one that nccl-tests names; got {collective!r}. "
        f"Choose all_reduce, reduce_scatter, all_gather, all_to_all, broadcast or reduce."
    )


# Errors of others -----------------------------------------------------------------------------


def relative_errors_percent(pairs: Sequence[tuple[Fraction, Fraction]]) -> list[Fraction]:
    """Return |estimate - published| over published, in percent, of (published, estimate) pairs."""
    return [100 * abs(estimate - truth) / truth for truth, estimate in pairs]

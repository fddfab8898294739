"""The run config as frozen, typed sections: names, meanings, units, ranges, defaults.

Types, shapes and ranges are checked here; what depends on the number of ranks is checked by
`mesh` and `data`, names that users may register are resolved in `train` before any message.
Reading files, `--set` overrides and error texts live in `config.load`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mpisim.units import parse_bytes

SCHEMA_VERSION = 1


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class RunSection(Section):
    """Where a run writes and what seeds it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = "run"
    """Name of the run directory below `dir`: letters, digits, dot, dash, underscore."""
    dir: Annotated[str, Field(min_length=1)] = "runs"
    """Folder that holds run directories; relative to where the command is started."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seeds parameters (by name) and the order of the data; the same on every rank."""
    extensions: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Python files that register schedules, codecs, collectives, activations or models of yours;
    relative to where the command is started. They are run on every rank."""
    init_from: Annotated[str, Field(min_length=1)] | None = None
    """Run directory, or weights file, whose weights to start from instead of random ones; each
    rank reads its own part only, from files whose sha256 is right."""


class DataSection(Section):
    """What is trained on."""

    kind: Literal["stdlib", "text", "regression"] = "stdlib"
    """`stdlib`: the running Python's own standard library sources as bytes, a file a document;
    `text`: the bytes of the file `path`, or the token ids of a .npy file (mlp: 0..255; decoder:
    below model.vocab_size); `regression`: seeded synthetic rows. For the decoder blank lines end
    the documents of a text."""
    path: str | None = None
    """File for kind `text`, required there and refused elsewhere."""
    window: Annotated[int, Field(ge=1, le=4096)] = 8
    """Tokens of a row (kinds stdlib and text). mlp: these bytes predict the next one; decoder:
    every token of the row predicts its successor."""
    layout: Literal["packed", "padded"] = "packed"
    """How documents become rows of the decoder. `packed`: one after the other, rows are full and a
    token sees only its own document; `padded`: a row holds one document or a piece of one."""
    max_bytes: NonNegativeInt = 0
    """Use at most this many bytes of text, or ids of a .npy file; 0 means all."""
    num_rows: PositiveInt = 4096
    """Rows to synthesize (kind regression)."""
    num_features: PositiveInt = 16
    """Input width (kind regression)."""
    num_targets: PositiveInt = 1
    """Output width (kind regression)."""
    noise: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.1
    """Standard deviation of the noise added to the targets (kind regression)."""

    @model_validator(mode="after")
    def _path_only_for_text(self) -> DataSection:
        if (self.kind == "text") != (self.path is not None):
            raise ValueError(
                f'data.path must be set exactly when data.kind is "text"; '
                f"got kind {self.kind!r} with path {self.path!r}. Set both, or neither."
            )
        return self


class ModelSection(Section):
    """The network."""

    kind: str = "mlp"
    """`mlp`: a multi-layer perceptron; over text its input is the embedded, flattened window.
    `decoder`: a decoder-only transformer over text (RMSNorm, rotary attention, SwiGLU). Or one of
    an extension, over the same rows as the mlp."""
    hidden: tuple[PositiveInt, ...] = (256,)
    """Widths of the hidden layers, first to last; each is one block. Empty means linear."""
    activation: str = "relu"
    """Nonlinearity of the hidden layers: relu, tanh, gelu, or one of an extension (mlp)."""
    embed_dim: PositiveInt = 16
    """Width of the byte embedding (mlp over text only)."""
    d_model: PositiveInt = 64
    """Width of the residual stream (decoder)."""
    num_blocks: PositiveInt = 4
    """Blocks of attention and feed-forward (decoder)."""
    num_heads: PositiveInt = 4
    """Query heads; must divide d_model into an even head size (decoder)."""
    num_kv_heads: NonNegativeInt = 0
    """Key and value heads, shared by groups of query heads; 0 means num_heads (decoder)."""
    d_ff: NonNegativeInt = 0
    """Hidden width of SwiGLU; 0 means 8/3 of d_model, rounded up to a multiple of 8 (decoder)."""
    tied: bool = True
    """Use the token table as the output weights, too (decoder)."""
    vocab_size: NonNegativeInt = 0
    """Rows of the token table; 0 means 266: 256 bytes and ten specials (decoder)."""
    max_len: NonNegativeInt = 0
    """Longest row the model can take, tokens; 0 means data.window (decoder)."""
    rope_theta: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 10000.0
    """Base of the rotary angles (decoder)."""
    norm_eps: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-5
    """Added to the mean square in RMSNorm (decoder)."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the outputs of attention and feed-forward that is dropped; 0 means off (decoder)."""
    loss_chunk_tokens: NonNegativeInt = 0
    """Tokens whose logits exist at one time, recomputed in backward; 0 means all (decoder)."""
    dtype: Literal["float32", "float64"] = "float32"
    """Dtype in which parameters are kept and updated; see [precision] for the others."""


class PrecisionSection(Section):
    """In which dtypes values are stored, added up and sent, and the loss scale."""

    compute: Literal["same", "float32", "float64", "bfloat16", "float16"] = "same"
    """Dtype in which working weights, activations and their gradients are stored; `same` means
    model.dtype. 16-bit values are multiplied and added in float32."""
    reduce: Literal["same", "float32", "float64", "bfloat16", "float16"] = "same"
    """Dtype in which gradients are added up over microbatches and ranks; `same` means
    model.dtype."""
    wire: Literal["same", "float32", "float64", "bfloat16", "float16"] = "same"
    """Dtype of gradients in sums over replicas; `same` means that of `reduce`, in which the two
    ends of a tied table add theirs up."""
    loss_scale: Literal["auto", "none", "static", "dynamic"] = "auto"
    """`static`: backward starts from init_scale times the loss; `dynamic`: a step whose gradients
    are not finite is skipped and the scale lowered; `auto`: dynamic if compute, reduce or wire is
    float16, else none."""
    init_scale: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 65536.0
    """First loss scale (static and dynamic)."""
    growth_interval: PositiveInt = 2000
    """Updates in a row without a skip after which the scale grows (dynamic)."""
    growth_factor: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] = 2.0
    """Factor by which the scale grows (dynamic)."""
    backoff_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Factor by which a skipped step lowers the scale (dynamic)."""
    min_scale: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    """Floor: a skip that would lower the scale below it ends the run (dynamic)."""


def _as_bytes(value: object) -> object:
    """Read a size with a unit; what is no text is left to the type."""
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"memory.budget_bytes {str(error).removeprefix('size ')}") from None


ByteCount = Annotated[int, BeforeValidator(_as_bytes), Field(ge=0)]
"""Bytes: a whole number, or a text with a binary unit such as "64MiB"."""


class MemorySection(Section):
    """What backward keeps and what it computes again, and what a rank may hold."""

    recompute: Literal["none", "selective", "full"] = "none"
    """`none`: keep all; `selective`: compute attention weights again; `full`: keep only the inputs
    of blocks and run each block's forward again in backward."""
    recompute_every: PositiveInt = 1
    """Blocks that share one kept input (full): only every k-th block's input is kept, and k blocks
    are replayed together. Fewer kept inputs, but more at the peak when blocks are few."""
    budget_bytes: ByteCount = 0
    """What a rank may hold at one time, bytes or a text such as "64MiB"; 0 means no limit. What
    counts is what the ledger counts: interpreter and libraries come on top. It holds from building
    the state to the last step and evaluation, not while data is loaded and weights are gathered."""
    static_check: bool = True
    """Refuse a plan that would pass the budget before it starts; off leaves it to the wall."""
    measure: Literal["auto", "hook", "tracemalloc", "off"] = "auto"
    """How NumPy's memory is measured beside the ledger: by an allocator `hook` (exact; also makes
    the budget a wall for every allocation), by Python's `tracemalloc` (slow, first steps only), or
    not; `auto`: by the hook where it is built."""


class ComputeSection(Section):
    """Who computes the element-wise work, and whether at all."""

    mode: Literal["real", "emulated"] = "real"
    """`emulated`: forward and backward ops sleep for their floating-point operations at
    cluster.flops_per_s instead of computing; memory and messages are as in the real mode, numbers
    are zeros."""
    kernels: Literal["auto", "numpy", "numba"] = "auto"
    """`numba`: fused kernels of the extra `fast`; `numpy`: the reference; `auto`: Numba if it is
    installed."""


class OptimizerSection(Section):
    """The update rule."""

    kind: Literal["sgd", "adamw"] = "adamw"
    """`sgd` (with momentum) or `adamw` (decoupled weight decay, bias-corrected)."""
    lr: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-3
    """Learning rate after warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which lr rises linearly from lr/warmup_steps; 0 means off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of lr after warm-up; linear and cosine fall to lr * min_lr_ratio at the last step."""
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Final lr as a share of lr (linear and cosine)."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Momentum of sgd; 0 means off."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of adamw's first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """Decay of adamw's second moment."""
    eps: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1e-8
    """Added to adamw's denominator."""
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """Decoupled decay (adamw) or L2 term (sgd), on tensors with two or more dims."""
    clip_norm: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """Largest global gradient norm; 0 means off."""


class TrainSection(Section):
    """How long, and in what pieces."""

    steps: PositiveInt = 100
    """Batches to train on; one whose gradients are not finite may be skipped, without an update."""
    global_batch: PositiveInt = 256
    """Rows of one update, over all ranks and microbatches; the layout never changes it."""
    num_microbatches: PositiveInt = 1
    """Pieces that each rank cuts its rows into (gradient accumulation)."""
    warmup_report_steps: NonNegativeInt = 5
    """First steps that throughput and latency figures leave out."""
    log_every: NonNegativeInt = 0
    """Print a line every this many steps; 0 means about 20 lines a run. The file gets them all."""
    eval_every: NonNegativeInt = 0
    """Held-out evaluation every this many steps; 0 means only after the last."""
    eval_rows: NonNegativeInt = 0
    """Held-out rows to evaluate, spread evenly; 0 means all."""


class ParallelSection(Section):
    """The mesh and what overlaps."""

    dp: NonNegativeInt = 0
    """Data-parallel degree; 0 means the number of ranks."""
    bucket_bytes: PositiveInt = 1 << 20
    """A gradient bucket is closed when the next block would take it past this size, bytes. With
    stages every block is a bucket of its own."""
    overlap: bool = True
    """Advance gradient rings between backward ops; off gives the same bits."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the ranks of axis dp share out instead of each keeping all: nothing; the optimizer's
    state (1); gradients, too (2); parameters, too (3: gathered block by block when needed)."""
    pp: PositiveInt = 1
    """Stages of the pipeline: each rank of axis pp holds only its blocks."""
    schedule: str = "1f1b"
    """Order of forwards and backwards over stages: naive, gpipe, 1f1b, interleaved, zb-h1, or one
    of an extension."""
    chunks: PositiveInt = 1
    """Stages that each rank of axis pp holds, far apart in the model (schedule interleaved).
    Without `split`, pp * chunks must divide the blocks between embedding and head."""
    split: tuple[PositiveInt, ...] = ()
    """Blocks of each stage, in forward order, embedding and head counted; empty: balanced by
    floating-point operations and weights."""
    prefetch: bool = False
    """Gather the next block's parameters while a block runs: more memory, less waiting (zero 3)."""


class CompressionSection(Section):
    """What crosses the boundaries between stages."""

    activations: str = "none"
    """Codec of activations: none, fp16, bf16, int2 to int8 with one scale a tensor, int2-token to
    int8-token with one a token, or one of an extension. Training goes straight through: the next
    stage works with the decoded values, and their gradient is taken for that of the encoded."""
    grads: str = "none"
    """Codec of the gradients that come back."""
    error_feedback: bool = False
    """Add what a gradient lost in its codec to the next one over the same boundary."""
    bottleneck: NonNegativeInt = 0
    """Values per token that cross a boundary, between two learned linear maps; 0 means off."""
    start: Literal["pca", "random", "layernorm"] = "pca"
    """First values of these maps: principal components of the activations, measured before the
    first step; random directions; principal components behind a layer norm."""
    calibration_tokens: PositiveInt = 4096
    """Tokens of training data that the principal components are measured on, at least."""


class ClusterSection(Section):
    """The machine that is emulated, or predicted."""

    flops_per_s: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e9
    """Floating-point operations a rank makes per second (compute.mode emulated)."""
    latency_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """Emulated links: seconds from a message's last byte leaving to its arrival; 0: as real."""
    bytes_per_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """Emulated links: rate of each link between two ranks; 0 means as fast as it goes."""


class CommSection(Section):
    """Messages."""

    algorithm: str = "auto"
    """All-reduce algorithm: auto (by size, see mpisim.layouts.steps), ring, recursive_doubling,
    halving_doubling, or one of an extension."""
    synchronous_sends: bool = False
    """Finish a send only when its receive has started (rendezvous); for tests."""
    timeout_s: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 60.0
    """Longest wait for one message, seconds; then the rank reports the peer and ends the job."""


class TraceSection(Section):
    """What is recorded."""

    enabled: bool = True
    """Write one trace file per rank."""


class RunConfig(Section):
    """A whole run. `mpisim config FILE` prints it with every default filled in."""

    version: Literal[1] = SCHEMA_VERSION
    """Version of this schema."""
    run: RunSection = RunSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    precision: PrecisionSection = PrecisionSection()
    memory: MemorySection = MemorySection()
    compute: ComputeSection = ComputeSection()
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()
    parallel: ParallelSection = ParallelSection()
    compression: CompressionSection = CompressionSection()
    cluster: ClusterSection = ClusterSection()
    comm: CommSection = CommSection()
    trace: TraceSection = TraceSection()

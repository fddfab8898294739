"""What a layer or a block costs, as numbers: shapes, flops, bytes. No arrays.

`nn` fills these in, `plan` partitions by them, `cost` prices them, `memory` adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Keep = Literal["all", "selective"]
"""What forward keeps: everything that backward reads, or all but what is cheap to compute again."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the working memory of a layer depends on beside shapes and dtype."""

    kernels: Literal["numpy", "numba"] = "numpy"
    """The kernel set in use."""
    starts: bool = False
    """Rows hold several documents: attention gets `starts`."""
    dropout: bool = True
    """Dropout layers draw masks (training); without, they pass their input on."""


class Tape:
    """Counts the bytes of arrays that come and go, to find the most that are alive at one time.

    A layer writes down on it, call by call, the arrays that its code makes and frees. No array is
    made: it is arithmetic on sizes.

    Examples
    --------
    >>> tape = Tape()
    >>> tape.new(100)
    >>> tape.call(peak=50, left=20)
    >>> tape.free(100)
    >>> tape.new(10)
    >>> tape.live, tape.peak
    (30, 150)
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0

    def new(self, *nbytes: int) -> None:
        """Make arrays of these sizes, all alive from here on."""
        self.live += sum(nbytes)
        self.peak = max(self.peak, self.live)

    def free(self, *nbytes: int) -> None:
        """Free arrays of these sizes."""
        self.live -= sum(nbytes)

    def call(self, peak: int, left: int = 0) -> None:
        """Call something that needs up to `peak` bytes at one time and leaves `left` of them."""
        self.peak = max(self.peak, self.live + peak)
        self.live += left


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One named parameter tensor."""

    name: str
    """Full name, unique in the model, such as ``block1.linear.weight``."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        total = 1
        for extent in self.shape:
            total *= extent
        return total


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Costs of one layer for one microbatch shape.

    A layer may keep its input, its output and arrays of its own. Input and output are kept as
    flags, because two neighbours that keep the same boundary tensor hold one array, not two.
    """

    params: tuple[ParamSpec, ...] = ()
    forward_flops: int = 0
    """Floating-point operations of one forward call (a multiply-add counts 2)."""
    backward_flops: int = 0
    """Floating-point operations of input and weight backward together."""
    output_shape: tuple[int, ...] = ()
    input_bytes: int = 0
    output_bytes: int = 0
    saves_input: bool = False
    saves_output: bool = False
    extra_saved_bytes: int = 0
    """`nbytes` of saved arrays that are neither the input nor the output (targets excluded:
    they belong to category "data")."""
    kept_bytes: int = 0
    """`nbytes` that backward_input newly allocates and keeps for backward_weight."""
    interior_bytes: int = 0
    """Share of `extra_saved_bytes` that is freed when forward keeps selectively."""
    check_bytes: int = 0
    """`nbytes` of the values that are kept instead, as a check of what is computed again."""
    interior_flops: int = 0
    """Floating-point operations of computing the interior again."""
    forward_peak_bytes: int = 0
    """Most bytes of new arrays alive at one time while forward runs: its results, what it saves
    and its working arrays. At the end the output and `extra_saved_bytes` are left."""
    input_peak_bytes: int = 0
    """The same of backward_input; at the end the input's gradient and `kept_bytes` are left."""
    weight_peak_bytes: int = 0
    """The same of backward_weight; at the end the gradients, `grad_bytes`, are left."""
    grad_bytes: int = 0
    """`nbytes` of the gradients that backward_weight newly allocates (not those it was handed in
    `kept`)."""
    trim_peak_bytes: int = 0
    """The same of trimming what forward saved; at the end `check_bytes` are left of it."""
    restore_peak_bytes: int = 0
    """The same of restoring what was trimmed; at the end `interior_bytes` are left."""
    passes_through: bool = False
    """The output is the input itself, and its gradient that of the output: nothing is made."""

    @property
    def saved_bytes(self) -> int:
        """Sum of `nbytes` over the `saved` tuple of one forward call."""
        return (
            self.input_bytes * self.saves_input
            + self.output_bytes * self.saves_output
            + self.extra_saved_bytes
        )

    def extra_saved_bytes_for(self, keep: Keep) -> int:
        """Return what `extra_saved_bytes` is when forward keeps `keep`."""
        trimmed = self.check_bytes - self.interior_bytes
        return self.extra_saved_bytes + (trimmed if keep == "selective" else 0)


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """Costs of one block (the smallest unit of bucketing) for one microbatch shape."""

    name: str
    layers: tuple[LayerSpec, ...] = field(default=())
    borrows: tuple[str, ...] = ()
    """Full names of parameters that the block reads and another block owns."""

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """All parameters that the block owns, in layer order."""
        return tuple(param for layer in self.layers for param in layer.params)

    @property
    def forward_flops(self) -> int:
        """Sum over layers."""
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def backward_flops(self) -> int:
        """Sum over layers."""
        return sum(layer.backward_flops for layer in self.layers)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the block's output."""
        return self.layers[-1].output_shape

    def saved_boundaries(self) -> tuple[int, ...]:
        """Return which boundary tensors forward keeps: 0 is the block's input, i layer i's output.

        A boundary that two neighbouring layers keep appears once.
        """
        kept = set()
        for index, layer in enumerate(self.layers):
            if layer.saves_input:
                kept.add(index)
            if layer.saves_output:
                kept.add(index + 1)
        return tuple(sorted(kept))

    def boundary_bytes(self, boundary: int) -> int:
        """Return the bytes of boundary tensor `boundary` (numbered as in `saved_boundaries`)."""
        if boundary == 0:
            return self.layers[0].input_bytes
        return self.layers[boundary - 1].output_bytes

    @property
    def extra_saved_bytes(self) -> int:
        """Saved bytes that are no boundary tensor, summed over layers."""
        return sum(layer.extra_saved_bytes for layer in self.layers)

    def extra_saved_bytes_for(self, keep: Keep) -> int:
        """Return what `extra_saved_bytes` is when forward keeps `keep`.

        With `keep` "selective" the saved boundaries stay as they are.
        """
        return sum(layer.extra_saved_bytes_for(keep) for layer in self.layers)

    @property
    def interior_bytes(self) -> int:
        """Saved bytes that are freed when forward keeps selectively, summed over layers."""
        return sum(layer.interior_bytes for layer in self.layers)

    @property
    def check_bytes(self) -> int:
        """Saved bytes that are kept in their place, summed over layers."""
        return sum(layer.check_bytes for layer in self.layers)

    @property
    def interior_flops(self) -> int:
        """Floating-point operations of computing all interiors of the block again."""
        return sum(layer.interior_flops for layer in self.layers)

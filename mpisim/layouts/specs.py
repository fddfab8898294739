"""What a layer or a block costs, as numbers: shapes, flops, bytes. No arrays.

`nn` fills these in, `plan` partitions by them, `cost` prices them, `memory` adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Keep = Literal["all", "selective", "nothing"]
"""What forward keeps: everything that backward reads, or all but what is cheap to compute again.

"nothing" is for evaluation: what layers save is freed as soon as they have run."""


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
    weight_flops: int = 0
    """Share of `backward_flops` that backward_weight computes. What one pass computes for both
    halves counts with the input, and the weight half has nothing left to do."""
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
    keeps_output_grad: bool = False
    """backward_input keeps the output's gradient by reference for backward_weight."""
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
    def input_flops(self) -> int:
        """Share of `backward_flops` that backward_input computes."""
        return self.backward_flops - self.weight_flops

    @property
    def result_bytes(self) -> int:
        """`nbytes` of the output as a new array: none if it is the input, or a summed loss."""
        return 0 if self.passes_through or not self.output_shape else self.output_bytes

    @property
    def input_grad_bytes(self) -> int:
        """`nbytes` of the input's gradient as a new array: none if backward_input makes nothing."""
        return self.input_bytes if self.input_peak_bytes else 0

    @property
    def handed_on_bytes(self) -> int:
        """Share of `kept_bytes` that is the gradient itself, so backward_weight makes nothing."""
        return 0 if self.grad_bytes else self.kept_bytes

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
        if keep == "nothing":
            return 0
        trimmed = self.check_bytes - self.interior_bytes
        return self.extra_saved_bytes + (trimmed if keep == "selective" else 0)


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """Costs of one block (the smallest unit of bucketing) for one microbatch shape."""

    name: str
    layers: tuple[LayerSpec, ...] = field(default=())
    borrows: tuple[str, ...] = ()
    """Full names of parameters that the block reads and another block owns."""
    skips: tuple[tuple[int, int], ...] = ()
    """Residual connections: (source, end) adds boundary source to boundary end."""
    add_bytes: tuple[int, ...] = ()
    """Working bytes of each addition, beside its result."""

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
    def input_flops(self) -> int:
        """Share of `backward_flops` that backward_input computes, summed over layers."""
        return sum(layer.input_flops for layer in self.layers)

    @property
    def weight_flops(self) -> int:
        """Share of `backward_flops` that backward_weight computes, summed over layers."""
        return sum(layer.weight_flops for layer in self.layers)

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

    def forward_peak(self, keep: Keep = "all") -> int:
        """Return the most bytes of new arrays alive at one time during the block's forward.

        Parameters
        ----------
        keep : {"all", "selective", "nothing"}
            What forward keeps.

        Returns
        -------
        int
            Beyond what is alive at the call: parameters, and the input, which the caller holds.
            What is left at the end counts: the output and what is saved.

        Notes
        -----
        Walks `nn.blocks.Block.forward` with a tape. An array belongs to the first boundary that it
        is the tensor of: a layer that passes its input on makes none.
        """
        tape = Tape()
        saved = self.saved_boundaries() if keep != "nothing" else ()
        owner = [0]
        alive: dict[int, int] = {}
        for index, layer in enumerate(self.layers):
            end = index + 1
            tape.call(layer.forward_peak_bytes, layer.result_bytes + layer.extra_saved_bytes)
            owner.append(owner[index] if layer.passes_through else end)
            if not layer.passes_through:
                alive[end] = layer.result_bytes
            if keep == "selective" and layer.interior_bytes:
                tape.call(layer.trim_peak_bytes, layer.check_bytes)
                tape.free(layer.interior_bytes)
            if keep == "nothing":
                tape.free(layer.extra_saved_bytes)
            for (_, skip_end), add_bytes in zip(self.skips, self.add_bytes, strict=True):
                if skip_end == end:
                    made = 0 if owner[end] == end else layer.output_bytes
                    tape.call(made + add_bytes, made)
                    owner[end] = end
                    alive.setdefault(end, made)
            needed = {owner[end], *(owner[boundary] for boundary in saved if boundary <= end)}
            needed |= {owner[source] for source, last in self.skips if source <= end < last}
            for boundary in alive.keys() - needed:
                tape.free(alive.pop(boundary))
        return tape.peak

    @property
    def grad_bytes(self) -> int:
        """`nbytes` of the parameters' gradients as backward returns them."""
        return sum(layer.grad_bytes + layer.handed_on_bytes for layer in self.layers)

    def restore_peak(self) -> int:
        """Return the most bytes of new arrays alive at one time during the block's restore.

        What forward saved is alive at the call. At the end `interior_bytes` are left.
        """
        tape = Tape()
        for layer in self.layers:
            tape.call(layer.restore_peak_bytes, layer.interior_bytes)
        return tape.peak

    def backward_peak(self) -> int:
        """Return the most bytes of new arrays alive at one time during the block's backward.

        Returns
        -------
        int
            Beyond what is alive at the call: parameters, what was saved and the output's gradient,
            all of which the caller holds until the end. What is left then counts: the input's
            gradient and those of the parameters.

        Notes
        -----
        Walks `nn.blocks.Block.backward` with a tape; a gradient is called by the boundary that it
        was made for.
        """
        return self._walk_back(split=False).peak

    def input_peak(self) -> int:
        """Return the most bytes of new arrays alive at one time during the block's backward_input.

        Beyond what is alive at the call, as for `backward_peak`. What is left at the end counts:
        the input's gradient and what is kept for backward_weight.
        """
        return self._walk_back(split=True).peak

    def weight_peak(self) -> int:
        """Return the most bytes of new arrays alive at one time during the block's backward_weight.

        What was saved and what backward_input kept is alive at the call, and until the end. What is
        left then counts, `new_grad_bytes`; gradients that are arrays of `kept` do not.
        """
        tape = Tape()
        for layer in reversed(self.layers):
            tape.call(layer.weight_peak_bytes, layer.grad_bytes)
        return tape.peak

    @property
    def new_grad_bytes(self) -> int:
        """Share of `grad_bytes` that backward_weight newly allocates."""
        return sum(layer.grad_bytes for layer in self.layers)

    @property
    def kept_extra_bytes(self) -> int:
        """Bytes that backward_input keeps for backward_weight beside gradients of boundaries."""
        return sum(layer.kept_bytes for layer in self.layers)

    def kept_grad_boundaries(self) -> tuple[int, ...]:
        """Return the boundaries whose gradient backward_input keeps for backward_weight.

        Numbered as in `saved_boundaries`: 0 is the gradient that backward_input returns, the number
        of layers the one that it gets. Each array appears once, by the name that
        `grad_owners` gives it; its size is `boundary_bytes` of that boundary.
        """
        owners = self.grad_owners()
        return tuple(
            sorted(
                {
                    owners[index + 1]
                    for index, layer in enumerate(self.layers)
                    if layer.keeps_output_grad
                }
            )
        )

    def grad_owners(self) -> tuple[int, ...]:
        """Return for each boundary the one whose name its gradient's array goes by.

        A layer that passes its input on passes the gradient on, too: both of its boundaries have
        one array, unless a residual connection starts between. It is named after the block's output
        if it is that one's, else after the block's input if it is that one's, else after the last
        boundary that it belongs to.
        """
        num_layers = len(self.layers)
        sources = {source for source, _ in self.skips}
        owners = [num_layers] * (num_layers + 1)
        for index in reversed(range(num_layers)):
            same = self.layers[index].passes_through and index not in sources
            owners[index] = owners[index + 1] if same else index
        result = owners[0]
        return tuple(0 if own == result != num_layers else own for own in owners)

    def _walk_back(self, *, split: bool) -> Tape:
        """Walk `nn.blocks.Block.backward`, or its backward_input if `split`, with a tape."""
        tape = Tape()
        num_layers = len(self.layers)
        current = num_layers
        alive = {num_layers: 0}
        branches: dict[int, list[tuple[int, int]]] = {}
        kept: set[int] = set()

        def keep_only(named: set[int]) -> None:
            needed = named | kept | {grad for later in branches.values() for grad, _ in later}
            for boundary in alive.keys() - needed:
                tape.free(alive.pop(boundary))

        for index in reversed(range(num_layers)):
            layer = self.layers[index]
            for (source, end), add_bytes in zip(self.skips, self.add_bytes, strict=True):
                if end == index + 1:
                    branches.setdefault(source, []).append((current, add_bytes))
            made = 0 if layer.passes_through else layer.input_grad_bytes
            tape.call(layer.input_peak_bytes, made + layer.kept_bytes)
            if not split:
                tape.call(layer.weight_peak_bytes, layer.grad_bytes)
                tape.free(layer.kept_bytes - layer.handed_on_bytes)
            elif layer.keeps_output_grad:
                kept.add(current)
            new = current if layer.passes_through else index
            alive.setdefault(new, made)
            # The old gradient lives on as long as a branch or the caller has it.
            added = branches.pop(index, [])
            while added:
                _, add_bytes = added.pop(0)
                made = 0 if new == index else layer.input_bytes
                tape.call(made + add_bytes, made)
                new = index
                alive.setdefault(new, made)
                keep_only({current, new, *(grad for grad, _ in added)})
            current = new
            keep_only({current})
        return tape

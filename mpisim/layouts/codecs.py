"""Boundary codecs as numbers: names, codes in the header, bytes of a payload. No arrays.

`comm.codecs` has the arithmetic. A codec that a user adds has its spec here beside the others, so
that plans, prices and forecasts know its bytes, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from mpisim.errors import ConfigError

SCALE_BYTES = 4
"""A scale is a float32, whatever the tensor's dtype."""
MIN_BITS, MAX_BITS = 2, 8
FIRST_USER_CODE, LAST_USER_CODE = 128, 255
"""Header codes of codecs that users add; those below are the package's."""

_WIDE = ("float32", "float64")
_FLOATS = ("float16", "bfloat16", *_WIDE)


@dataclass(frozen=True)
class CodecSpec:
    """What a codec is called and how many bytes it makes of a tensor.

    Notes
    -----
    ========  ===========================================  ===================================
    kind      payload                                      of
    ========  ===========================================  ===================================
    raw       the tensor's bytes                           any dtype
    cast      one 16-bit number per element                float32, float64
    quantize  scales, then codes of `bits` bits, packed    float16, bfloat16, float32, float64
    custom    whatever a user's functions write            `dtypes`
    ========  ===========================================  ===================================
    """

    name: str
    code: int
    """Stands for the name in a frame's header, 0..255; users' own from `FIRST_USER_CODE` on."""
    kind: Literal["raw", "cast", "quantize", "custom"]
    bits: int = 0
    """Bits of one code; 0 means that the tensor's dtype (raw) or `size` (custom) says."""
    per_token: bool = False
    """A scale for each row of ``x.reshape(-1, x.shape[-1])`` and not one for the tensor."""
    dtypes: tuple[str, ...] = ()
    """Names of the dtypes it takes; empty means all."""
    size: Callable[[tuple[int, ...], int], int] | None = None
    """``size(shape, itemsize)``: bytes of the payload. For kind custom only."""


def _built_in() -> dict[str, CodecSpec]:
    specs = [
        CodecSpec("none", 0, "raw"),
        CodecSpec("fp16", 1, "cast", 16, dtypes=_WIDE),
        CodecSpec("bf16", 2, "cast", 16, dtypes=_WIDE),
    ]
    for bits in range(MIN_BITS, MAX_BITS + 1):
        specs.append(CodecSpec(f"int{bits}", 16 + bits, "quantize", bits, dtypes=_FLOATS))
        specs.append(
            CodecSpec(f"int{bits}-token", 32 + bits, "quantize", bits, True, dtypes=_FLOATS)
        )
    return {spec.name: spec for spec in specs}


_SPECS = _built_in()


def codec_names() -> tuple[str, ...]:
    """Return the names of all codecs, those of users last."""
    return tuple(_SPECS)


def codec_spec(name: str) -> CodecSpec:
    """Return the codec of a name.

    Raises
    ------
    ValueError
        No codec has it.

    Examples
    --------
    >>> codec_spec("int4-token").bits, codec_spec("bf16").kind
    (4, 'cast')
    """
    try:
        return _SPECS[name]
    except (KeyError, TypeError):
        raise ValueError(
            f"codec must be one of {', '.join(_SPECS)}; got {name!r}. Choose one of them, or add "
            f"yours with mpisim.comm.codecs.register_codec before."
        ) from None


def codec_of_code(code: int) -> CodecSpec | None:
    """Return the codec that a header's code stands for, None if it stands for none."""
    return next((spec for spec in _SPECS.values() if spec.code == code), None)


def add_codec_spec(spec: CodecSpec) -> None:
    """Make a user's codec known by name; `comm.codecs.register_codec` calls it.

    A name that was registered before means this one from now on.

    Raises
    ------
    ConfigError
        It is not of kind custom, has no `size`, its name is built in, or its code taken or out
        of range.
    """
    if spec.kind != "custom" or not callable(spec.size):
        raise ConfigError(
            f"a codec of your own must be of kind 'custom' and have a size function; got kind "
            f"{spec.kind!r} with size {spec.size!r} for {spec.name!r}. Set both."
        )
    known = _SPECS.get(spec.name)
    if not spec.name or (known is not None and known.kind != "custom"):
        raise ConfigError(
            f"codec name must be new; got {spec.name!r}, beside {', '.join(_SPECS)}. Choose "
            f"another."
        )
    holder = codec_of_code(spec.code)
    is_free = holder is None or holder is known
    if not FIRST_USER_CODE <= spec.code <= LAST_USER_CODE or not is_free:
        raise ConfigError(
            f"code of codec {spec.name!r} must be in {FIRST_USER_CODE}..{LAST_USER_CODE} and not "
            f"in use; got {spec.code}. Choose another, the same on every rank."
        )
    _SPECS[spec.name] = spec


def check_codec(spec: CodecSpec, dtype: str) -> None:
    """Check that a codec and the dtype of the tensors go together.

    Parameters
    ----------
    spec : CodecSpec
    dtype : str
        Name of the dtype of activations and their gradients, such as ``bfloat16``.

    Raises
    ------
    ConfigError
        The codec does not take this dtype. A cast to 16 bits saves nothing on 16-bit tensors:
        it would only lose range or precision.
    """
    if not spec.dtypes or dtype in spec.dtypes:
        return
    rule = f"take {dtype} tensors"
    if spec.kind == "cast" and dtype in _FLOATS:
        rule = f"make {dtype} tensors smaller"
    raise ConfigError(
        f"codec must {rule}; got {spec.name!r}, which is for {', '.join(spec.dtypes)}. "
        f"Use 'none', or compress further with 'int8' or 'int8-token'."
        if dtype in _FLOATS
        else f"codec must {rule}; got {spec.name!r}, which is for {', '.join(spec.dtypes)}. "
        f"Use 'none'."
    )


def code_bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` codes of `bits` bits, packed without gaps.

    Examples
    --------
    >>> [code_bytes(5, bits) for bits in (2, 3, 4, 8)], code_bytes(0, 4)
    ([2, 2, 3, 5], 0)
    """
    return (count * bits + 7) // 8


def num_scales(spec: CodecSpec, shape: Sequence[int]) -> int:
    """Return how many scales a tensor has.

    Returns
    -------
    int
        Without `per_token` 1, even of a tensor without elements. With it one per row; none if
        there are no elements, one of a tensor without dimensions.
    """
    if spec.kind != "quantize":
        return 0
    if not spec.per_token:
        return 1
    return math.prod(shape[:-1]) if math.prod(shape) else 0


def payload_bytes(spec: CodecSpec, shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes that a codec makes of one tensor.

    Parameters
    ----------
    spec : CodecSpec
    shape : sequence of int
        Of the tensor.
    itemsize : int
        Bytes of one of its elements.

    Notes
    -----
    n codes of b bits take ceil(n * b / 8) bytes, over row ends without a gap, and each scale 4.

    Examples
    --------
    >>> payload_bytes(codec_spec("int3"), (5,), 4), payload_bytes(codec_spec("fp16"), (5,), 4)
    (6, 10)
    >>> payload_bytes(codec_spec("int4-token"), (3, 5), 2)
    20
    """
    if spec.kind == "custom":
        assert spec.size is not None  # add_codec_spec looks
        try:
            size = spec.size(tuple(shape), itemsize)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            size = f"{type(error).__name__}: {error}"
        if isinstance(size, Integral) and not isinstance(size, bool):
            size = int(size)
        if type(size) is not int or not 0 <= size < 1 << 40:
            raise ConfigError(
                f"size function of codec {spec.name!r} must return a number of bytes from 0 up; "
                f"got {size} for shape {tuple(shape)}. Correct it."
            )
        return size
    bits = 8 * itemsize if spec.kind == "raw" else spec.bits
    return num_scales(spec, shape) * SCALE_BYTES + code_bytes(math.prod(shape), bits)

"""The loops behind the Numba kernel set; allocation and checks of shapes are in `kernels_numba`.

Everything that is compiled is in this one file: Numba's disk cache looks at the time stamp of the
file that holds a function, not at the files of the functions it calls.

Rules of the arithmetic. Products may be fused with sums ("contract"); where a loop adds up,
additions may change order ("reassoc"), always in the same way for the same length. The flags that
let the compiler assume finite numbers or estimate reciprocals are not used: with all of them, a
vector loop makes nan of 1 / inf, and other bits than the loop for its last elements. In Numba a
Python number would turn float32 work into float64, so constants are made with the array's type.

Shape suffixes as in `kernels`; R rows of attention weights = B * H * T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, overload

_PLAIN: frozenset[str] = frozenset()
_FUSED = frozenset({"contract"})
_SUMS = frozenset({"contract", "reassoc", "nsz"})


def _jit(flags: frozenset[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile at the first call with each dtype; keep the result on disk where that is possible."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": set(flags)}

    def decorate(loop: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(cache=True, **options)(loop)
        except RuntimeError:
            # No folder for the cache can be written: every process compiles for itself.
            return numba.njit(**options)(loop)

    return decorate


_SAME_BITS = {
    types.float32: types.int32,
    types.int32: types.float32,
    types.uint32: types.float32,
    types.float64: types.int64,
    types.int64: types.float64,
}


@intrinsic
def _same_bits(typing_context, number):
    """Read the bits of a float as an integer of its size, or the other way round."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return _SAME_BITS[number](number), generate


def _exp(x):
    """Return e^x; compiled code only, see the overload."""
    raise NotImplementedError


def _ordered(x):
    """Return an integer that orders floats, and the float of such an integer; compiled only.

    A maximum of floats does not vectorize, since nan forbids to change its order; one of integers
    does. A nan comes out as the largest or smallest of all.
    """
    raise NotImplementedError


_f4, _f8 = np.float32, np.float64
# 1.5 * 2^23 (2^52): a sum with it is rounded to an integer, which its low bits then hold.
_ROUND_32, _ROUND_64 = _f4(12582912.0), _f8(6755399441055744.0)
_LOG2E_32, _LOG2E_64 = _f4(math.log2(math.e)), _f8(math.log2(math.e))
# ln 2 in two parts; the first has zeros at its end, so its product with the integer is exact.
_LN2_HIGH_32, _LN2_LOW_32 = _f4(0.693359375), _f4(-2.12194440e-4)
_LN2_HIGH_64, _LN2_LOW_64 = _f8(6.93145751953125e-1), _f8(1.42860682030941723212e-6)
_POLY_32 = tuple(
    _f4(c)
    for c in (1.98756915e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1)
)
_POLY_64 = tuple(_f8(1.0 / math.factorial(k)) for k in range(13, 2, -1))
_HALF_32, _HALF_64, _ONE_32, _ONE_64 = _f4(0.5), _f8(0.5), _f4(1.0), _f8(1.0)
_INF_32, _INF_64, _ZERO_32, _ZERO_64 = _f4(math.inf), _f8(math.inf), _f4(0.0), _f8(0.0)
_LEAST_32, _MOST_32 = _f4(-86.9), _f4(88.8)
_LEAST_64, _MOST_64 = _f8(-708.0), _f8(709.9)
_SHIFT_32, _BIAS_32 = np.int32(23), np.int32(126 << 23)
_SHIFT_64, _BIAS_64 = np.int64(52), np.int64(1022 << 52)


@overload(_exp, jit_options={"fastmath": set(_FUSED), "error_model": "numpy"})
def _exp_overload(x):
    """Compute ``2^n e^r`` with n = round(x / ln 2), without branches or calls, so it vectorizes.

    Within 2 ulp. Above the range of the dtype: inf. Below 1.9e-38 (3.4e-308): exactly 0, so that
    no subnormal numbers slow down what follows. nan stays nan.
    """
    if x == types.float32:

        def exp_32(x):
            rounded = x * _LOG2E_32 + _ROUND_32
            n = rounded - _ROUND_32
            r = x - n * _LN2_HIGH_32
            r = r - n * _LN2_LOW_32
            p = _POLY_32[0]
            p = p * r + _POLY_32[1]
            p = p * r + _POLY_32[2]
            p = p * r + _POLY_32[3]
            p = p * r + _POLY_32[4]
            p = p * r + _HALF_32
            p = p * (r * r) + r + _ONE_32
            # 2^(n-1), since 2^128 is not a float32; doubled afterwards.
            half_scale = np.int32((_same_bits(rounded) << _SHIFT_32) + _BIAS_32)
            y = p * _same_bits(half_scale)
            y = y + y
            y = _ZERO_32 if x < _LEAST_32 else y
            return _INF_32 if x > _MOST_32 else y

        return exp_32
    if x == types.float64:

        def exp_64(x):
            rounded = x * _LOG2E_64 + _ROUND_64
            n = rounded - _ROUND_64
            r = x - n * _LN2_HIGH_64
            r = r - n * _LN2_LOW_64
            p = _POLY_64[0]
            p = p * r + _POLY_64[1]
            p = p * r + _POLY_64[2]
            p = p * r + _POLY_64[3]
            p = p * r + _POLY_64[4]
            p = p * r + _POLY_64[5]
            p = p * r + _POLY_64[6]
            p = p * r + _POLY_64[7]
            p = p * r + _POLY_64[8]
            p = p * r + _POLY_64[9]
            p = p * r + _POLY_64[10]
            p = p * r + _HALF_64
            p = p * (r * r) + r + _ONE_64
            half_scale = np.int64((_same_bits(rounded) << _SHIFT_64) + _BIAS_64)
            y = p * _same_bits(half_scale)
            y = y + y
            y = _ZERO_64 if x < _LEAST_64 else y
            return _INF_64 if x > _MOST_64 else y

        return exp_64
    return None


_REST_32, _REST_64 = np.int32(0x7FFFFFFF), np.int64(0x7FFFFFFFFFFFFFFF)
_SIGN_32, _SIGN_64 = np.int32(31), np.int64(63)


@overload(_ordered, jit_options={"error_model": "numpy"})
def _ordered_overload(x):
    """Flip all bits but the sign of a negative number; done twice it gives the number back."""
    if x == types.float32:
        return lambda x: np.int32(_same_bits(x) ^ ((_same_bits(x) >> _SIGN_32) & _REST_32))
    if x == types.int32:
        return lambda x: _same_bits(np.int32(x ^ ((x >> _SIGN_32) & _REST_32)))
    if x == types.float64:
        return lambda x: _same_bits(x) ^ ((_same_bits(x) >> _SIGN_64) & _REST_64)
    if x == types.int64:
        return lambda x: _same_bits(x ^ ((x >> _SIGN_64) & _REST_64))
    return None


@_jit(_SUMS)
def rms_norm(x_ND, weight_D, eps, y_ND, rstd_N):
    """Write y and rstd."""
    real = x_ND.dtype.type
    num_rows, width = x_ND.shape
    for i in range(num_rows):
        total = real(0)
        for j in range(width):
            total += x_ND[i, j] * x_ND[i, j]
        rstd = real(1) / np.sqrt(total / real(width) + eps)
        rstd_N[i] = rstd
        for j in range(width):
            y_ND[i, j] = x_ND[i, j] * rstd * weight_D[j]


@_jit(_SUMS)
def rms_norm_backward(dy_ND, x_ND, weight_D, rstd_N, dx_ND, dweight_D):
    """Write dx and dweight."""
    real = x_ND.dtype.type
    num_rows, width = x_ND.shape
    dweight_D[:] = real(0)
    for i in range(num_rows):
        rstd = rstd_N[i]
        total = real(0)
        for j in range(width):
            product = dy_ND[i, j] * x_ND[i, j]
            total += product * weight_D[j]
            dweight_D[j] += product * rstd
        pull = rstd * rstd * total / real(width)
        for j in range(width):
            dx_ND[i, j] = rstd * (dy_ND[i, j] * weight_D[j] - x_ND[i, j] * pull)


@_jit(_FUSED)
def rotary_split(qkv_BTCSJ, cos_PJ, sin_PJ, positions_BT, scale, q_BHTSJ, k_BGTSJ, v_BGTSJ):
    """Write q, k and v; an empty `positions_BT` means columns.

    Heads are cut in two (S = 2, J = K / 2), so that the inner loops have plain indices.
    """
    batch, heads, time, _, half = q_BHTSJ.shape
    kv_heads = k_BGTSJ.shape[1]
    for b in range(batch):
        for t in range(time):
            p = positions_BT[b, t] if positions_BT.size else t
            for h in range(heads):
                for j in range(half):
                    x1, x2 = qkv_BTCSJ[b, t, h, 0, j], qkv_BTCSJ[b, t, h, 1, j]
                    cos, sin = cos_PJ[p, j] * scale, sin_PJ[p, j] * scale
                    q_BHTSJ[b, h, t, 0, j] = x1 * cos - x2 * sin
                    q_BHTSJ[b, h, t, 1, j] = x2 * cos + x1 * sin
            for h in range(kv_heads):
                for j in range(half):
                    x1, x2 = qkv_BTCSJ[b, t, heads + h, 0, j], qkv_BTCSJ[b, t, heads + h, 1, j]
                    cos, sin = cos_PJ[p, j], sin_PJ[p, j]
                    k_BGTSJ[b, h, t, 0, j] = x1 * cos - x2 * sin
                    k_BGTSJ[b, h, t, 1, j] = x2 * cos + x1 * sin
                for part in range(2):
                    for j in range(half):
                        v_BGTSJ[b, h, t, part, j] = qkv_BTCSJ[b, t, heads + kv_heads + h, part, j]


@_jit(_FUSED)
def rotary_merge(dq_BHTSJ, dk_BGTSJ, dv_BGTSJ, cos_PJ, sin_PJ, positions_BT, scale, dqkv_BTCSJ):
    """Write dqkv; arguments as in `rotary_split`."""
    batch, heads, time, _, half = dq_BHTSJ.shape
    kv_heads = dk_BGTSJ.shape[1]
    for b in range(batch):
        for t in range(time):
            p = positions_BT[b, t] if positions_BT.size else t
            for h in range(heads):
                for j in range(half):
                    d1, d2 = dq_BHTSJ[b, h, t, 0, j], dq_BHTSJ[b, h, t, 1, j]
                    cos, sin = cos_PJ[p, j] * scale, sin_PJ[p, j] * scale
                    dqkv_BTCSJ[b, t, h, 0, j] = d1 * cos + d2 * sin
                    dqkv_BTCSJ[b, t, h, 1, j] = d2 * cos - d1 * sin
            for h in range(kv_heads):
                for j in range(half):
                    d1, d2 = dk_BGTSJ[b, h, t, 0, j], dk_BGTSJ[b, h, t, 1, j]
                    cos, sin = cos_PJ[p, j], sin_PJ[p, j]
                    dqkv_BTCSJ[b, t, heads + h, 0, j] = d1 * cos + d2 * sin
                    dqkv_BTCSJ[b, t, heads + h, 1, j] = d2 * cos - d1 * sin
                for part in range(2):
                    for j in range(half):
                        dqkv_BTCSJ[b, t, heads + kv_heads + h, part, j] = dv_BGTSJ[b, h, t, part, j]


@_jit(_SUMS)
def causal_softmax(scores_RS, starts_BT, heads):
    """Turn rows into weights; empty `starts_BT` means 0."""
    real = scores_RS.dtype.type
    num_rows, time = scores_RS.shape
    for i in range(num_rows):
        last = i % time
        first = starts_BT[i // (heads * time), last] if starts_BT.size else 0
        # A slice per row: loops that start at `first` itself have indices that may be negative
        # for all the compiler knows, and do not vectorize.
        visible = scores_RS[i, first : last + 1]
        best = _ordered(visible[0])
        for j in range(visible.size):
            best = max(best, _ordered(visible[j]))
        # Whichever the maximum is, a nan in the row gets into the sum.
        highest = _ordered(best)
        total = real(0)
        for j in range(visible.size):
            weight = _exp(visible[j] - highest)
            visible[j] = weight
            total += weight
        share = real(1) / total
        for j in range(visible.size):
            visible[j] *= share
        scores_RS[i, :first] = real(0)
        scores_RS[i, last + 1 :] = real(0)


@_jit(_SUMS)
def causal_softmax_backward(probs_RS, dprobs_RS, starts_BT, heads):
    """Turn rows of dprobs into dscores; empty `starts_BT` means 0."""
    real = probs_RS.dtype.type
    num_rows, time = probs_RS.shape
    for i in range(num_rows):
        last = i % time
        first = starts_BT[i // (heads * time), last] if starts_BT.size else 0
        probs, dprobs = probs_RS[i, first : last + 1], dprobs_RS[i, first : last + 1]
        total = real(0)
        for j in range(probs.size):
            total += probs[j] * dprobs[j]
        for j in range(probs.size):
            dprobs[j] = probs[j] * (dprobs[j] - total)
        dprobs_RS[i, :first] = real(0)
        dprobs_RS[i, last + 1 :] = real(0)


@_jit(_FUSED)
def swiglu(gate_up_N2F, z_NF):
    """Write z."""
    one = z_NF.dtype.type(1)
    num_rows, hidden = z_NF.shape
    for i in range(num_rows):
        for j in range(hidden):
            gate, up = gate_up_N2F[i, j], gate_up_N2F[i, hidden + j]
            z_NF[i, j] = gate / (one + _exp(-gate)) * up


@_jit(_FUSED)
def swiglu_backward(dz_NF, gate_up_N2F, dgate_up_N2F):
    """Write dgate_up."""
    one = dz_NF.dtype.type(1)
    num_rows, hidden = dz_NF.shape
    for i in range(num_rows):
        for j in range(hidden):
            gate, up, dz = gate_up_N2F[i, j], gate_up_N2F[i, hidden + j], dz_NF[i, j]
            sigmoid = one / (one + _exp(-gate))
            dgate_up_N2F[i, j] = dz * up * sigmoid * (one + gate * (one - sigmoid))
            dgate_up_N2F[i, hidden + j] = dz * sigmoid * gate


@_jit(_FUSED)
def gelu(x, y):
    """Write gelu of flat x; (1 + tanh(u)) / 2 is sigmoid(2 u)."""
    real = x.dtype.type
    scale, cubic = real(-2.0 * 0.7978845608028654), real(0.044715)
    for i in range(x.size):
        minus_2u = scale * x[i] * (real(1) + cubic * (x[i] * x[i]))
        y[i] = x[i] / (real(1) + _exp(minus_2u))


@_jit(_FUSED)
def gelu_backward(dy, x, dx):
    """Write the gradient at flat x."""
    real = x.dtype.type
    scale, cubic = real(2.0 * 0.7978845608028654), real(0.044715)
    for i in range(x.size):
        square = x[i] * x[i]
        half = real(1) / (real(1) + _exp(-scale * x[i] * (real(1) + cubic * square)))
        slope = scale * x[i] * (real(1) + real(3) * cubic * square)
        dx[i] = dy[i] * half * (real(1) + slope * (real(1) - half))


@_jit(_SUMS)
def cross_entropy(logits_NV, targets_N):
    """Turn logits into probabilities; return (loss_sum, num_correct, all targets are legal)."""
    real = logits_NV.dtype.type
    num_rows, vocab = logits_NV.shape
    loss_sum, num_correct = 0.0, 0
    for i in range(num_rows):
        if targets_N[i] >= vocab:
            return 0.0, 0, False
    for i in range(num_rows):
        best = _ordered(logits_NV[i, 0])
        for j in range(vocab):
            best = max(best, _ordered(logits_NV[i, j]))
        highest = _ordered(best)
        target = targets_N[i]
        picked = real(0)
        if target >= 0:
            picked = logits_NV[i, target] - highest
            if logits_NV[i, target] == highest:
                earlier = 0
                for j in range(target):
                    earlier += logits_NV[i, j] == highest
                num_correct += earlier == 0
        total = real(0)
        for j in range(vocab):
            weight = _exp(logits_NV[i, j] - highest)
            logits_NV[i, j] = weight
            total += weight
        share = real(1) / total
        for j in range(vocab):
            logits_NV[i, j] *= share
        if target >= 0:
            loss_sum += math.log(np.float64(total)) - np.float64(picked)
    return loss_sum, num_correct, True


@_jit(_FUSED)
def cross_entropy_backward(probs_NV, targets_N, seed):
    """Turn probabilities into dlogits; targets were checked by forward."""
    num_rows, vocab = probs_NV.shape
    for i in range(num_rows):
        target = targets_N[i]
        if target < 0:
            for j in range(vocab):
                probs_NV[i, j] = probs_NV.dtype.type(0)
        else:
            for j in range(vocab):
                probs_NV[i, j] *= seed
            if target < vocab:
                probs_NV[i, target] -= seed


@_jit(_PLAIN)
def apply_dropout(x, words, threshold, factor, y):
    """Write flat y."""
    zero = x.dtype.type(0)
    for i in range(x.size):
        y[i] = x[i] * factor if words[i] < threshold else zero


@_jit(_PLAIN)
def embedding_backward(ids_N, dy_ND, dweight_VD):
    """Write dweight; return whether all ids are legal."""
    vocab, width = dweight_VD.shape
    for i in range(ids_N.size):
        if ids_N[i] < 0 or ids_N[i] >= vocab:
            return False
    dweight_VD[:] = dy_ND.dtype.type(0)
    for i in range(ids_N.size):
        token = ids_N[i]
        for j in range(width):
            dweight_VD[token, j] += dy_ND[i, j]
    return True


@_jit(_PLAIN)
def adamw_update(param, grad, m, v, rate, beta1, beta2, rest1, rest2, eps, shrink, grad_scale):
    """Update flat arrays; no operation is fused, so the bits are those of the NumPy set."""
    for i in range(param.size):
        g = grad[i] * grad_scale
        m_new = m[i] * beta1 + g * rest1
        v_new = v[i] * beta2 + g * g * rest2
        m[i] = m_new
        v[i] = v_new
        param[i] = param[i] * shrink - m_new / (np.sqrt(v_new) + eps) * rate


@_jit(_SUMS)
def squared_norm(x):
    """Return the sum of squares of a flat array in float64."""
    total = 0.0
    for i in range(x.size):
        wide = np.float64(x[i])
        total += wide * wide
    return total


_u4 = np.uint32
# Each result is cut back to 32 bits: Numba makes 64 of them, which halves the lanes of a vector.


@_jit(_PLAIN)
def widen_bfloat16(x, y):
    """Write the float32 bits of flat bfloat16 bits."""
    for i in range(x.size):
        y[i] = _u4(_u4(x[i]) << _u4(16))


@_jit(_PLAIN)
def narrow_bfloat16(x, y):
    """Write the bfloat16 bits of flat float32 bits; nan becomes the quiet nan of its sign."""
    for i in range(x.size):
        bits = x[i]
        upper = _u4(bits >> _u4(16))
        rounded = _u4(_u4(bits + _u4(0x7FFF) + (upper & _u4(1))) >> _u4(16))
        quiet = _u4((upper & _u4(0x8000)) | _u4(0x7FC0))
        is_nan = _u4(bits & _u4(0x7FFFFFFF)) > _u4(0x7F800000)
        y[i] = np.uint16(quiet if is_nan else rounded)


@_jit(_PLAIN)
def widen_float16(x, y):
    """Write the float32 bits of flat float16 bits."""
    for i in range(x.size):
        bits = _u4(x[i])
        size = _u4(bits & _u4(0x7FFF))
        # The exponent's bias is 127 instead of 15; inf and nan go from 31 to 255.
        normal = _u4((size << _u4(13)) + _u4(112 << 23))
        special = _u4(normal + _u4(112 << 23))
        wide = special if size >= _u4(0x7C00) else normal
        tiny = _u4(_same_bits(np.float32(np.int32(size)) * np.float32(2.0**-24)))
        wide = tiny if size < _u4(0x0400) else wide
        y[i] = _u4(wide | _u4((bits & _u4(0x8000)) << _u4(16)))


@_jit(_PLAIN)
def narrow_float16(x, y):
    """Write the float16 bits of flat float32 bits; nan stays nan."""
    for i in range(x.size):
        bits = x[i]
        size = _u4(bits & _u4(0x7FFFFFFF))
        odd = _u4((size >> _u4(13)) & _u4(1))
        normal = _u4(_u4(size - _u4(112 << 23) + _u4(0xFFF) + odd) >> _u4(13))
        # 0.5 has steps of 2^-24, those of float16's subnormals: the sum rounds to them.
        tiny = _u4(_u4(_same_bits(_same_bits(size) + np.float32(0.5))) - _u4(0x3F000000))
        half = tiny if size < _u4(0x38800000) else normal
        half = _u4(0x7C00) if size >= _u4(0x47800000) else half
        # As NumPy does: a nan keeps its upper bits, and does not become inf if those are 0.
        payload = _u4(max(_u4((size >> _u4(13)) & _u4(0x03FF)), _u4(1)))
        half = _u4(_u4(0x7C00) | payload) if size > _u4(0x7F800000) else half
        y[i] = np.uint16(half | _u4((bits >> _u4(16)) & _u4(0x8000)))

"""The decoder of `mpisim.nn` in PyTorch eager, as its users write it, for `mpisim bench step`.

Two variants of the same function: one parameter per tensor with rotation by halves, and joined
projections with rotation by complex numbers. Parameters start from ours by name, and gradients come
back in our names and shapes. Imports torch: only `torch_steps` may import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Shape suffixes: B rows, T tokens, D model, H query heads, G key/value heads, K head size,
# F feed-forward, V vocabulary. PyTorch keeps weights as (out, in); ours are (in, out).


@dataclass(frozen=True)
class DecoderShape:
    """What the tensors' shapes do not tell."""

    num_heads: int
    num_kv_heads: int
    rope_theta: float
    norm_eps: float


class Masking:
    """Where a document starts in each row, as what PyTorch needs of it; for one model.

    Parameters
    ----------
    num_tokens : int
        Positions of a row.
    starts : ndarray of shape (B, T), optional
        Column of the first token of the document that each position belongs to; None: column 0.
    """

    def __init__(self, num_tokens: int, starts: np.ndarray | None) -> None:
        self.mask: Tensor | None = None
        """Shape (B, 1, T, T): True where attention looks; None: plain causal attention."""
        self.angles: tuple[Tensor, ...] | None = None
        """Of the rotations: computed by the first model that sees these rows, then kept."""
        steps = torch.arange(num_tokens)
        self.positions = steps[None]
        """Shape (1 or B, T)."""
        if starts is not None:
            first = torch.from_numpy(starts.astype(np.int64))
            self.positions = steps[None] - first
            earlier = steps[None, None, :] <= steps[None, :, None]
            self.mask = (earlier & (steps[None, None, :] >= first[:, :, None]))[:, None]


class Decoder(nn.Module):
    """Token table, blocks, final norm, and the mean loss over valid targets.

    Parameters
    ----------
    weights : mapping of str to ndarray
        Ours, by full name. Copied.
    shape : DecoderShape
    joined : bool
        False: one parameter per tensor, rotation by halves. True: query, key and value in one
        projection, gate and up in another, rotation by complex numbers.
    """

    def __init__(
        self, weights: Mapping[str, np.ndarray], shape: DecoderShape, joined: bool
    ) -> None:
        super().__init__()
        self.shape = shape
        self.table = _parameter(weights["embed.tokens.weight"])
        kind = JoinedBlock if joined else SeparateBlock
        names = sorted(
            {name.partition(".")[0] for name in weights if name.startswith("block")},
            key=lambda name: int(name.removeprefix("block")),
        )
        self.blocks = nn.ModuleList(
            kind({n.partition(".")[2]: w for n, w in weights.items() if n.startswith(f"{name}.")},
                 shape)
            for name in names
        )  # fmt: skip
        self.norm = _parameter(weights["head.norm.weight"])
        tied = "head.output.weight" not in weights
        self.output = self.table if tied else _parameter(weights["head.output.weight"])

    def forward(self, ids_BT: Tensor, targets_BT: Tensor, masking: Masking) -> Tensor:
        """Return the mean cross-entropy over targets that are not -1."""
        x_BTD = F.embedding(ids_BT, self.table)
        if masking.angles is None:
            masking.angles = self.blocks[0].angles(masking.positions, x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, masking.angles, masking.mask)
        x_BTD = F.rms_norm(x_BTD, self.norm.shape, self.norm, self.shape.norm_eps)
        logits_BTV = F.linear(x_BTD, self.output)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-1)

    def our_grads(self) -> dict[str, np.ndarray]:
        """Return the gradients under our names and in our shapes."""
        grads = {
            "embed.tokens.weight": self.table.grad.numpy(),
            "head.norm.weight": self.norm.grad.numpy(),
        }
        if self.output is not self.table:
            grads["head.output.weight"] = self.output.grad.numpy()
        for index, block in enumerate(self.blocks):
            for name, grad in block.our_grads().items():
                grads[f"block{index}.{name}"] = grad
        return grads


class SeparateBlock(nn.Module):
    """A block with one parameter per tensor, after the manner of Hugging Face's LLaMA."""

    NAMES = {
        "norm1": "norm1.weight",
        "query": "qkv.query",
        "key": "qkv.key",
        "value": "qkv.value",
        "out": "out.weight",
        "norm2": "norm2.weight",
        "gate": "gate_up.gate",
        "up": "gate_up.up",
        "down": "down.weight",
    }
    """Attribute to our name within the block."""

    def __init__(self, weights: Mapping[str, np.ndarray], shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        for attribute, name in self.NAMES.items():
            setattr(self, attribute, _parameter(weights[name].T))
        self.head_size = len(self.query) // shape.num_heads

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of shape (1 or B, 1, T, K), each half twice."""
        angle = _angles(positions, self.head_size, self.shape.rope_theta)[:, None].repeat(
            1, 1, 1, 2
        )
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def forward(self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Return the block's output, of the shape of its input."""
        h_BTD = F.rms_norm(x_BTD, self.norm1.shape, self.norm1, self.shape.norm_eps)
        heads = (*x_BTD.shape[:2], -1, self.head_size)
        q_BHTK = F.linear(h_BTD, self.query).view(heads).transpose(1, 2)
        k_BGTK = F.linear(h_BTD, self.key).view(heads).transpose(1, 2)
        v_BGTK = F.linear(h_BTD, self.value).view(heads).transpose(1, 2)
        mixed_BHTK = _attention(_turn(q_BHTK, *angles), _turn(k_BGTK, *angles), v_BGTK, mask)
        x_BTD = x_BTD + F.linear(mixed_BHTK.transpose(1, 2).flatten(2), self.out)
        h_BTD = F.rms_norm(x_BTD, self.norm2.shape, self.norm2, self.shape.norm_eps)
        z_BTF = F.silu(F.linear(h_BTD, self.gate)) * F.linear(h_BTD, self.up)
        return x_BTD + F.linear(z_BTF, self.down)

    def our_grads(self) -> dict[str, np.ndarray]:
        """Return the gradients under our names and in our shapes."""
        return {
            name: getattr(self, attribute).grad.numpy().T for attribute, name in self.NAMES.items()
        }


class JoinedBlock(nn.Module):
    """A block with joined projections, after the manner of the first LLaMA code.

    Pairs of a head lie side by side there, where ours are its two halves: rows of the query and
    key weights are sorted accordingly, once.
    """

    def __init__(self, weights: Mapping[str, np.ndarray], shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        query, key, value = (weights[f"qkv.{name}"].T for name in ("query", "key", "value"))
        self.head_size = len(query) // shape.num_heads
        self.sizes = (len(query), len(key), len(value))
        query, key = (_halves_to_pairs(weight, self.head_size) for weight in (query, key))
        self.norm1 = _parameter(weights["norm1.weight"])
        self.qkv = _parameter(np.concatenate([query, key, value]))
        self.out = _parameter(weights["out.weight"].T)
        self.norm2 = _parameter(weights["norm2.weight"])
        gate, up = weights["gate_up.gate"].T, weights["gate_up.up"].T
        self.gate_up = _parameter(np.concatenate([gate, up]))
        self.down = _parameter(weights["down.weight"].T)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return ``exp(i angle)`` of shape (1 or B, T, 1, K / 2)."""
        angle = _angles(positions, self.head_size, self.shape.rope_theta)[:, :, None]
        wide = torch.complex128 if dtype == torch.float64 else torch.complex64
        return (torch.polar(torch.ones_like(angle), angle).to(wide),)

    def forward(self, x_BTD: Tensor, angles: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
        """Return the block's output, of the shape of its input."""
        h_BTD = F.rms_norm(x_BTD, self.norm1.shape, self.norm1, self.shape.norm_eps)
        num_turned = self.shape.num_heads + self.shape.num_kv_heads
        heads_BTCK = F.linear(h_BTD, self.qkv).view(*x_BTD.shape[:2], -1, self.head_size)
        turned, v_BTGK = heads_BTCK[:, :, :num_turned], heads_BTCK[:, :, num_turned:]
        q_BTHK, k_BTGK = self._turn(turned, *angles).split(
            (self.shape.num_heads, self.shape.num_kv_heads), dim=2
        )
        mixed_BHTK = _attention(
            q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2), mask
        )
        x_BTD = x_BTD + F.linear(mixed_BHTK.transpose(1, 2).flatten(2), self.out)
        h_BTD = F.rms_norm(x_BTD, self.norm2.shape, self.norm2, self.shape.norm_eps)
        gate_BTF, up_BTF = F.linear(h_BTD, self.gate_up).chunk(2, dim=-1)
        return x_BTD + F.linear(F.silu(gate_BTF) * up_BTF, self.down)

    @staticmethod
    def _turn(x: Tensor, turns: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()  # there are no 16-bit complex numbers
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)

    def our_grads(self) -> dict[str, np.ndarray]:
        """Return the gradients under our names and in our shapes."""
        query, key, value = self.qkv.grad.split(self.sizes)
        gate, up = self.gate_up.grad.chunk(2)
        grads = {
            "norm1.weight": self.norm1.grad,
            "qkv.query": _pairs_to_halves(query, self.head_size),
            "qkv.key": _pairs_to_halves(key, self.head_size),
            "qkv.value": value,
            "out.weight": self.out.grad,
            "norm2.weight": self.norm2.grad,
            "gate_up.gate": gate,
            "gate_up.up": up,
            "down.weight": self.down.grad,
        }
        return {name: grad.numpy().T for name, grad in grads.items()}


def _parameter(array: np.ndarray) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.array(array, order="C")))


def _angles(positions: Tensor, head_size: int, theta: float) -> Tensor:
    """Return the float64 angles of shape positions.shape + (K / 2,)."""
    steps = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    return positions[..., None].double() * theta**-steps


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGTK, v_BGTK, attn_mask=mask, is_causal=mask is None,
        enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1],
    )  # fmt: skip


def _halves_to_pairs(weight: np.ndarray, head_size: int) -> np.ndarray:
    halves = weight.reshape(-1, 2, head_size // 2, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _pairs_to_halves(weight: Tensor, head_size: int) -> Tensor:
    pairs = weight.reshape(-1, head_size // 2, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)

"""The decoder-only transformer, built from plain sizes.

Block ``embed`` looks up tokens, ``block0``.. are attention and feed-forward with residual
connections, ``head`` is the last norm and the projection to the vocabulary with the loss.
"""

from __future__ import annotations

from mpisim.errors import ConfigError
from mpisim.nn.attention import Attention
from mpisim.nn.blocks import Block
from mpisim.nn.layers import Layer
from mpisim.nn.losses import LanguageHead
from mpisim.nn.models import Model
from mpisim.nn.transformer import Dropout, Projection, RMSNorm, SwiGLU, TokenEmbedding

TABLE_NAME = "embed.tokens.weight"
"""Full name of the token table, which a tied head borrows."""

SITES_PER_BLOCK = 2
"""Dropout sites of a block: after attention, and after the feed-forward."""


def build_decoder(
    *,
    vocab_size: int,
    d_model: int,
    num_blocks: int,
    num_heads: int,
    num_kv_heads: int = 0,
    d_ff: int = 0,
    tied: bool = True,
    max_len: int,
    rope_theta: float = 10000.0,
    norm_eps: float = 1e-5,
    dropout: float = 0.0,
    loss_chunk_tokens: int = 0,
) -> Model:
    """Build a decoder-only transformer.

    Parameters
    ----------
    vocab_size : int
        Number of token ids.
    d_model : int
        Width of the residual stream.
    num_blocks : int
        Blocks of attention and feed-forward.
    num_heads : int
        Query heads; ``d_model / num_heads`` is the head size, an even number.
    num_kv_heads : int
        Key and value heads, each shared by ``num_heads / num_kv_heads`` query heads; 0 means
        num_heads.
    d_ff : int
        Hidden width of the feed-forward; 0 means 8/3 of d_model, rounded up to a multiple of 8, so
        that its three matrices have the parameters of two matrices of width 4 d_model.
    tied : bool
        The head projects with the token table.
    max_len : int
        Longest row, tokens.
    rope_theta : float
        Base of the rotary angles.
    norm_eps : float
        Added to the mean square in RMSNorm.
    dropout : float
        Share of the outputs of attention and feed-forward that is dropped, in [0, 1); at 0 the
        model has no dropout sites.
    loss_chunk_tokens : int
        Tokens whose logits exist at one time; 0 means all.

    Returns
    -------
    Model

    Raises
    ------
    ConfigError
        A size is out of range or heads do not fit; names the field of the config.

    Notes
    -----
    A block is ``h = x + drop(out(attention(qkv(norm1(x)))))`` and
    ``y = h + drop(down(swiglu(gate_up(norm2(h)))))``. Projections that add to the residual stream
    start smaller by ``1 / sqrt(2 * num_blocks)``, so that its variance does not grow with the
    depth (Radford et al. 2019, section 2.3).

    Examples
    --------
    >>> model = build_decoder(vocab_size=266, d_model=4, num_blocks=3, num_heads=1, d_ff=8,
    ...                       max_len=4)
    >>> specs = model.param_specs()
    >>> len(specs), sum(spec.size for spec in specs)
    (29, 1572)
    """
    num_kv_heads = num_kv_heads or num_heads
    sizes = {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "num_blocks": num_blocks,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "max_len": max_len,
    }
    for name, size in sizes.items():
        _require(size >= 1, name, "be at least 1", size, "Choose a positive size.")
    for name, size in (("d_ff", d_ff), ("loss_chunk_tokens", loss_chunk_tokens)):
        _require(size >= 0, name, "be at least 0", size, "Set it to 0 for the default.")
    _require(
        d_model % num_heads == 0, "num_heads", f"divide model.d_model = {d_model}", num_heads,
        "Change one of them.",
    )  # fmt: skip
    head_size = d_model // num_heads
    _require(
        head_size % 2 == 0, "num_heads",
        f"leave an even head size, because rotary positions turn pairs, with model.d_model = "
        f"{d_model}", f"{num_heads}, head size {head_size}", "Change one of them.",
    )  # fmt: skip
    _require(
        num_heads % num_kv_heads == 0, "num_kv_heads", f"divide model.num_heads = {num_heads}",
        num_kv_heads, "Change one of them.",
    )  # fmt: skip
    _require(0.0 <= dropout < 1.0, "dropout", "be at least 0 and below 1", dropout, "Lower it.")

    residual_scale = (2 * num_blocks) ** -0.5
    hidden = d_ff or -(-8 * d_model // 24) * 8
    kv_width = num_kv_heads * head_size
    qkv = (("query", d_model), ("key", kv_width), ("value", kv_width))
    blocks = [Block("embed", (("tokens", TokenEmbedding(vocab_size, d_model, max_len)),))]
    for index in range(num_blocks):
        attention = [
            ("norm1", RMSNorm(d_model, norm_eps)),
            ("qkv", Projection(d_model, qkv)),
            ("attention", Attention(num_heads, num_kv_heads, head_size, max_len, rope_theta)),
            ("out", Projection(d_model, (("weight", d_model),), residual_scale)),
        ]
        feed_forward = [
            ("norm2", RMSNorm(d_model, norm_eps)),
            ("gate_up", Projection(d_model, (("gate", hidden), ("up", hidden)))),
            ("swiglu", SwiGLU()),
            ("down", Projection(hidden, (("weight", d_model),), residual_scale)),
        ]
        if dropout:
            attention.append(("dropout1", Dropout(dropout, SITES_PER_BLOCK * index)))
            feed_forward.append(("dropout2", Dropout(dropout, SITES_PER_BLOCK * index + 1)))
        blocks.append(_residual_block(f"block{index}", attention, feed_forward))
    output = LanguageHead(vocab_size, d_model, loss_chunk_tokens)
    blocks.append(
        Block(
            "head",
            (("norm", RMSNorm(d_model, norm_eps)), ("output", output)),
            borrows=(("output.weight", TABLE_NAME),) if tied else (),
        )
    )
    return Model(blocks=tuple(blocks), input_kind="tokens", input_width=max_len, d_model=d_model)


def _residual_block(name: str, *branches: list[tuple[str, Layer]]) -> Block:
    """Return a block of branches, each of which is added to its own input."""
    skips, start = [], 0
    for branch in branches:
        skips.append((start, start + len(branch)))
        start += len(branch)
    layers = tuple(pair for branch in branches for pair in branch)
    return Block(name, layers, tuple(skips))


def _require(holds: bool, name: str, rule: str, got: object, fix: str) -> None:
    if not holds:
        raise ConfigError(f"model.{name} must {rule}; got {got}. {fix}")

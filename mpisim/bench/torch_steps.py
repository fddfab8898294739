"""PyTorch's side of `bench step`: its gradients for the check, its training steps for the clock.

The only importer of torch_decoder.py; itself imported inside functions of step_rank.py, so that
nothing but this benchmark needs PyTorch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from mpisim.bench.torch_decoder import Decoder, DecoderShape, Masking
from mpisim.data.batch import Batch

VARIANTS = ("separate", "joined")
"""Two ways to write the decoder; see `Decoder`. The faster one counts."""

VERSION = torch.__version__


def loss_and_grads(
    variant: str,
    weights: Mapping[str, np.ndarray],
    shape: Mapping[str, Any],
    batch: Batch,
) -> tuple[float, dict[str, np.ndarray]]:
    """Return PyTorch's mean loss over valid targets and its gradients.

    Parameters
    ----------
    variant : {"separate", "joined"}
    weights : mapping of str to ndarray
        Ours, by full name; float32 or float64.
    shape : mapping
        Fields of DecoderShape.
    batch : Batch

    Returns
    -------
    loss : float
    grads : dict of str to ndarray
        By our names, in our shapes.
    """
    model = Decoder(weights, DecoderShape(**shape), joined=variant == "joined")
    loss = model(*_inputs(batch))
    loss.backward()
    return loss.item(), model.our_grads()


class TorchTrainer:
    """A model, its optimizer and one batch; every call is one update.

    Parameters
    ----------
    variant : {"separate", "joined"}
    weights : mapping of str to ndarray
        Ours, by full name.
    shape : mapping
        Fields of DecoderShape.
    batch : Batch
        This rank's rows, every target valid.
    dtype : str
        Of parameters, activations and gradients.
    settings : OptimizerSection
        lr, betas, eps and weight decay of AdamW.
    parallel : bool
        Wrap the model in DistributedDataParallel over the group that `gloo_group` made.
    """

    def __init__(
        self,
        variant: str,
        weights: Mapping[str, np.ndarray],
        shape: Mapping[str, Any],
        batch: Batch,
        *,
        dtype: str,
        settings: Any,
        parallel: bool,
    ) -> None:
        decoder = Decoder(weights, DecoderShape(**shape), joined=variant == "joined")
        decoder.to(getattr(torch, dtype))
        self._model: torch.nn.Module = decoder
        if parallel:
            self._model = DistributedDataParallel(decoder, gradient_as_bucket_view=True)
        matrices = [param for param in decoder.parameters() if param.ndim >= 2]
        vectors = [param for param in decoder.parameters() if param.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True,
        )  # fmt: skip
        self._inputs = _inputs(batch)

    def __call__(self) -> float:
        """Run forward, backward and AdamW; return this rank's mean loss before the update."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._model(*self._inputs)
        loss.backward()
        self._optimizer.step()
        return loss.item()


def use_one_thread() -> None:
    """Make PyTorch compute with one thread."""
    torch.set_num_threads(1)


@contextlib.contextmanager
def gloo_group(rank: int, size: int, path: str) -> Iterator[None]:
    """Join all ranks of this host in PyTorch's default process group over gloo.

    Parameters
    ----------
    rank, size : int
    path : str
        A file that does not exist yet, the same on every rank; they meet there.
    """
    # Else gloo looks up the host's own name, which need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")
    store = torch.distributed.FileStore(path, size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _inputs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Masking]:
    tokens, targets = (torch.from_numpy(part.astype(np.int64)) for part in batch[:2])
    return tokens, targets, Masking(tokens.shape[1], batch.starts)

"""The contract suite on ranks as threads: LocalTransport, and FaultyTransport around it."""

from __future__ import annotations

import contract
import pytest

from mpisim.comm.faulty import FaultyTransport
from mpisim.comm.local import run_threads

KINDS = {
    "local": {},
    "local without eager sends": {"eager_bytes": 0},
    "local synchronous": {"synchronous": True},
    "faulty without faults": {},
    "faulty synchronous": {"synchronous": True},
    "strict": {},
}


def wrapped(kind, transport):
    if "faulty" in kind or kind == "strict":
        return FaultyTransport(transport, strict=kind == "strict")
    return transport


def run_check(check, kind, size):
    def body(transport):
        check(wrapped(kind, transport))
        transport.barrier()

    job = run_threads(body, size, timeout_s=10.0, **KINDS[kind])
    if job.errors:
        raise next(iter(job.errors.values()))


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_contract(check, kind):
    run_check(check, kind, 3 if kind in ("local", "strict") else 2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "synchronous" in kind])
def test_synchronous_sends_wait(kind):
    run_check(contract.synchronous_sends_wait, kind, 2)


def test_C074_every_tag_of_every_channel_is_in_the_promised_range():
    from mpisim.comm.transport import (
        DTYPE_NAMES,
        MAX_CHANNEL,
        make_tag,
        tag_channel,
        tag_dtype,
    )

    dtypes = [contract.dtype_of(name) for name in DTYPE_NAMES]
    tags = set()
    for channel in range(MAX_CHANNEL + 1):
        for name, dtype in zip(DTYPE_NAMES, dtypes, strict=True):
            tag = make_tag(channel, dtype)
            assert 0 <= tag <= 32767
            assert (tag_channel(tag), tag_dtype(tag)) == (channel, name)
            tags.add(tag)
    assert len(tags) == (MAX_CHANNEL + 1) * len(DTYPE_NAMES)
    # A channel per step would pass the promised limit: it is refused, not wrapped in silence.
    with pytest.raises(ValueError, match="Reuse channels modulo"):
        make_tag(10**6, dtypes[0])

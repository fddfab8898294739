"""The contract and the collectives on real MPI processes: one launch per number of ranks."""

from __future__ import annotations

import functools

import collective_checks
import contract
import pytest
import reduction_checks
from mpi_worker import RanksFailed, mpi_run

pytestmark = pytest.mark.mpi

COLLECTIVES = [
    collective_checks.check_matrix,
    *collective_checks.BITS,
    *reduction_checks.CHECKS,
    collective_checks.check_pipelined,
    collective_checks.check_real_pipelined_size,
    reduction_checks.check_real_pipelined_halves,
    collective_checks.check_C058_reduce_scatter_of_large_chunks,
]
SYNCHRONOUS = [
    collective_checks.check_pipelined,
    collective_checks.check_started_collectives,
    collective_checks.check_two_groups_at_once,
    collective_checks.check_scatter_and_gather,
    reduction_checks.check_halves_hop_by_hop,
    collective_checks.check_C083_same_array_in_and_out,
]


def contract_on_mpi(transport):
    """Run the contract over normal sends, then over synchronous ones."""
    from mpisim.comm.mpi import connect

    yield from contract.all_checks(transport)
    synchronous = connect(timeout_s=transport.timeout_s, synchronous=True)
    yield from contract.all_checks(synchronous, synchronous=True)
    synchronous.close()


def collectives_on_mpi(transport):
    """Run the checks of the collectives over normal sends, then some over synchronous ones."""
    from mpisim.comm.mpi import connect

    synchronous = connect(timeout_s=transport.timeout_s, synchronous=True)
    for way, connected, checks in (
        ("", transport, COLLECTIVES),
        (" synchronous", synchronous, SYNCHRONOUS),
    ):
        for check in checks:
            if check is collective_checks.check_pipelined:
                with collective_checks.tiny_segments(pipeline_bytes=64, segment_bytes=16):
                    check(connected)
            else:
                check(connected)
            connected.barrier()
            yield check.__name__ + way
    collective_checks.check_mismatched_counts(transport)
    yield "check_mismatched_counts"


NAMES = {
    contract_on_mpi: [
        *(check.__name__ + way for way in ("", " synchronous") for check in contract.CHECKS),
        "synchronous_sends_wait",
    ],
    collectives_on_mpi: [
        *(check.__name__ for check in COLLECTIVES),
        *(check.__name__ + " synchronous" for check in SYNCHRONOUS),
        "check_mismatched_counts",
    ],
}


@functools.cache
def run(function, ranks):
    """Return how many checks every rank has passed, and what the next one said."""
    try:
        results, text = mpi_run(function, ranks), ""
    except RanksFailed as failed:
        results, text = failed.results, str(failed)
    assert all(names == NAMES[function][: len(names)] for names in results)
    return min(map(len, results)), text


def assert_passed(function, ranks, name):
    """Fail with the words of `name`, or say which check ended the job before it."""
    passed, text = run(function, ranks)
    number = NAMES[function].index(name)
    if number > passed:
        pytest.fail(f"not reached: {NAMES[function][passed]} ended the job")
    if number == passed:
        pytest.fail(text or "no rank said why")
    if number == len(NAMES[function]) - 1 and text:
        pytest.fail(text)


@pytest.mark.parametrize("name", NAMES[contract_on_mpi])
@pytest.mark.parametrize("ranks", [2, 3])
def test_contract(ranks, name):
    assert_passed(contract_on_mpi, ranks, name)


@pytest.mark.parametrize("name", NAMES[collectives_on_mpi])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives(ranks, name):
    assert_passed(collectives_on_mpi, ranks, name)


def failing(transport):
    if transport.rank == 1:
        raise AssertionError("seven must be eight")
    transport.barrier()


def test_a_failing_rank_fails_the_test_with_its_words():
    with pytest.raises(RanksFailed, match="rank 1 of 2\n(.*\n)*.*seven must be eight"):
        mpi_run(failing, 2)

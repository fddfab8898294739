"""The contract and the collectives on real MPI processes: one launch per number of ranks."""

from __future__ import annotations

import functools

import contract
import pytest
from mpi_worker import RanksFailed, mpi_run

pytestmark = pytest.mark.mpi


def contract_on_mpi(transport):
    """Run the contract over normal sends, then over synchronous ones."""
    yield from contract.all_checks(transport)
    from mpisim.comm.mpi import connect

    synchronous = connect(timeout_s=transport.timeout_s, synchronous=True)
    yield from contract.all_checks(synchronous, synchronous=True)
    synchronous.close()


@functools.cache
def run(function, ranks):
    """Return the checks that every rank has passed, in order, and what the next one said."""
    try:
        results, text = mpi_run(function, ranks), ""
    except RanksFailed as failed:
        results, text = failed.results, str(failed)
    return min(results, key=len), text


def assert_passed(function, ranks, name):
    """Fail with the words of `name`, or without any if an earlier check ended the job."""
    names, text = run(function, ranks)
    if name not in names:
        pytest.fail(text if text else "a check was not run")


@pytest.mark.parametrize("mode", ["", " synchronous"], ids=["normal", "synchronous"])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("ranks", [2, 3])
def test_contract(ranks, check, mode):
    assert_passed(contract_on_mpi, ranks, check.__name__ + mode)


def failing(transport):
    if transport.rank == 1:
        raise AssertionError("seven must be eight")
    transport.barrier()


def test_a_failing_rank_fails_the_test_with_its_words():
    with pytest.raises(RanksFailed, match="rank 1 of 2\n(.*\n)*.*seven must be eight"):
        mpi_run(failing, 2)

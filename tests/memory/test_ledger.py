"""The ledger: live and peak bytes by category, each piece of memory counted once."""

from __future__ import annotations

import numpy as np
import pytest

from mpisim.layouts.metrics import MEMORY_CATEGORIES
from mpisim.memory.ledger import Ledger


def test_it_starts_empty_with_every_category():
    ledger = Ledger()
    assert list(ledger.live) == list(ledger.peak) == list(MEMORY_CATEGORIES)
    assert ledger.total == ledger.peak_total == 0
    assert ledger.vector() == (0,) * len(MEMORY_CATEGORIES)


def test_holding_and_dropping_by_hand():
    ledger = Ledger()
    a, b = np.zeros(10), np.zeros(5, np.float32)
    ledger.hold("activations", a, b)
    assert ledger.live["activations"] == ledger.total == 100
    ledger.drop(a)
    assert ledger.live["activations"] == ledger.total == 20
    assert ledger.peak["activations"] == ledger.peak_total == 100
    assert not ledger.holds(a) and ledger.holds(b)


def test_an_array_held_twice_counts_once_until_it_is_dropped_twice():
    """Two layers that keep the same boundary tensor hold one array."""
    ledger = Ledger()
    a = np.zeros(10)
    ledger.hold("activations", a)
    ledger.hold("activations", a)
    assert ledger.total == 80
    ledger.drop(a)
    assert ledger.total == 80 and ledger.holds(a)
    ledger.drop(a)
    assert ledger.total == 0 and not ledger.holds(a)


@pytest.mark.parametrize(
    "view", [lambda a: a[1:2], lambda a: a.reshape(2, 5), lambda a: a[::-1].reshape(5, 2)[1:].T]
)
def test_a_view_counts_as_the_memory_that_it_keeps_alive(view):
    ledger = Ledger()
    a = np.zeros(10)
    ledger.hold("grads", view(a))
    assert ledger.total == 80 and ledger.holds(a)
    ledger.hold("grads", a)
    assert ledger.total == 80
    ledger.drop(a, view(a))
    assert ledger.total == 0


def test_equal_arrays_of_different_memory_count_twice():
    ledger = Ledger()
    ledger.hold("params", np.zeros(4), np.zeros(4))
    assert ledger.total == 64


def test_a_held_array_is_kept_so_that_its_identity_is_not_given_to_another():
    ledger = Ledger()
    for _ in range(50):
        ledger.hold("temp", np.zeros(3))
    assert ledger.total == 50 * 24


def test_one_memory_has_one_category():
    ledger = Ledger()
    a = np.zeros(2)
    ledger.hold("data", a)
    with pytest.raises(ValueError, match="stay in one category; got grads for one held as data"):
        ledger.hold("grads", a[:1])
    assert ledger.total == 16 and ledger.live["grads"] == 0


def test_dropping_what_is_not_held_is_an_error():
    ledger = Ledger()
    with pytest.raises(KeyError):
        ledger.drop(np.zeros(2))


def test_an_unknown_category_is_an_error_and_counts_nothing():
    ledger = Ledger()
    with pytest.raises(KeyError):
        ledger.hold("weights", np.zeros(2))
    assert ledger.total == 0


def test_the_peak_of_a_sum_is_no_sum_of_peaks():
    """S3: peak per category at its own worst moment; peak_total at one moment, with its parts."""
    ledger = Ledger()
    a, b = np.zeros(10), np.zeros(6)
    ledger.hold("activations", a)
    ledger.drop(a)
    ledger.hold("data", b)
    assert ledger.peak["activations"] == 80 and ledger.peak["data"] == 48
    assert ledger.peak_total == 80
    assert ledger.at_peak["activations"] == 80 and ledger.at_peak["data"] == 0
    c = np.zeros(5)
    ledger.hold("activations", c)
    assert ledger.peak_total == 88
    assert (ledger.at_peak["activations"], ledger.at_peak["data"]) == (40, 48)
    assert sum(ledger.at_peak.values()) == ledger.peak_total


def test_the_composition_at_the_peak_is_a_copy():
    ledger = Ledger()
    a = np.zeros(3)
    ledger.hold("params", a)
    ledger.drop(a)
    assert ledger.at_peak["params"] == 24


def test_bytes_counted_elsewhere_are_set():
    ledger = Ledger()
    ledger.set_bytes("comm_buffers", 100)
    ledger.hold("comm_buffers", np.zeros(1))
    ledger.set_bytes("comm_buffers", 40)
    assert ledger.total == ledger.live["comm_buffers"] == 40
    assert ledger.peak["comm_buffers"] == ledger.peak_total == 108


def test_empty_arrays_count_nothing_but_are_held():
    """A rank without rows holds activations of 0 bytes."""
    ledger = Ledger()
    a = np.zeros((0, 7))
    ledger.hold("activations", a, a)
    assert ledger.total == 0 and ledger.holds(a)
    ledger.drop(a, a)
    assert not ledger.holds(a)


def test_the_vector_is_in_the_order_of_the_categories():
    ledger = Ledger()
    for number, category in enumerate(MEMORY_CATEGORIES, 1):
        ledger.set_bytes(category, number)
    assert ledger.vector() == tuple(range(1, len(MEMORY_CATEGORIES) + 1))
    assert ledger.total == sum(ledger.vector())

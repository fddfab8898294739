"""Published closed forms, against values worked out by hand, and our own model states."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mpisim.memory import published as pub
from mpisim.memory.formulas import model_state_bytes
from mpisim.memory.published import Transformer

RUN = Transformer(a=4, h=8, L=3, t=2, p=4, v=2, B=8, b=2, s=16, vocab=32)
ADAM = {"compute": "float16", "param": "float32", "has_master": True, "optimizer_arrays": 2}


def test_zero_by_hand():
    """C135: 1000 parameters, 4 ranks."""
    assert [pub.zero_model_state_bytes(1000, 4, zero) for zero in range(4)] == [
        16000, 7000, 5500, 4000,
    ]  # fmt: skip
    assert pub.zero_parts(1000, 4, 2) == {
        "parameters": 2000, "gradients": 500, "optimizer states": 3000,
    }  # fmt: skip
    assert pub.zero_largest_model(32_000, 64, 3) == 128_000
    assert pub.zero_largest_model(32_000, 64, 1) == Fraction(32_000 * 16, 67)
    assert [pub.zero_sent_elements(10, zero) for zero in range(4)] == [20, 20, 20, 30]


@pytest.mark.parametrize(
    ("reduce", "totals"),
    [("float16", [16000, 7000, 5500, 4000]), ("float32", [18000, 9000, 6000, 4500])],
)
def test_our_model_states_by_hand(reduce, totals):
    """C135: 16-bit weights, masters and two moments, gradients in 16 and in 32 bits."""
    states = [model_state_bytes(1000, 4, zero, reduce=reduce, **ADAM) for zero in range(4)]
    assert [sum(state.values()) for state in states] == totals
    assert list(states[0]) == ["params", "master_params", "grads", "optimizer"]
    grads = {"float16": 2, "float32": 4}[reduce]
    assert states[1] == {
        "params": 2000, "master_params": 1000, "grads": grads * 1000, "optimizer": 2000,
    }  # fmt: skip
    assert states[2]["grads"] == grads * 250
    assert states[3]["params"] == 500


def test_the_worst_rank_has_the_longest_shard():
    state = model_state_bytes(10, 4, 3, reduce="float32", **ADAM)
    assert state == {"params": 2 * 3, "master_params": 4 * 3, "grads": 4 * 3, "optimizer": 8 * 3}
    few = model_state_bytes(3, 8, 2, reduce="float32", **ADAM)
    assert few == {"params": 6, "master_params": 4, "grads": 4, "optimizer": 8}
    assert sum(model_state_bytes(0, 4, 3, reduce="float32", **ADAM).values()) == 0


def test_without_masters_the_weights_are_in_the_dtype_of_parameters():
    sgd = {"compute": "float32", "reduce": "float32", "param": "float64", "has_master": False}
    assert model_state_bytes(10, 2, 1, optimizer_arrays=1, **sgd) == {
        "params": 80, "master_params": 0, "grads": 40, "optimizer": 40,
    }  # fmt: skip
    assert model_state_bytes(10, 2, 3, optimizer_arrays=0, **sgd) == {
        "params": 40, "master_params": 0, "grads": 20, "optimizer": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_params": -1}, "num_params must be at least 0; got -1"),
        ({"ranks": 0}, "ranks must be at least 1; got 0"),
        ({"zero": 4}, "zero must be 0, 1, 2 or 3; got 4"),
        ({"reduce": "int8"}, "reduce must be one of float64.*got 'int8'"),
        ({"optimizer_arrays": -1}, "optimizer_arrays must be at least 0"),
    ],
)
def test_model_states_refuse_what_is_no_layout(changed, words):
    call = {"num_params": 10, "ranks": 2, "zero": 1, "reduce": "float32", **ADAM} | changed
    with pytest.raises(ValueError, match=words):
        model_state_bytes(**call)


def test_a_layer_by_hand():
    """s b h = 256; 5 a s / h = 40."""
    expected = {
        "none": 256 * 74, "tp": 256 * (10 + 12 + 20), "tp_sp": 256 * 37,
        "tp_selective": 256 * 22, "tp_sp_selective": 256 * 17, "full": 512,
    }  # fmt: skip
    assert tuple(expected) == pub.ACTIVATION_MODES
    for mode, nbytes in expected.items():
        assert pub.korthikanti_layer_bytes(RUN, mode) == nbytes
    parts = pub.korthikanti_layer_parts(RUN)
    assert parts == {"attention": 11 * 256 + 5 * 4 * 256 * 2, "MLP": 19 * 256, "layer norms": 1024}
    assert sum(parts.values()) == expected["none"]


def test_a_stage_by_hand():
    assert pub.korthikanti_first_stage_bytes(RUN, "full") == 512 * 3 * (1 + Fraction(3, 8))
    whole = Transformer(**{**vars(RUN), "v": 1})
    assert pub.korthikanti_first_stage_bytes(whole, "full") == 512 * 3
    assert pub.korthikanti_extra_bytes(RUN) == 256 * 4 / 2
    alone = Transformer(**{**vars(RUN), "p": 1, "v": 1})
    assert pub.korthikanti_extra_bytes(alone) == 128 + 4 * 128 * (1 + 4)
    assert pub.korthikanti_weights_optimizer_bytes(RUN) == 18 * 12 * 3 * 64 // 8


def test_operations_by_hand():
    """C150: recompute does not enter the model's figure; scores are two products, not halved."""
    tokens, h = RUN.B * RUN.s, RUN.h
    weights = 12 * h**2 * RUN.L + h * RUN.vocab
    scores = 2 * 2 * RUN.s * h * tokens * RUN.L
    assert pub.korthikanti_model_flops(RUN) == 6 * weights * tokens + 3 * scores
    assert pub.hardware_flops_one_more_forward(RUN) == 6 * weights * tokens + 4 * scores
    # What the paper prints counts three forwards more, not one.
    assert pub.korthikanti_hardware_flops(RUN) == 6 * weights * tokens + 6 * scores
    assert pub.utilization_percent(600, Fraction(3, 2), 4, 200) == 50


def test_the_playbooks_figures_by_hand():
    assert pub.playbook_num_params(2, 3, 10, 5) == 20 + 10 + 3 * (48 + 26) + 4
    assert pub.playbook_param_bytes(2, 3, 10, 5) == 4 * 256
    assert pub.playbook_activation_bytes(2, 1, 3, 4, "none") == 24 * (34 + 10) + 8
    assert pub.playbook_activation_bytes(2, 1, 3, 4, "selective") == 24 * 34 + 8
    assert pub.playbook_activation_bytes(2, 1, 3, 4, "full") == 24 * 2 + 8
    assert pub.playbook_zero_figure(8 << 30, 8, 0) == (16, 16, 64)
    assert pub.playbook_zero_figure(8 << 30, 8, 1) == (16, 16, 8)
    assert pub.playbook_zero_figure(8 << 30, 8, 2) == (16, 2, 8)
    assert pub.playbook_zero_figure(8 << 30, 8, 3) == (2, 2, 8)


@pytest.mark.parametrize("estimator", pub.ESTIMATORS, ids=lambda estimator: estimator.name)
def test_the_parts_of_an_estimator_are_what_its_source_sums(estimator):
    stages = [zero for zero in (1, 2, 3) if estimator.total(6400, 64, zero) is not None]
    assert stages
    for zero in stages:
        for num_params, ranks in ((6400, 64), (1000, 7), (10, 1)):
            parts = estimator.parts(num_params, ranks, zero)
            assert sum(parts.values()) == estimator.total(num_params, ranks, zero)


def test_estimators_by_hand():
    """Bytes of 64 parameters on 64 ranks."""
    table = {
        estimator.name: [estimator.total(64, 64, zero) for zero in (1, 2, 3)]
        for estimator in pub.ESTIMATORS
    }
    assert table == {
        "ZeRO paper": [256 + 12, 128 + 14, 16],
        "DeepSpeed code": [None, 128 + 18, 18],
        "DeepSpeed docs": [None, 256 + 16, None],
        "Megatron": [384 + 12, None, None],
        "EleutherAI": [384 + 12, 128 + 16, 18],
        "llm-analysis": [384 + 12, 128 + 16, 18],
        "playbook": [256 + 8, 128 + 10, 12],
    }
    assert pub.deepspeed_zero3_bytes(64, 64, 10) == 18 + 40
    assert pub.scaled_weight_bytes(1000, 106) == 1060


def test_bandwidth_factors():
    """C142: a factor by collective, and 0 without a division error for one rank."""
    factors = {
        name: pub.busbw_factor(name, 4)
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    }
    assert factors == {
        "all_reduce": Fraction(3, 2), "all_gather": Fraction(3, 4),
        "reduce_scatter": Fraction(3, 4), "all_to_all": Fraction(3, 4), "broadcast": 1,
    }  # fmt: skip
    assert pub.busbw_factor("all_reduce", 1) == 0
    with pytest.raises(ValueError, match="got 'gather'"):
        pub.busbw_factor("gather", 4)


def test_errors_are_relative_to_the_truth():
    pairs = [(Fraction(4), Fraction(5)), (Fraction(10), Fraction(9))]
    assert pub.relative_errors_percent(pairs) == [25, 10]

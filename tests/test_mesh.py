"""The grid of ranks: coordinates, groups, and the refusal of ranks that do not fit."""

from __future__ import annotations

import itertools

import pytest

from mpisim.errors import ConfigError
from mpisim.mesh import AXES, Mesh, build_mesh

MESHES = [Mesh(), Mesh(4), Mesh(1, 3), Mesh(1, 1, 5), Mesh(2, 2), Mesh(2, 3, 4), Mesh(8, 1, 2)]


@pytest.mark.parametrize("mesh", MESHES)
def test_tp_varies_fastest_then_pp_then_dp(mesh):
    places = itertools.product(range(mesh.dp), range(mesh.pp), range(mesh.tp))
    for rank, place in enumerate(places):
        assert tuple(mesh.coordinate(rank)[axis] for axis in AXES) == place
    assert rank + 1 == mesh.size == mesh.dp * mesh.pp * mesh.tp


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("axis", AXES)
def test_groups_share_all_coordinates_but_one(mesh, axis):
    groups = {mesh.group(rank, axis) for rank in range(mesh.size)}
    # The groups of an axis are disjoint and cover all ranks.
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.degree(axis)
        places = [mesh.coordinate(rank) for rank in group]
        assert [place.pop(axis) for place in places] == list(range(mesh.degree(axis)))
        assert all(place == places[0] for place in places)
        assert all(mesh.group(rank, axis) == group for rank in group)


def test_groups_by_hand():
    mesh = Mesh(dp=2, pp=2, tp=2)
    assert mesh.group(5, "dp") == (1, 5)
    assert mesh.group(5, "pp") == (5, 7)
    assert mesh.group(5, "tp") == (4, 5)
    assert Mesh(dp=3).group(1, "dp") == (0, 1, 2)


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_zero_means_all_ranks(ranks):
    assert build_mesh(0, ranks) == build_mesh(ranks, ranks) == Mesh(dp=ranks)


@pytest.mark.parametrize(("dp", "ranks"), [(2, 4), (4, 2), (3, 1)])
def test_ranks_that_do_not_match_are_refused_with_the_remedy(dp, ranks):
    """Issue 2, bad input: ranks that do not match the mesh."""
    with pytest.raises(ConfigError) as caught:
        build_mesh(dp, ranks)
    text = str(caught.value)
    assert text.startswith("parallel.dp must equal the number of ranks; got ")
    assert f"{dp} with {ranks} ranks" in text
    assert f"--ranks {dp}" in text and f"parallel.dp = {ranks}" in text


def test_a_mesh_cannot_be_changed():
    with pytest.raises(AttributeError):
        Mesh().dp = 2  # type: ignore[misc]

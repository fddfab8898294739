"""The dp x pp x tp grid of ranks: where a rank stands and whom it shares an axis with.

Pure arithmetic, no messages. tp varies fastest, then pp, then dp, so that the ranks of a tp group
are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpisim.errors import ConfigError

AXES = ("dp", "pp", "tp")


@dataclass(frozen=True)
class Mesh:
    """Degrees of the three axes."""

    dp: int = 1
    pp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp

    def degree(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        return {"dp": self.dp, "pp": self.pp, "tp": self.tp}[axis]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the place of `rank` on each axis.

        Examples
        --------
        >>> Mesh(dp=2, pp=2).coordinate(3)
        {'dp': 1, 'pp': 1, 'tp': 0}
        """
        rest, tp = divmod(rank, self.tp)
        dp, pp = divmod(rest, self.pp)
        return {"dp": dp, "pp": pp, "tp": tp}

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks that share all coordinates of `rank` but `axis`, in axis order.

        Examples
        --------
        >>> Mesh(dp=2, pp=2).group(3, "dp")
        (1, 3)
        """
        stride = {"dp": self.pp * self.tp, "pp": self.tp, "tp": 1}[axis]
        first = rank - self.coordinate(rank)[axis] * stride
        return tuple(first + position * stride for position in range(self.degree(axis)))


def stages_text(pp: int, chunks: int) -> str:
    """Return how many stages a model is cut into, and how many of them a place of axis pp holds.

    Examples
    --------
    >>> stages_text(4, 1), stages_text(4, 2)
    ('4 stages', '8 stages on 4 places of axis pp, 2 chunks each')
    """
    if chunks > 1:
        return f"{pp * chunks} stages on {pp} places of axis pp, {chunks} chunks each"
    return f"{pp} stage{'s' * (pp > 1)}"


def build_mesh(dp: int, num_ranks: int, pp: int = 1) -> Mesh:
    """Return the mesh of `num_ranks` ranks: `pp` stages, `dp` replicas (0: all that there are).

    Raises
    ------
    ConfigError
        The degrees do not multiply to the number of ranks.
    """
    mesh = Mesh(dp=dp or max(num_ranks // pp, 1), pp=pp)
    if mesh.size == num_ranks:
        return mesh
    if pp == 1:
        raise ConfigError(
            f"parallel.dp must equal the number of ranks; got {mesh.dp} with {num_ranks} ranks. "
            f"Start with --ranks {mesh.dp} (mpirun -n {mesh.dp}), or set parallel.dp = "
            f"{num_ranks}, or 0 for whatever number is started."
        )
    raise ConfigError(
        f"parallel.dp * parallel.pp must equal the number of ranks; got {mesh.dp} * {pp} = "
        f"{mesh.size} with {num_ranks} ranks. Start with --ranks {mesh.size} (mpirun -n "
        f"{mesh.size}), or choose other degrees; parallel.dp = 0 fits any multiple of parallel.pp."
    )

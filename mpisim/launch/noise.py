"""Keep the launchers' own banners out of what a user sees of a job.

Open MPI and MPICH answer every lost or aborted rank with a box of general advice; ours is one
sentence that names the rank. The boxes are withheld, not dropped: where we know nothing better,
`job` prints them. Works on the raw bytes of one stream, as they arrive.
"""

from __future__ import annotations

import re

_DASHES = b"-" * 74
_RULE = re.compile(rb"(-{74}|={80,})\s*$")
_MPICH_END = b"debugging suggestions"
# A box is ours to withhold only if its first words are known: a launcher that refuses to start
# explains itself in the same kind of box, and a rank may print a rule of dashes.
_BOX_STARTS = re.compile(
    rb"(prterun|mpirun|mpiexec|prte) (has exited|noticed|detected)"
    rb"|MPI_ABORT was invoked|Primary job  terminated normally"
    rb"|=   BAD TERMINATION OF ONE"
)
_LINES = re.compile(
    rb"Abort\(\d+\) on node \d+ .*application called MPI_Abort\("
    rb"|\[(mpiexec|proxy:[\d:]+)@[^\]\s]*\] "
    rb"|\[[^\]\s]+\] \d+ more process(es)? ha(s|ve) sent help message help-mpi-"
    rb"|\[[^\]\s]+\] Set MCA parameter \"[\w]+_base_help_aggregate\" to 0"
)
_MAY_BEGIN = (b"-", b"=", b"[", b"Abort(")
_MAX_HELD = 1 << 16


class Filter:
    """Passes one stream on, withholding the launchers' banners.

    Examples
    --------
    >>> Filter().feed(b"50%|##### |")  # at once: a progress bar does not end its line
    b'50%|##### |'
    """

    def __init__(self) -> None:
        self.withheld = b""
        """Banner text so far."""
        self.midline = False
        """The last byte that was passed on was not a line break."""
        self._partial = b""  # a line without its end, which may yet become a banner
        self._held = b""  # whole lines that may begin a box
        self._box_end = b""  # what ends the box we are in

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they were read; return those to pass on now."""
        data = data.replace(b"\0", b"")  # Open MPI ends some streams with a zero byte
        out = b""
        at_start = bool(self._partial) or not self.midline
        *lines, rest = (self._partial + data).split(b"\n")
        self._partial = b""
        for line in lines:
            out += self._line(line + b"\n", at_start)
            at_start = True
        if self._box_end or self._held or self._may_become_banner(rest):
            self._partial = rest
        else:
            out += rest
        return self._passed(out)

    def idle(self) -> bytes:
        """Return what was held back in case a banner followed, which it did not."""
        out = self._held + self._partial
        if self._box_end:
            return b""
        self._held = self._partial = b""
        return self._passed(out)

    def finish(self) -> bytes:
        """Return what is left when the stream has ended."""
        if self._box_end:
            self._withhold(self._partial)
            self._partial = self._box_end = b""
        return self.idle()

    def _may_become_banner(self, rest: bytes) -> bool:
        if not rest or len(rest) > _MAX_HELD:
            return False
        # Looked for in the middle of a line too: a progress bar does not end its line.
        opening = any(rest.startswith(start) or start.startswith(rest) for start in _MAY_BEGIN)
        return opening or rest.endswith((b"--", b"=="))

    def _passed(self, out: bytes) -> bytes:
        if out:
            self.midline = not out.endswith(b"\n")
        return out

    def _line(self, line: bytes, at_start: bool) -> bytes:
        """Take one whole line; return what to pass on."""
        bare = line.strip()
        if self._box_end:
            self._withhold(line)
            if bare.endswith(self._box_end):
                self._box_end = b""
            return b""
        if self._held.strip() and (start := _BOX_STARTS.match(bare)):
            self._box_end = _MPICH_END if start[0].startswith(b"=") else _DASHES
            self._withhold(self._held + line)
            self._held = b""
            return b""
        if rule := _RULE.search(line):
            before = line[: rule.start()]
            # An empty line before the rule belongs to MPICH's box.
            kept = self._held if not self._held.strip() and not before else b""
            out = self._held[len(kept) :] + before
            self._held = kept + line[rule.start() :]
            return out
        out, self._held = self._held, b""
        if not bare and at_start:
            self._held = line
        elif found := _LINES.search(line):
            self._withhold(line[found.start() :])
            out += line[: found.start()]
        else:
            out += line
        return out

    def _withhold(self, data: bytes) -> None:
        self.withheld = (self.withheld + data)[-_MAX_HELD:]

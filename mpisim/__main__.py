"""`python -m mpisim` is the command `mpisim`; plain ``mpirun`` starts ranks this way."""

import sys

from mpisim.cli import main

if __name__ == "__main__":
    sys.exit(main())

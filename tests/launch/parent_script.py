"""A parent: starts ranks of rank_script.py as its arguments say; started by the tests."""

import sys
from pathlib import Path

from mpisim.launch import launch

script = Path(__file__).with_name("rank_script.py")
sys.exit(launch([sys.executable, str(script), *sys.argv[2:]], int(sys.argv[1])))

"""Says what to do where `python -m fedhet` finds this folder instead of the package inside it.

That happens in the folder that holds the clone, with a Python in which fedhet is not installed.
"""

import os
import sys

clone = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 -- for any Python
sys.exit(
    "error: this is the folder around fedhet, and %s has no fedhet installed; go into the clone"  # noqa: UP031
    " (cd %s), then `make run`, or `source .venv/bin/activate` and python -m fedhet"
    % (sys.executable, clone)
)

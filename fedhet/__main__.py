"""`python -m fedhet`, which is also the console script `fedhet`."""

import sys

from fedhet.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

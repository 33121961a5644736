"""`python -m fedhet`, which is also the console script `fedhet`."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 -- says so before anything fails
    sys.exit("error: fedhet needs Python 3.11 or newer; " + sys.executable + " is older")

try:
    from fedhet.cli.main import main
except ModuleNotFoundError as error:
    from fedhet.cli.errors import report_error

    sys.exit(report_error(error))

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())

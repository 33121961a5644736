"""`python -m fedhet`."""

from fedhet.cli import leave, main

if __name__ == "__main__":
    leave(main())

"""`python -m tierkv` is the command line."""

import sys

from tierkv.cli import main

if __name__ == "__main__":
    sys.exit(main())

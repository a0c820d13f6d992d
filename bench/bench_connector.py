"""`tierkv bench connector` as a program of its own; the measuring is in tierkv/benchmarks/connector.py."""

import sys

from tierkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "connector", *sys.argv[1:]]))

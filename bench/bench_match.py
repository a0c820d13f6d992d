"""`tierkv bench match` as a program of its own; the measuring is in tierkv/benchmarks/match.py."""

import sys

from tierkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "match", *sys.argv[1:]]))

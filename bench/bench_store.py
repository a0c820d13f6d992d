"""`tierkv bench store` as a program of its own; the measuring is in tierkv/benchmarks/store.py."""

import sys

from tierkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "store", *sys.argv[1:]]))

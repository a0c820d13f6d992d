"""`tierkv bench dram` as a program of its own; the measuring is in tierkv/benchmarks/dram.py."""

import sys

from tierkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "dram", *sys.argv[1:]]))

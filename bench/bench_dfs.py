"""`tierkv bench dfs` as a program of its own; the measuring is in tierkv/benchmarks/dfs.py."""

import sys

from tierkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "dfs", *sys.argv[1:]]))

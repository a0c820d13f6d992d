"""`tierkv bench nvme` as a program of its own; the measuring is in tierkv/benchmarks/nvme.py."""

import sys

from tierkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "nvme", *sys.argv[1:]]))

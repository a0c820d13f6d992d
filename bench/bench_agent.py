"""`tierkv bench agent` as a program of its own; the measuring is in tierkv/benchmarks/agent.py."""

import sys

from tierkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "agent", *sys.argv[1:]]))

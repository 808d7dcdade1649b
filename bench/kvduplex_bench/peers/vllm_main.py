"""``vllm bench serve`` as a module: the CPU build's own script looks for a distribution of another name."""

from __future__ import annotations

import argparse

from vllm.benchmarks.serve import add_cli_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())

"""`python -m bench.hopper prepare`: see docs/hopper.md."""

from __future__ import annotations

import argparse
import sys

from bench.hopper import prepare


def main() -> int:
    """What travels is made here; the rest is bench/hopper/device.sh, on the machine."""
    parser = argparse.ArgumentParser(prog="python -m bench.hopper")
    parser.add_argument("what", choices=["prepare"])
    parser.add_argument("--python", default="python3.12", help="a Python of the engine's version")
    return prepare.run(parser.parse_args().python)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m powersgd_lab.report runs/NAME`: a study's tables, figures and recommendation anew.
Thin: it prints the paths that `report.write` returns."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from powersgd_lab import report


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m powersgd_lab.report", description=report.write.__doc__)
    parser.add_argument("study", nargs="+", type=Path, help="a study's directory, runs/NAME")
    for directory in parser.parse_args(arguments).study:
        try:
            written = report.write(directory)
        except (ValueError, OSError) as error:
            print(f"report: {error}", file=sys.stderr)
            return 1
        for path in written:
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

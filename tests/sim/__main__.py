"""A longer soak: `python -m tests.sim 5000`; one seed again: `python -m tests.sim --seed 7`."""

import argparse
import logging
from collections import Counter

from tests.sim.simulation import play


def main() -> None:
    """Play seeds and print what happened in them."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("count", nargs="?", type=int, default=1000, help="seeds to play")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one alone")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    seeds = range(args.first, args.first + args.count) if args.seed is None else [args.seed]
    total: Counter[str] = Counter()
    for number, seed in enumerate(seeds, 1):
        total += play(seed)
        if number % 500 == 0:
            print(f"{number} seeds, {total['ended_finished']} requests finished", flush=True)
    for name, value in sorted(total.items()):
        print(f"{name:40} {value}")


if __name__ == "__main__":
    main()

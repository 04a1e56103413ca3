"""`python -m bench`, which is what `kvferry bench` becomes."""

from bench.endings import exit_with


def _main() -> int:
    from bench.cli import main  # slow, so imported where `exit_with` handles Ctrl-C

    return main()


if __name__ == "__main__":
    exit_with("kvferry bench", _main)

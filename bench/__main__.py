"""`python -m bench`, which is what `kvferry bench` becomes."""

from bench.endings import exit_with


def _main() -> int:
    from bench.cli import main  # it takes a while: here `exit_with` handles a Ctrl-C meanwhile

    return main()


if __name__ == "__main__":
    exit_with("kvferry bench", _main)

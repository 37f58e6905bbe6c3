"""`multihead` and `python -m multihead` start here: Ctrl-C ends at once, from before the first slow import on."""

from multihead.interrupt import ending_at_once


def main() -> None:
    """Run the command line."""
    with ending_at_once():
        from multihead.cli import main as run

        run()


if __name__ == "__main__":
    main()

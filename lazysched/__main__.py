"""Start of the program: ``lazysched`` and ``python -m lazysched``."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def entry_point() -> None:
    """Run the command line and leave with its exit code."""
    try:
        # Importing takes up to a second, in which Ctrl-C meets nobody else who could put it into one line.
        from lazysched.cli import main

        code = main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    entry_point()

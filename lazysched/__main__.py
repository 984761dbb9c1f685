"""Start of the program: ``lazysched`` and ``python -m lazysched``."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 130
AGAIN_S = 0.05
"""Until Ctrl-C is pressed again that came amid a destructor."""


def entry_point() -> None:
    """Run the command line and leave with its exit code."""
    sys.unraisablehook = press_again
    try:
        # Importing takes up to a second, in which Ctrl-C meets nobody else who could put it into one line.
        from lazysched.cli import main

        code = main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


def press_again(lost: UnraisableHookArgs) -> None:
    """Press Ctrl-C once more where Python would only report it and go on: amid a destructor or a weak reference's call.

    Compiling regular expressions while transformers is imported has thousands of these.
    """
    main_thread = threading.main_thread().ident
    if lost.exc_type is not KeyboardInterrupt or main_thread is None:
        sys.__unraisablehook__(lost)
        return
    # Pressed at once it would be lost in the same place.
    timer = threading.Timer(AGAIN_S, signal.pthread_kill, (main_thread, signal.SIGINT))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    entry_point()

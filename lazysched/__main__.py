"""``python -m lazysched``: the command line."""

import sys

from lazysched.cli import main

sys.exit(main())

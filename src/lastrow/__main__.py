"""`python -m lastrow` is `lastrow`."""

from __future__ import annotations

import sys

from lastrow.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m runner``: place a model on devices, or sweep over many placements."""

import sys

from runner.app import main

if __name__ == "__main__":
    sys.exit(main())

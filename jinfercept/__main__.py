"""`python -m jinfercept` is the `jinfercept` command."""

import sys

from jinfercept.cli import main

if __name__ == "__main__":
    sys.exit(main())

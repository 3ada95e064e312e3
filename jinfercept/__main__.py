"""`python -m jinfercept` is the `jinfercept` command."""

import sys

from jinfercept.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m nanoinfer` is the command `nanoinfer`."""

import sys

from nanoinfer.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

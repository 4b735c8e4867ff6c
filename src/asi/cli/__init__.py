"""The command line: each command parses, calls one function of the library, and prints.

Heavy modules are imported inside the commands, so that `asi --help` answers at once.
"""

import sys

from asi.cli import everyday, research
from asi.cli.options import app
from asi.errors import AsiError, Interrupted

__all__ = ["app", "everyday", "main", "research"]


def main() -> None:
    """The entry point: every foreseen error is one line on stderr."""
    try:
        app()
    except Interrupted as stopped:
        sys.stderr.write(f"Stopped: {stopped}\n")
        sys.exit(1)
    except AsiError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(1)
    except OSError as error:
        sys.stderr.write(f"Error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}\n")
        sys.exit(1)

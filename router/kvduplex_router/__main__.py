"""``python -m kvduplex_router``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvduplex_router.errors import ConfigError
from kvduplex_router.flags import config_from_argv
from kvduplex_router.server import run
from kvduplex_router.serving import log_to_stderr


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; 2 when the configuration cannot be used.

    Args:
        argv: Flags; those of the process when not given.
    """
    log_to_stderr()
    try:
        run(config_from_argv(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        sys.stderr.write(f"kvduplex router: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

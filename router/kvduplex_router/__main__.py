"""``python -m kvduplex_router``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from kvduplex_router.errors import ConfigError
from kvduplex_router.flags import config_from_argv
from kvduplex_router.server import run


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; 2 when the configuration cannot be used.

    Args:
        argv: Flags; those of the process when not given.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        run(config_from_argv(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        sys.stderr.write(f"kvduplex router: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

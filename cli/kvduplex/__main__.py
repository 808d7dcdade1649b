"""``python -m kvduplex``."""

from kvduplex.app import main

main()

"""``python -m kvduplex.aws``: the agent."""

from kvduplex.aws.agent import main

main()

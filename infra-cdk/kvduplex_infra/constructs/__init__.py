"""Parts that stacks are put together from."""

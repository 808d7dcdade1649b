"""Transfer interface, NIXL agent, host backend and lease protocol."""

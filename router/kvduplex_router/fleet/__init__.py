"""The engines: addresses, health, load, breakers."""

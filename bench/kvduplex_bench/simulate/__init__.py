"""Fleets in virtual time: the core of the simulated engines, driven faster than any clock."""

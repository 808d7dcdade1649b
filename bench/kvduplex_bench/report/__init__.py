"""Figures and a page from a run's record; nothing is fetched."""

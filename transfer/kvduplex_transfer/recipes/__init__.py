"""Recipes: one model on one kind of host, as a typed file that yields exact commands."""

from kvduplex_transfer.recipes.accelerator import AcceleratorOptions, accelerator_plan
from kvduplex_transfer.recipes.catalogue import Catalogue
from kvduplex_transfer.recipes.schema import Direction, Hosts, Recipe, Stack, Topology

__all__ = [
    "AcceleratorOptions",
    "Catalogue",
    "Direction",
    "Hosts",
    "Recipe",
    "Stack",
    "Topology",
    "accelerator_plan",
]

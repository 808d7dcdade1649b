"""The one error tree of image building."""

from __future__ import annotations

__all__ = ["ImageError", "RecipeError"]


class ImageError(Exception):
    """An image cannot be described or built; the message names the value, the place and the remedy."""


class RecipeError(ImageError):
    """An image recipe is wrong; every line of the message names file, key, value and what is allowed."""

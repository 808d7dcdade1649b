"""What an image stack is built from, read from the folder that the bundle was written to."""

from __future__ import annotations

import json
from pathlib import Path

from kvduplex_image.errors import ImageError
from kvduplex_image.recipe import load_recipe
from kvduplex_infra.errors import InfraError
from kvduplex_infra.stacks.image import Build

__all__ = ["load_build"]


def load_build(recipe_file: Path, folder: Path, bundle_url: str | None) -> Build:
    """Read the recipe, and the ``build.json`` beside its bundle.

    Raises:
        InfraError: A file is missing or wrong, or no place was given that the bundle was copied to.
    """
    if bundle_url is None or not bundle_url.startswith("s3://"):
        raise InfraError(
            f"bundle: {bundle_url} is no s3://BUCKET/KEY; copy the bundle to S3 and add -c bundle=s3://..."
        )
    facts_file = folder / "build.json"
    try:
        recipe = load_recipe(recipe_file)
        facts = json.loads(facts_file.read_text())
        return Build(recipe, facts["parent_image"], bundle_url, facts["sha256"])
    except ImageError as error:
        raise InfraError(str(error)) from error
    except OSError as error:
        raise InfraError(
            f"{facts_file}: {error.strerror}; make it first: python -m kvduplex_image bundle {recipe_file}"
        ) from error
    except (ValueError, KeyError) as error:
        raise InfraError(f"{facts_file}: not what `bundle` writes: {error}; run it again") from error

"""``python -m kvduplex_image``: from an image recipe to a bundle, a Packer template and Image Builder documents."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import boto3
import typer

from kvduplex_image.bundle import make_bundle
from kvduplex_image.container import EXTRAS, check_base, write_context
from kvduplex_image.errors import ImageError
from kvduplex_image.imagebuilder import components, image_recipe
from kvduplex_image.packer import packer_plugins, packer_template
from kvduplex_image.publish import publish as publish_image
from kvduplex_image.recipe import Flavour, ImageRecipe, load_recipe
from kvduplex_image.requirements import check_installed, closure, hashed_requirements, wheel_hashes

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
ROOT = Path(__file__).resolve().parents[2]

RecipeFile = Annotated[Path, typer.Argument(help="Image recipe, e.g. ami/images/cpu.yaml.")]
OutFolder = Annotated[Path, typer.Option(help="Folder to write into.")]


@app.command()
def wheels(recipe_file: RecipeFile, folder: Annotated[Path, typer.Option(help="Where wheels are kept.")]) -> None:
    """Download the wheels that the image's requirements are pinned by; needs the engine environment (`make setup`)."""
    _download(folder, _pins(_extras(load_recipe(recipe_file))))


@app.command()
def bundle(
    recipe_file: RecipeFile,
    folder: Annotated[Path, typer.Option("--wheels", help="Wheels downloaded by the command of that name.")],
    parent: Annotated[str | None, typer.Option(help="Parent image id; resolved through SSM when not given.")] = None,
    carry: Annotated[bool, typer.Option("--carry/--no-carry", help="Put the wheels into the bundle.")] = False,
    out: OutFolder = Path("build/image"),
) -> None:
    """Build kvduplex's wheel and the bundle; write them, the requirements and `build.json`, which the others read."""
    recipe = load_recipe(recipe_file)
    pins = _pins(_extras(recipe))
    made = make_bundle(
        recipe,
        parent_image=parent or resolve_parent(recipe),
        wheel=_kvduplex_wheel(out),
        requirements=hashed_requirements(pins, wheel_hashes(folder, pins)),
        engine_requirements=_engine_requirements(recipe, recipe_file),
        wheels=folder if carry else None,
    )
    digest = made.write(archive := out / f"{recipe.name}.tar.gz")
    facts = {"parent_image": parent or resolve_parent(recipe), "bundle": archive.name, "sha256": digest}
    (out / "build.json").write_text(json.dumps(facts, indent=1) + "\n")
    _say(f"{archive}: sha256 {digest}")


@app.command()
def packer(recipe_file: RecipeFile, out: OutFolder = Path("build/image")) -> None:
    """Write the Packer template beside the bundle."""
    facts = _build_facts(out)
    template = packer_template(
        load_recipe(recipe_file),
        parent_image=facts["parent_image"],
        bundle=facts["bundle"],
        bundle_sha256=facts["sha256"],
    )
    target = out / "image.pkr.json"
    target.write_text(json.dumps(template, indent=1) + "\n")
    (out / "plugins.pkr.json").write_text(json.dumps(packer_plugins(), indent=1) + "\n")
    _say(f"{target}: build it with `packer init {out} && packer build {out}`")


@app.command()
def imagebuilder(
    recipe_file: RecipeFile,
    bundle_url: Annotated[str, typer.Option(help="s3://BUCKET/KEY that the bundle was copied to.")],
    account: Annotated[str, typer.Option(help="Account that owns the components.")],
    out: OutFolder = Path("build/image"),
) -> None:
    """Write the Image Builder components and recipe beside the bundle."""
    facts, recipe = _build_facts(out), load_recipe(recipe_file)
    parts = components(recipe, bundle_url=bundle_url, bundle_sha256=facts["sha256"])
    for part in parts:
        (out / f"{part.name}.yaml").write_text(part.data)
    listing = [{k: v for k, v in dataclasses.asdict(part).items() if k != "data"} for part in parts]
    (out / "components.json").write_text(json.dumps(listing, indent=1) + "\n")
    document = image_recipe(recipe, parts, parent_image=facts["parent_image"], account=account)
    (out / "image-recipe.json").write_text(json.dumps(document, indent=1) + "\n")
    _say(f"{out}: {len(parts)} components, image-recipe.json")


@app.command()
def container(
    base: Annotated[str, typer.Option(help="Base image with Python, NAME@sha256:DIGEST.")],
    folder: Annotated[Path, typer.Option("--wheels", help="Where wheels are kept; missing ones are downloaded.")],
    out: OutFolder = Path("build/router"),
) -> None:
    """Write the folder that the router's container is built in."""
    base = check_base(base)
    pins = _pins(EXTRAS)
    _download(folder, pins)
    requirements = hashed_requirements(pins, wheel_hashes(folder, pins))
    with tempfile.TemporaryDirectory() as made:
        write_context(out, wheel=_kvduplex_wheel(Path(made)), requirements=requirements)
    _say(f"{out}: build it with `docker build --build-arg PYTHON_IMAGE={base} --tag kvduplex-router {out}`")


@app.command()
def publish(
    manifest: Annotated[Path, typer.Argument(help="manifest.json, as the build took it from the image.")],
    ami: Annotated[str, typer.Option(help="Id of the image.")],
    region: Annotated[str, typer.Option(help="Region of the parameters.")],
) -> None:
    """Write an image's id and the summary of its manifest to the Parameter Store."""
    ssm = boto3.client("ssm", region_name=region)
    for name in publish_image(json.loads(manifest.read_text()), ami=ami, ssm=ssm):
        _say(name)


def resolve_parent(recipe: ImageRecipe) -> str:
    """Id of the parent image; asks SSM when the recipe names a parameter.

    Raises:
        ImageError: The parameter does not exist in the recipe's region.
    """
    if recipe.parent.ami:
        return recipe.parent.ami
    name = recipe.parent.ssm_parameter or ""
    found = boto3.client("ssm", region_name=recipe.region).get_parameters(Names=[name])["Parameters"]
    if not found:
        raise ImageError(
            f"parent.ssm_parameter: {name} does not exist in {recipe.region}; name another, or give parent.ami"
        )
    return found[0]["Value"]


def main() -> None:
    """Run the command line."""
    try:
        app()
    except ImageError as error:
        sys.stderr.write(f"kvduplex_image: {error}\n")
        sys.exit(2)


def _pins(extras: tuple[str, ...]) -> Mapping[str, str]:
    check_installed(ROOT / "pyproject.toml", extras)
    return closure("kvduplex", extras)


def _download(folder: Path, pins: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    have = wheel_hashes(folder, pins)
    missing = [f"{name}=={version}" for name, version in pins.items() if name not in have]
    if missing:
        _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), *missing)
    _say(f"{folder}: wheels of {len(pins)} packages, {len(missing)} of them new")


def _extras(recipe: ImageRecipe) -> tuple[str, ...]:
    return ("router", "bench", "aws", *(("engine-cpu",) if recipe.flavour is Flavour.CPU else ()))


def _engine_requirements(recipe: ImageRecipe, recipe_file: Path) -> str | None:
    if recipe.engine.requirements is None:
        return None
    file = recipe_file.parent / recipe.engine.requirements
    if not file.is_file():
        raise ImageError(f"{recipe_file}: engine.requirements: {file} does not exist; docs/ami.md says how to make it")
    return file.read_text()


def _kvduplex_wheel(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(ROOT))
    return max(out.glob("kvduplex-*.whl"), key=lambda path: path.stat().st_mtime)


def _build_facts(out: Path) -> dict[str, Any]:
    file = out / "build.json"
    if not file.is_file():
        raise ImageError(f"{file} does not exist; run `python -m kvduplex_image bundle` first")
    facts: dict[str, Any] = json.loads(file.read_text())
    return facts


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], check=False
    )
    if done.returncode:
        raise ImageError(f"pip {arguments[0]} failed with status {done.returncode}; its message is above")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()

"""Entry point of the CDK: ``cdk deploy --all -c cluster=clusters/NAME.yaml``, or ``-c image=RECIPE`` for an image.

Runs without the CDK's command line too: ``python app.py --cluster clusters/trn2.yaml --output cdk.out``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from aws_cdk import App

from kvduplex_infra.build import build_cluster
from kvduplex_infra.checks import Assembly, inspect
from kvduplex_infra.cluster import load_cluster
from kvduplex_infra.cluster.fit import notes
from kvduplex_infra.errors import InfraError
from kvduplex_infra.image_build import load_build
from kvduplex_infra.nag import acknowledge, acknowledge_image, guard
from kvduplex_infra.stacks.image import ImageStack

_SETTINGS = Path(__file__).with_name("cdk.json")
_REFUSED = 2


def main() -> int:
    """Synthesise what the context or the command line names; 2 when it is refused."""
    options = _options()
    # Feature flags change templates, so a run without the CDK's command line must have the same.
    app = App(outdir=options.output, context=json.loads(_SETTINGS.read_text())["context"])
    account = os.environ.get("CDK_DEFAULT_ACCOUNT")
    try:
        _fill(app, options, account)
    except InfraError as error:
        sys.stderr.write(f"{error}\n")
        return _REFUSED
    guard(app)
    findings = inspect(Assembly.of_folder(Path(app.synth().directory)))
    for finding in findings:
        sys.stderr.write(f"{finding}\n")
    return _REFUSED if findings else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Synthesise the stacks of a kvduplex cluster, or of an image.")
    parser.add_argument("--cluster", help="cluster file; with the CDK's command line: -c cluster=FILE")
    parser.add_argument("--image", help="image recipe; with the CDK's command line: -c image=FILE")
    parser.add_argument("--build", help="folder of the image's bundle: -c build=FOLDER")
    parser.add_argument("--bundle", help="s3://BUCKET/KEY that the bundle was copied to: -c bundle=URL")
    parser.add_argument("--output", help="folder for the templates; the CDK's command line sets its own")
    return parser.parse_args()


def _fill(app: App, options: argparse.Namespace, account: str | None) -> None:
    if (cluster := options.cluster or app.node.try_get_context("cluster")) is not None:
        _cluster(app, Path(cluster), account)
    elif (image := options.image or app.node.try_get_context("image")) is not None:
        _image(app, Path(image), account, options)
    else:
        raise InfraError("nothing named; add -c cluster=clusters/trn2.yaml (or --cluster FILE)")


def _cluster(app: App, file: Path, account: str | None) -> None:
    cluster = load_cluster(file, now=datetime.now(UTC))
    stacks = build_cluster(app, cluster, account=account)
    for note in notes(cluster):
        sys.stderr.write(f"note: {note}\n")
    acknowledge(stacks, cluster)


def _image(app: App, recipe: Path, account: str | None, options: argparse.Namespace) -> None:
    folder = options.build or app.node.try_get_context("build") or "build/image"
    bundle = options.bundle or app.node.try_get_context("bundle")
    acknowledge_image(ImageStack(app, build=load_build(recipe, Path(folder), bundle), account=account))


if __name__ == "__main__":
    sys.exit(main())

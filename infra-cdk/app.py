"""Entry point of the CDK: ``cdk deploy --all -c cluster=clusters/NAME.yaml``.

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
from kvduplex_infra.nag import acknowledge, guard

_SETTINGS = Path(__file__).with_name("cdk.json")


def main() -> int:
    """Synthesise what the context or the command line names; 2 when it is refused."""
    parser = argparse.ArgumentParser(description="Synthesise the stacks of a kvduplex cluster.")
    parser.add_argument("--cluster", type=Path, help="cluster file; with the CDK's command line: -c cluster=FILE")
    parser.add_argument("--output", help="folder for the templates; the CDK's command line sets its own")
    options = parser.parse_args()
    # Feature flags change templates, so a run without the command line must have the same.
    app = App(outdir=options.output, context=json.loads(_SETTINGS.read_text())["context"])
    named = options.cluster or app.node.try_get_context("cluster")
    if named is None:
        sys.stderr.write("app.py: no cluster named; add -c cluster=clusters/trn2.yaml (or --cluster FILE)\n")
        return 2
    try:
        cluster = load_cluster(Path(named), now=datetime.now(UTC))
        stacks = build_cluster(app, cluster, account=os.environ.get("CDK_DEFAULT_ACCOUNT"))
    except InfraError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for note in notes(cluster):
        sys.stderr.write(f"note: {note}\n")
    acknowledge(stacks, cluster)
    guard(app)
    findings = inspect(Assembly.of_folder(Path(app.synth().directory)))
    for finding in findings:
        sys.stderr.write(f"{finding}\n")
    return 2 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

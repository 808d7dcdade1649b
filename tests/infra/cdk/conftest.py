"""Clusters synthesised once a run, by the same program a person runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvduplex_infra.checks import Assembly

ROOT = Path(__file__).parents[3]
APP = ROOT / "infra-cdk" / "app.py"
CLUSTERS = ROOT / "infra-cdk" / "clusters"
ACCOUNT = "123456789012"
SYNTH_TIMEOUT_S = 110

Synth = Callable[..., Path]


def environment(**more: str) -> dict[str, str]:
    """What the CDK needs, without anything of a real account."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_"))}
    return kept | {"JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "1", "CDK_DEFAULT_ACCOUNT": ACCOUNT, **more}


def run_app(cluster: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """Run the CDK app on a cluster file."""
    return subprocess.run(
        [sys.executable, str(APP), "--cluster", str(cluster), "--output", str(output)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SYNTH_TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="session")
def synth(tmp_path_factory: pytest.TempPathFactory) -> Synth:
    """Synthesise a shipped cluster, with some keys changed; the same request is answered from the first run."""
    known: dict[str, Path] = {}

    def make(name: str, /, **changes: object) -> Path:
        key = f"{name}{sorted(changes.items(), key=str)}"
        if key not in known:
            folder = tmp_path_factory.mktemp(name)
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump({**yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text()), **changes}))
            done = run_app(file, folder / "out")
            assert done.returncode == 0, done.stderr[-4000:]
            known[key] = folder / "out"
        return known[key]

    return make


@pytest.fixture(scope="session")
def assembly(synth: Synth) -> Callable[..., Assembly]:
    """The templates of a shipped cluster, with some keys changed."""
    return lambda name, /, **changes: Assembly.of_folder(synth(name, **changes))

"""cfn-lint, offline, over every template of every cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.infra
KEPT = {
    "W1011": "the store's password is a dynamic reference to Secrets Manager already; the rule asks for just that",
    "W3010": "EFA, capacity and reservations are bound to zones, so the cluster file names them",
    "W3005": "the CDK writes out dependencies that references imply",
}


def lint(files: list[Path], region: str) -> str:
    program = Path(sys.executable).with_name("cfn-lint")
    command = [str(program), "-r", region, "--ignore-checks", *KEPT, "--", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize(("name", "region"), [("trn2", "us-east-2"), ("trn1", "us-east-1"), ("cpu-smoke", "us-east-2")])
def test_templates_are_sound_for_cloudformation(synth: Callable[..., Path], name: str, region: str) -> None:
    assert lint(sorted(synth(name).glob("*.template.json")), region) == ""


def test_routers_in_containers_are_sound_for_cloudformation(synth: Callable[..., Path]) -> None:
    image = "123456789012.dkr.ecr.us-east-2.amazonaws.com/kvduplex-router@sha256:" + "0" * 64
    router = {"platform": "ecs", "count": 2, "container": {"image": image}}
    assert lint(sorted(synth("trn2", router=router).glob("*.template.json")), "us-east-2") == ""


def test_the_linter_does_find_faults(tmp_path: Path) -> None:
    broken = tmp_path / "x.template.json"
    broken.write_text('{"Resources": {"A": {"Type": "AWS::EC2::Subnet", "Properties": {"Nope": 1}}}}')
    assert "Nope" in lint([broken], "us-east-2")

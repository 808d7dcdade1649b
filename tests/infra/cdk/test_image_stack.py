"""An image's pipeline stands apart from clusters, and a byte changed in what it is built from is a new version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvduplex_infra.checks import Assembly, inspect

pytestmark = pytest.mark.infra
ROOT = Path(__file__).parents[3]
APP = ROOT / "infra-cdk" / "app.py"


def run_app(tmp_path: Path, sha256: str, *, bundle: str = "s3://amzn-s3-demo-bucket/b.tar.gz") -> Any:
    folder = tmp_path / sha256[-4:]
    folder.mkdir()
    facts = {"parent_image": "ami-0123456789abcdef0", "bundle": "b.tar.gz", "sha256": sha256}
    (folder / "build.json").write_text(json.dumps(facts))
    recipe = ROOT / "ami" / "images" / "neuron.yaml"
    arguments = ["--image", str(recipe), "--build", str(folder), "--bundle", bundle, "--output", str(folder / "out")]
    command = [sys.executable, str(APP), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False), folder / "out"


def synthesised(tmp_path: Path, sha256: str) -> Assembly:
    done, out = run_app(tmp_path, sha256)
    assert done.returncode == 0, done.stderr[-3000:]
    assembly = Assembly.of_folder(out)
    assert inspect(assembly) == []
    return assembly


def versions(assembly: Assembly) -> dict[str, str]:
    found = {c.properties["Name"]: c.properties["Version"] for c in assembly.resources("AWS::ImageBuilder::Component")}
    (recipe,) = assembly.resources("AWS::ImageBuilder::ImageRecipe")
    return found | {"recipe": recipe.properties["Version"]}


def test_a_changed_bundle_is_a_new_version_of_every_part(tmp_path: Path) -> None:
    assemblies = [synthesised(tmp_path, sha256) for sha256 in ("a" * 64, "a" * 63 + "b")]
    first, second = map(versions, assemblies)
    assert first.keys() == second.keys()
    assert not [name for name in first if first[name] == second[name]]
    (distribution,) = assemblies[0].resources("AWS::ImageBuilder::DistributionConfiguration")
    (target,) = distribution.properties["Distributions"]
    (parameter,) = target["SsmParameterConfigurations"]
    assert parameter["ParameterName"] == "/imagebuilder/kvduplex/neuron/0.1.0/ami"
    assert target["AmiDistributionConfiguration"]["Name"].startswith("kvduplex-neuron-0.1.0-")


def test_a_bundle_that_is_not_in_s3_is_refused(tmp_path: Path) -> None:
    done, _ = run_app(tmp_path, "c" * 64, bundle="file:///b.tar.gz")
    assert done.returncode == 2
    assert "copy the bundle to S3" in done.stderr

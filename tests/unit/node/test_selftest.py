"""The boot self-test on recorded machines, and the command that runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvduplex.errors import UsageError
from kvduplex.node.command import app
from kvduplex.node.errors import ManifestError
from kvduplex.node.manifest import ImageManifest
from kvduplex.node.selftest import _DPKG, _VERSIONS, image_findings
from kvduplex_transfer.hostview import FixtureHost, command_slug
from kvduplex_transfer.interface import Severity

PYTHON = "/opt/kvduplex/venv/bin/python"
MANIFEST = ImageManifest(
    flavour="neuron",
    version="0.1.0",
    engine_python=PYTHON,
    held_packages=("aws-neuronx-dkms",),
    debian_packages={"aws-neuronx-dkms:amd64": "2.26", "curl:amd64": "8"},
    engine_python_packages={"vllm": "0.29.0", "nixl": "1.4.1"},
)


def host_of(root: Path, *, dkms: str = "2.26", nixl: str = "1.4.1") -> FixtureHost:
    """A machine with these versions installed."""
    commands = root / ".commands"
    commands.mkdir(parents=True)
    (commands / command_slug(_DPKG)).write_text(f"aws-neuronx-dkms:amd64 {dkms}\ncurl:amd64 9\n")
    listing = {"vllm": "0.29.0", "nixl": nixl, "added-later": "1"}
    (commands / command_slug((PYTHON, "-c", _VERSIONS))).write_text(json.dumps(listing))
    return FixtureHost(root)


def test_a_machine_as_its_image_was_passes_even_with_unheld_updates(tmp_path: Path) -> None:
    findings = image_findings(MANIFEST, host_of(tmp_path))
    assert [finding.severity for finding in findings] == [Severity.OK, Severity.OK]


def test_an_upgraded_driver_is_a_failure_with_both_versions(tmp_path: Path) -> None:
    driver, _ = image_findings(MANIFEST, host_of(tmp_path, dkms="2.27"))
    assert (driver.severity, driver.seen) == (Severity.FAIL, "aws-neuronx-dkms:amd64 2.27")
    assert driver.fix


def test_a_changed_engine_package_is_a_failure(tmp_path: Path) -> None:
    _, python = image_findings(MANIFEST, host_of(tmp_path, nixl="1.5.1"))
    assert (python.severity, python.seen) == (Severity.FAIL, "nixl 1.5.1")


def test_an_engine_environment_that_does_not_run_is_a_failure(tmp_path: Path) -> None:
    host = host_of(tmp_path)
    (tmp_path / ".commands" / command_slug((PYTHON, "-c", _VERSIONS))).unlink()
    _, python = image_findings(MANIFEST, host)
    assert python.severity is Severity.FAIL
    assert "not found" in python.seen


@pytest.mark.parametrize(("text", "said"), [(None, "was not made from a kvduplex image"), ("{", "damaged")])
def test_a_machine_without_a_manifest_is_told_so(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "manifest.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ManifestError, match=said):
        ImageManifest.read(file)


def test_a_node_file_is_checked_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("cluster: demo\nrole: all\nbackend: host\nmodel: {id: /models/tiny}\n")
    done = CliRunner().invoke(app, ["check", "--file", str(file)], catch_exceptions=False)
    assert done.stdout == f"{file}: cluster demo, backend host: prefill engine, decode engine, router\n"


@pytest.mark.parametrize(
    ("recipe", "engine", "said"),
    [
        ("nope", "{}", "no recipe 'nope'"),
        ("llama-3.1-8b-trn2", "{options: {turbo: 1}}", "turbo: unknown key"),
        ("llama-3.1-8b-trn2", '{advertised_host: "http://10.0.1.10"}', "is neither a host name nor an IP address"),
        ("llama-3.1-8b-trn2", "{advertised_host: 0.0.0.0}", "peers cannot dial"),
    ],
)
def test_what_only_planning_would_refuse_is_refused_by_the_check(
    tmp_path: Path, recipe: str, engine: str, said: str
) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(f"cluster: demo\nrole: prefill\nbackend: neuron\nrecipe: {recipe}\nengine: {engine}\n")
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(app, ["check", "--file", str(file)], catch_exceptions=False)

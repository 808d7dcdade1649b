"""Image recipes, and what is rendered from them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.validate import ParamValidator
from moto import mock_aws

from kvduplex_image.bundle import AMI_FOLDER, Bundle, make_bundle
from kvduplex_image.errors import ImageError, RecipeError
from kvduplex_image.imagebuilder import components, content_version, image_recipe
from kvduplex_image.packer import packer_template
from kvduplex_image.publish import MAX_PARAMETER_BYTES, publish
from kvduplex_image.recipe import ImageRecipe, load_recipe
from kvduplex_image.requirements import closure, hashed_requirements, wheel_hashes

PARENT = "ami-0123456789abcdef0"
SHA = "0" * 64
REQUIREMENTS = f"msgspec==0.23.0 --hash=sha256:{SHA}\n"
SHIPPED = sorted((AMI_FOLDER / "images").glob("*.yaml"))
BUNDLE_URL = "s3://images/kvduplex.tar.gz"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "kvduplex-0.1.0-py3-none-any.whl"
    path.write_bytes(b"wheel")
    return path


def recipe_of(flavour: str) -> ImageRecipe:
    return load_recipe(AMI_FOLDER / "images" / f"{flavour}.yaml")


def bundle_of(flavour: str, built: Path, /, **changes: Any) -> Bundle:
    given: dict[str, Any] = {"parent_image": PARENT, "wheel": built, "requirements": REQUIREMENTS}
    if flavour != "cpu":
        given["engine_requirements"] = REQUIREMENTS
    return make_bundle(recipe_of(flavour), **(given | changes))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid_and_named_for_its_flavour(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.flavour.value == path.stem
    assert recipe.layers[0] == "base"
    assert recipe.layers[-1] == "kvduplex"
    assert all((AMI_FOLDER / "provision" / f"{layer}.sh").is_file() for layer in recipe.layers)


@pytest.mark.parametrize(
    ("flavour", "changes", "said"),
    [
        ("cpu", {"flavor": "x"}, "flavor: unknown key"),
        ("cpu", {"parent": {}}, "parent: give exactly one of ami and ssm_parameter"),
        ("cpu", {"version": "1"}, "version: String should match"),
        ("neuron", {"neuron": None}, "neuron: this section belongs to flavour neuron"),
        ("neuron", {"efa": None}, "efa: flavour neuron needs it"),
        ("neuron", {"engine": {"requirements": "x"}}, "engine.python: flavour neuron runs in"),
        ("cuda", {"engine": {}}, "engine.requirements: name a file of pinned packages"),
        ("neuron", {"neuron": {"packages": ["aws-neuronx-dkms"]}}, "neuron.packages.0: String should match"),
        ("neuron", {"efa": {"installer_version": "latest"}}, "efa.installer_version: String should match"),
        ("cpu", {"cloudwatch_agent": {}}, "cloudwatch_agent.version: Field required"),
        ("cpu", {"cloudwatch_agent": {"version": "latest"}}, "cloudwatch_agent.version: String should match"),
        ("cpu", {"cloudwatch_agent": {"version": "1.300072.0"}}, "cloudwatch_agent.version: String should match"),
        ("neuron", {"efa": {"installer_version": "1.50.0", "url": "http://x.org"}}, "efa.url: String should match"),
    ],
)
def test_a_wrong_recipe_is_refused_with_file_key_and_reason(
    tmp_path: Path, flavour: str, changes: dict[str, Any], said: str
) -> None:
    values = yaml.safe_load((AMI_FOLDER / "images" / f"{flavour}.yaml").read_text()) | changes
    file = tmp_path / "image.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert f"{file}: {said}" in str(caught.value)


def test_the_published_key_fingerprints_are_what_layers_check() -> None:
    settings = recipe_of("neuron").settings(parent_image=PARENT)
    assert settings["EFA_KEY_FINGERPRINT"] == "4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC"
    assert settings["NEURON_KEY_FINGERPRINT"] == "00FA2C1079260870A76D2C285749CAD8646D9185"
    assert settings["NEURON_PACKAGES"] == "parent"
    assert settings["CLOUDWATCH_AGENT_KEY_FINGERPRINT"] == "937616F3450B7D806CBD9725D58167303B789C72"
    assert "CLOUDWATCH_AGENT_SHA256" not in settings


@pytest.mark.parametrize("flavour", ["cpu", "neuron", "cuda"])
def test_the_cloudwatch_agent_is_a_layer_of_images_that_ask_for_it(flavour: str) -> None:
    recipe = recipe_of(flavour)
    parts = [part.name for part in components(recipe, bundle_url=BUNDLE_URL, bundle_sha256=SHA)]
    assert f"kvduplex-{flavour}-cloudwatch" in parts
    without = recipe.model_copy(update={"cloudwatch_agent": None})
    assert [layer for layer in recipe.layers if layer not in without.layers] == ["cloudwatch"]
    assert not [key for key in without.settings(parent_image=PARENT) if "CLOUDWATCH" in key]


@pytest.mark.parametrize("flavour", ["cpu", "neuron", "cuda"])
def test_two_bundles_of_the_same_content_are_the_same_bytes(tmp_path: Path, wheel: Path, flavour: str) -> None:
    first, second = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    assert bundle_of(flavour, wheel).write(first) == bundle_of(flavour, wheel).write(second)
    assert first.read_bytes() == second.read_bytes()


def test_a_bundle_checks_itself_and_runs_its_scripts(tmp_path: Path, wheel: Path) -> None:
    archive = tmp_path / "bundle.tar.gz"
    bundle_of("neuron", wheel).write(archive)
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    out = tmp_path / "out"
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"], cwd=out, check=True, timeout=30)
    done = subprocess.run(
        [out / "provision/run.sh", "toaster"], check=False, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert "no layer 'toaster'" in done.stderr
    assert "PARENT_IMAGE=ami-0123456789abcdef0\n" in (out / "settings.env").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"requirements": "msgspec==0.23.0\n"}, r"requirements.txt:1: .* has no --hash"),
        ({"wheel": Path("/nonexistent/kvduplex.whl")}, "not a built wheel of kvduplex"),
        ({"engine_requirements": None}, "needs a file of pinned packages with checksums"),
    ],
)
def test_a_bundle_without_a_pin_is_refused(wheel: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ImageError, match=said):
        bundle_of("neuron", wheel, **changes)


def test_requirements_are_the_closure_with_a_checksum_each(tmp_path: Path) -> None:
    pins = closure("kvduplex", ["router"])
    assert {"fastapi", "starlette", "msgspec", "uvicorn"} <= pins.keys()
    assert {"pytest", "kvduplex", "torch", "torchvision"}.isdisjoint(pins)
    with pytest.raises(ImageError, match="no wheel of it in the wheel folder"):
        hashed_requirements(pins, wheel_hashes(tmp_path, pins))
    (tmp_path / f"msgspec-{pins['msgspec']}-py3-none-any.whl").write_bytes(b"x")
    only = {"msgspec": pins["msgspec"]}
    (line,) = hashed_requirements(only, wheel_hashes(tmp_path, only)).splitlines()
    assert re.fullmatch(r"msgspec==\S+ --hash=sha256:[0-9a-f]{64}", line)


@pytest.mark.infra
@pytest.mark.parametrize("flavour", ["cpu", "neuron", "cuda"])
def test_packer_understands_the_template(tmp_path: Path, flavour: str) -> None:
    """Debian's Packer 1.6 checks syntax, and every key of the builder but the two that are younger than it."""
    packer = shutil.which("packer")
    if packer is None:
        pytest.skip("packer is not installed")
    template = packer_template(recipe_of(flavour), parent_image=PARENT, bundle="bundle.tar.gz", bundle_sha256=SHA)
    (tmp_path / "bundle.tar.gz").write_bytes(b"")
    variables = [f"-var={name}=x" for name in template["variable"]]

    def validate(folder: str, content: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
        target = tmp_path / folder / "image.pkr.json"
        target.parent.mkdir()
        target.write_text(json.dumps(content))
        command = [packer, "validate", *options, *variables, str(target)]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "CHECKPOINT_DISABLE": "1", "HOME": str(tmp_path), "AWS_REGION": "us-east-2"},
        )  # fmt: skip

    syntax = validate("syntax", template, "-syntax-only")
    assert syntax.returncode == 0, syntax.stdout + syntax.stderr
    old = json.loads(json.dumps(template))
    for key in ("metadata_options", "imds_support"):
        del old["source"]["amazon-ebs"]["kvduplex"][key]
    full = validate("full", old)
    assert full.returncode == 0, full.stdout + full.stderr
    old["source"]["amazon-ebs"]["kvduplex"]["no_such_key"] = 1
    assert validate("wrong", old).returncode != 0


def test_the_template_runs_every_layer_in_order_and_seals_last() -> None:
    template = packer_template(recipe_of("neuron"), parent_image=PARENT, bundle="b.tar.gz", bundle_sha256=SHA)
    steps = [str(step) for step in template["build"][0]["provisioner"]]
    order = [re.search(r"run\.sh (\w+)", step) for step in steps]
    assert [match[1] for match in order if match] == ["base", "efa", "cloudwatch", "neuron", "kvduplex", "seal"]
    source = template["source"]["amazon-ebs"]["kvduplex"]
    assert source["ssh_interface"] == "session_manager"
    assert source["encrypt_boot"]
    assert source["metadata_options"]["http_tokens"] == "required"


def test_one_changed_byte_is_another_component_version() -> None:
    recipe = recipe_of("neuron")
    first = components(recipe, bundle_url=BUNDLE_URL, bundle_sha256=SHA)
    second = components(recipe, bundle_url=BUNDLE_URL, bundle_sha256="1" + SHA[1:])
    again = components(recipe, bundle_url=BUNDLE_URL, bundle_sha256=SHA)
    assert first == again
    assert [part.name for part in first] == [part.name for part in second]
    assert all(a.version != b.version for a, b in zip(first, second, strict=True))


def test_component_documents_follow_the_schema() -> None:
    actions = {"ExecuteBash", "S3Download"}  # EC2 Image Builder user guide, "Action modules"
    for part in components(recipe_of("cuda"), bundle_url=BUNDLE_URL, bundle_sha256=SHA):
        document = yaml.safe_load(part.data)
        assert document["schemaVersion"] == 1.0
        assert len(part.data) < 16_000  # the service's limit on inline data
        assert re.fullmatch(r"\d+\.\d+\.\d+", part.version)
        for phase in document["phases"]:
            assert phase["name"] in {"build", "validate", "test"}
            for step in phase["steps"]:
                assert step["action"] in actions
                assert step["onFailure"] == "Abort"
                commands = step["inputs"]["commands"] if step["action"] == "ExecuteBash" else ["set -euo pipefail"]
                assert commands[0] == "set -euo pipefail"


def test_versions_stay_within_what_the_service_takes() -> None:
    patches = [int(content_version("1.2.3", str(n)).split(".")[2]) for n in range(500)]
    assert max(patches) < 2**30
    assert len(set(patches)) == 500


def test_the_image_builder_recipe_is_accepted_by_the_services_own_model() -> None:
    recipe = recipe_of("cuda")
    parts = components(recipe, bundle_url=BUNDLE_URL, bundle_sha256=SHA)
    document = image_recipe(recipe, parts, parent_image=PARENT, account="123456789012")
    client: Any = boto3.Session(aws_access_key_id="x", aws_secret_access_key="x").client(
        "imagebuilder", region_name="us-east-2"
    )
    shape = client.meta.service_model.operation_model("CreateImageRecipe").input_shape
    report = ParamValidator().validate(document | {"clientToken": "x" * 36}, shape)
    assert not report.has_errors(), report.generate_report()


MANIFEST: dict[str, Any] = {
    "flavour": "neuron",
    "version": "0.1.0",
    "parent_image": PARENT,
    "operating_system": "Ubuntu 24.04",
    "efa_installer": "1.50.0",
    "engine_python": "/opt/x/bin/python",
    "engine_python_packages": {"vllm": "0.29.0", "nixl": "1.4.1", "pip": "24"},
    "debian_packages": {f"package-{n}:amd64": "1" for n in range(900)} | {"aws-neuronx-dkms:amd64": "2.26"},
    "bundle_sha256": {"SHA256SUMS": SHA},
}


def test_publishing_writes_the_id_and_a_summary_that_fits_a_parameter() -> None:
    with mock_aws():
        ssm = boto3.Session(aws_access_key_id="x", aws_secret_access_key="x").client("ssm", region_name="us-east-2")
        assert publish(MANIFEST, ami=PARENT, ssm=ssm) == (
            "/kvduplex/images/neuron/0.1.0/manifest",
            "/kvduplex/images/neuron/0.1.0/ami",
        )
        assert ssm.get_parameter(Name="/kvduplex/images/neuron/0.1.0/ami")["Parameter"]["Value"] == PARENT
        about = ssm.get_parameter(Name="/kvduplex/images/neuron/0.1.0/manifest")["Parameter"]["Value"]
        assert len(about) < MAX_PARAMETER_BYTES
        assert json.loads(about)["packages"] == {"vllm": "0.29.0", "nixl": "1.4.1"}
        assert json.loads(about)["drivers"] == {"aws-neuronx-dkms": "2.26"}
        publish(MANIFEST, ami=PARENT, ssm=ssm)
        with pytest.raises(ImageError, match="a version is one image for good"):
            publish(MANIFEST, ami="ami-0fedcba9876543210", ssm=ssm)

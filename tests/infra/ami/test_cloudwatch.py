"""The CloudWatch layer, really run: a signed package into a copy of this system that is thrown away.

The package and its key are this test's own, and the vendor's server is a folder, given by a `curl` that copies from
it. Everything else is the system's: gpg, dpkg, accounts, access control lists. The copy is an overlay in mount and
network namespaces of its own, so that nothing reaches this machine; tests that cannot make one are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvduplex_image.recipe import CloudWatchAgent

PROVISION = Path(__file__).parents[3] / "ami" / "provision"
VERSION = "1.300072.0b1766"
URL = "https://vendor.example"
NEEDED = ("dpkg-deb", "gpg", "gpgv", "setfacl", "unshare")
CURL = """#!/bin/bash
# The layer's own call: the output after --output, the address last.
while [ $# -gt 1 ]; do [ "$1" = --output ] && out=$2; shift; done
cp "$MIRROR/${1#https://vendor.example/}" "$out"
"""
ENTER = """
mount -t tmpfs tmpfs "$1" && mkdir "$1/upper" "$1/work" "$1/tree" || exit 77
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/tree" || exit 77
mount --rbind /dev "$1/tree/dev" && mount -t proc proc "$1/tree/proc" && mount --rbind "$2" "$1/tree/mnt" || exit 77
exec chroot "$1/tree" bash -c "$3"
"""
PREPARE = (
    "set -e; id kvduplex >/dev/null 2>&1 || useradd --system kvduplex; "
    "install -d -m 0750 -o kvduplex /var/log/kvduplex; "
)
LAYER = "/mnt/provision/cloudwatch.sh"

pytestmark = [
    pytest.mark.infra,
    pytest.mark.skipif(os.geteuid() != 0, reason="layers run as root"),
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in NEEDED), reason=f"needs {', '.join(NEEDED)}"),
]
Run = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Vendor:
    """A folder as the vendor's server shows it.

    Attributes:
        folder: Contents of the server.
        fingerprint: Of the key that signed the package.
    """

    folder: Path
    fingerprint: str

    @property
    def package(self) -> Path:
        return self.folder / "ubuntu" / "amd64" / VERSION / "amazon-cloudwatch-agent.deb"


@pytest.fixture
def vendor(tmp_path: Path) -> Vendor:
    made = Vendor(tmp_path / "mirror", "")
    made.package.parent.mkdir(parents=True)
    _build_package(tmp_path / "build", made.package)
    return Vendor(made.folder, _sign(tmp_path / "gpg", made))


def _build_package(tree: Path, target: Path) -> None:
    (tree / "DEBIAN").mkdir(parents=True)
    control = f"Package: amazon-cloudwatch-agent\nVersion: {VERSION}-1\nArchitecture: all\n"
    control += "Maintainer: vendor <vendor@example.org>\nDescription: stands for the vendor's package\n"
    (tree / "DEBIAN" / "control").write_text(control)
    account = tree / "DEBIAN" / "preinst"
    account.write_text("#!/bin/sh\nid cwagent >/dev/null 2>&1 || useradd --system --no-create-home cwagent\n")
    account.chmod(0o755)
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, target], check=True, capture_output=True)


def _sign(home: Path, vendor: Vendor) -> str:
    home.mkdir(mode=0o700)
    (vendor.folder / "assets").mkdir()

    def gpg(*arguments: str) -> str:
        command = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--no-tty", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    gpg("--passphrase", "", "--quick-generate-key", "vendor <vendor@example.org>", "ed25519", "sign", "never")
    (vendor.folder / "assets" / "amazon-cloudwatch-agent.gpg").write_text(gpg("--armor", "--export"))
    gpg("--detach-sign", "--output", f"{vendor.package}.sig", str(vendor.package))
    listing = gpg("--with-colons", "--fingerprint").splitlines()
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False, timeout=30)
    return next(line.split(":")[9] for line in listing if line.startswith("fpr"))


@pytest.fixture
def run(vendor: Vendor, tmp_path: Path) -> Run:
    """Run a script in the copy, with the layer's settings and changes to them."""
    inside = tmp_path / "inside"
    (inside / "bin").mkdir(parents=True)
    shutil.copytree(PROVISION, inside / "provision")
    shutil.move(vendor.folder, inside / "mirror")
    (inside / "bin" / "curl").write_text(CURL)
    (inside / "bin" / "curl").chmod(0o755)
    (tmp_path / "overlay").mkdir()
    settings = {
        "CLOUDWATCH_AGENT_VERSION": VERSION,
        "CLOUDWATCH_AGENT_URL": URL,
        "CLOUDWATCH_AGENT_KEY_FINGERPRINT": vendor.fingerprint,
        "MIRROR": "/mnt/mirror",
        "PATH": "/mnt/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
    }

    def enter(script: str, **changes: str) -> subprocess.CompletedProcess[str]:
        command = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"]
        command += ["bash", "-c", ENTER, "enter", str(tmp_path / "overlay"), str(inside), PREPARE + script]
        done = subprocess.run(
            command, env=settings | changes, check=False, capture_output=True, text=True, timeout=100
        )  # fmt: skip
        if done.returncode == 77:
            pytest.skip(f"no overlay can be made here: {done.stderr.strip()}")
        return done

    return enter


def test_a_signed_package_is_installed_held_and_may_read_the_logs(run: Run) -> None:
    look = (
        f"{LAYER}; {LAYER}; dpkg-query -W -f '${{Version}}\\n' amazon-cloudwatch-agent; apt-mark showhold; "
        "(umask 0077; echo text >/var/log/kvduplex/decode.log); chown kvduplex /var/log/kvduplex/decode.log; "
        'by() { setpriv --reuid $1 --regid $2 --clear-groups "${@:3}"; }; cd /var/log/kvduplex; '
        "by cwagent cwagent cat decode.log; by cwagent cwagent touch x || echo may not write; "
        "by nobody nogroup cat decode.log || echo nobody else reads"
    )
    done = run(look)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert "cloudwatch: done, 4 change(s)" in said  # the keyring, the package, the logs' rights, the hold
    assert "cloudwatch: done, 0 change(s)" in said
    assert f"{VERSION}-1" in said
    assert said[-5:] == [f"{VERSION}-1", "amazon-cloudwatch-agent", "text", "may not write", "nobody else reads"]


@pytest.mark.parametrize(
    ("script", "changes", "told"),
    [
        ("echo x >>/mnt/mirror/ubuntu/amd64/*/*.deb; ", {}, "its signature does not verify; do not install it"),
        ("", {"CLOUDWATCH_AGENT_KEY_FINGERPRINT": CloudWatchAgent(version=VERSION).key_fingerprint}, "holds the key"),
        ("", {"CLOUDWATCH_AGENT_SHA256": "0" * 64}, f"the recipe says {'0' * 64}"),
        ("", {"CLOUDWATCH_AGENT_VERSION": "1.300001.0b1"}, "cannot download https://vendor.example/ubuntu/amd64/1.3"),
    ],
)
def test_anything_but_the_pinned_and_signed_package_stops_the_build(
    run: Run, script: str, changes: dict[str, str], told: str
) -> None:
    done = run(f"{script}{LAYER} || {{ echo status $?; dpkg-query -W amazon-cloudwatch-agent; }}", **changes)
    assert "status 2" in done.stdout, done.stdout + done.stderr
    assert told in done.stderr
    assert "no packages found matching amazon-cloudwatch-agent" in done.stderr

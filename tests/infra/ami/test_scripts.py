"""The provisioning scripts, before any machine runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

AMI = Path(__file__).parents[3] / "ami"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
LAYERS = ("base", "efa", "cloudwatch", "neuron", "cuda", "cpu", "kvduplex", "seal")


def shell(script: str, *, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script that uses the layers' library."""
    prelude = f"LAYER=test BUNDLE=/nonexistent; . {AMI}/provision/lib.sh; BASH_ARGV0=test\n"
    return subprocess.run(
        ["bash", "-c", prelude + script], check=False, capture_output=True, text=True, timeout=30, cwd=cwd
    )


@pytest.mark.infra
def test_shellcheck_has_nothing_to_say() -> None:
    scripts = sorted(str(path) for path in [*AMI.rglob("*.sh")])
    done = subprocess.run(
        [SHELLCHECK, "--external-sources", f"--source-path={AMI}/provision", *scripts],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_stops_at_the_first_error_and_says_its_name(layer: str) -> None:
    text = (AMI / "provision" / f"{layer}.sh").read_text()
    assert '. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"' in text
    assert f"\nbegin {layer}\n" in text
    assert text.rstrip().endswith("\nend")


def test_a_required_setting_without_a_value_stops_the_build() -> None:
    done = shell('need EFA_INSTALLER_VERSION "which installer"')
    assert done.returncode == 2
    assert "setting EFA_INSTALLER_VERSION has no value: which installer" in done.stderr


def test_a_file_with_another_checksum_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("altered")
    done = shell(f"check_sha256 archive {'0' * 64}", cwd=tmp_path)
    assert done.returncode == 2
    assert f"the recipe says {'0' * 64}" in done.stderr


def test_a_file_that_is_as_wanted_is_left_alone(tmp_path: Path) -> None:
    write = "write_file sub/file 0640 <<<"
    script = f"{write}hello; {write}hello; echo $changed; {write}bye; echo $changed"
    done = shell(script, cwd=tmp_path)
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["1", "2"], done.stderr
    assert (tmp_path / "sub" / "file").stat().st_mode & 0o777 == 0o640


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a key of this test's own and a file signed by it, and the key's fingerprint."""
    folder = tmp_path_factory.mktemp("signed")
    home = folder / "home"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--no-tty"]

    def run(*arguments: str) -> str:
        return subprocess.run([*gpg, *arguments], check=True, capture_output=True, text=True, timeout=60).stdout

    run("--passphrase", "", "--quick-generate-key", "test <test@example.org>", "ed25519", "sign", "never")
    (folder / "key").write_text(run("--armor", "--export", "test@example.org"))
    (folder / "archive").write_text("content")
    run("--detach-sign", "--output", str(folder / "archive.sig"), str(folder / "archive"))
    listing = run("--with-colons", "--fingerprint", "test@example.org").splitlines()
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False, timeout=30)
    return folder, next(line.split(":")[9] for line in listing if line.startswith("fpr"))


def test_the_expected_key_verifies_its_signature_and_no_other(signed: tuple[Path, str]) -> None:
    folder, fingerprint = signed
    spaced = " ".join(fingerprint[i : i + 4] for i in range(0, 40, 4))
    done = shell(f"trusted_key key '{spaced}' keyring; gpgv --keyring ./keyring archive.sig archive", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "archive").write_text("altered")
    assert shell("gpgv --keyring ./keyring archive.sig archive", cwd=folder).returncode != 0


def test_a_key_with_another_fingerprint_is_refused(signed: tuple[Path, str]) -> None:
    folder, fingerprint = signed
    done = shell(f"trusted_key key {'0' * 40} other", cwd=folder)
    assert done.returncode == 2
    assert f"holds the key {fingerprint}, expected {'0' * 40}" in done.stderr
    assert not (folder / "other").exists()


def test_the_cuda_stub_has_what_nixls_libfabric_plugin_asks_for(tmp_path: Path) -> None:
    plugins = sorted(Path(sys.prefix).glob("lib/python*/site-packages/nixl_cu12.libs/nixl/libplugin_LIBFABRIC.so"))
    if not plugins:
        pytest.skip("nixl-cu12 is not installed")
    subprocess.run([AMI / "provision" / "cuda-stub" / "build.sh", tmp_path], check=True, timeout=60)
    done = subprocess.run(
        ["ldd", "-r", plugins[0]], check=False, capture_output=True, text=True, timeout=60,
        env={"LD_LIBRARY_PATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert f"{tmp_path}/libcuda.so.1" in done.stdout
    assert f"{tmp_path}/libcudart.so.12" in done.stdout
    undefined = [line.split()[2] for line in (done.stdout + done.stderr).splitlines() if "undefined symbol" in line]
    assert [name for name in undefined if name.startswith("cu")] == []


@pytest.mark.parametrize("unit", ["kvduplex-engine@", "kvduplex-router", "kvduplex-doctor"])
def test_services_that_move_kv_may_lock_memory_and_none_runs_as_root(unit: str) -> None:
    text = (AMI / "systemd" / f"{unit}.service").read_text()
    assert "\nUser=kvduplex\n" in text
    assert "\nNoNewPrivileges=yes\n" in text
    assert ("\nLimitMEMLOCK=infinity\n" in text) == (unit != "kvduplex-router")

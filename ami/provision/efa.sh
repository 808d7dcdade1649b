#!/usr/bin/env bash
# Layer "efa": Elastic Fabric Adapter driver, rdma-core and libfabric, from AWS's installer.
#
# The installer's archive is signed; its key and fingerprint stand in the EC2 user guide, "Get started with EFA and
# MPI" (efa-start). From 1.48 on the installer checks the signature of every package in it as well.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
begin efa
need EFA_INSTALLER_VERSION "which EFA installer to use, e.g. 1.50.0"
need EFA_INSTALLER_URL "where the installer is downloaded from"
need EFA_KEY_FINGERPRINT "which key must have signed it"
# The installer writes this file: "# EFA installer version: 1.50.0".
readonly RECORD=/opt/amazon/efa_installed_packages

installed_version() { sed -n 's/^# EFA installer version: *//p;1q' "$RECORD" 2>/dev/null || true; }

fetch_installer() { # fetch_installer FOLDER
  local archive="aws-efa-installer-$EFA_INSTALLER_VERSION.tar.gz"
  download "$EFA_INSTALLER_URL/aws-efa-installer.key" "$1/key"
  trusted_key "$1/key" "$EFA_KEY_FINGERPRINT" "$1/keyring.gpg"
  download "$EFA_INSTALLER_URL/$archive" "$1/$archive"
  download "$EFA_INSTALLER_URL/$archive.sig" "$1/$archive.sig"
  gpgv --keyring "$1/keyring.gpg" "$1/$archive.sig" "$1/$archive" ||
    die "$archive: its signature does not verify; do not install it"
  [ -z "${EFA_INSTALLER_SHA256:-}" ] || check_sha256 "$1/$archive" "$EFA_INSTALLER_SHA256"
  tar -xzf "$1/$archive" -C "$1"
}

if [ "$(installed_version)" = "$EFA_INSTALLER_VERSION" ]; then
  say "EFA installer $EFA_INSTALLER_VERSION was run before"
else
  say "EFA installer: found ${RECORD} at '$(installed_version)', installing $EFA_INSTALLER_VERSION"
  apt_update_once
  work=$(mktemp -d)
  fetch_installer "$work"
  check=()
  if [ "$(printf '1.48.0\n%s\n' "$EFA_INSTALLER_VERSION" | sort -V | head -1)" = 1.48.0 ]; then check=(--check-signatures); fi
  (cd "$work/aws-efa-installer" && ./efa_installer.sh -y "${check[@]}") || die "the EFA installer failed; its output is above"
  rm -rf "$work"
  changed=$((changed + 1))
  [ "$(installed_version)" = "$EFA_INSTALLER_VERSION" ] || die "$RECORD does not say $EFA_INSTALLER_VERSION after the installation"
fi
[ -x /opt/amazon/efa/bin/fi_info ] || die "/opt/amazon/efa/bin/fi_info is missing after the installation"
loader_path kvduplex-efa /opt/amazon/efa/lib

mapfile -t packages < <(dpkg-query -W -f '${Package}\n' 'efa*' 'libfabric*' 'rdma-core' 'libibverbs*' 2>/dev/null | sort -u)
hold "${packages[@]}"
end

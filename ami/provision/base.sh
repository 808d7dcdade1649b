#!/usr/bin/env bash
# Layer "base": operating system packages, the service account, folders, limits.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
begin base

# shellcheck disable=SC1091
. /etc/os-release
case "$ID-$VERSION_ID" in
debian-12 | ubuntu-24.04) ;;
*) die "$PRETTY_NAME: not supported; start from Ubuntu 24.04 (images for EC2) or Debian 12 (tests)" ;;
esac

# A compiler, because engines build helpers when they start; libnuma and libhwloc, which vLLM's CPU build and NIXL load.
apt_install ca-certificates curl gnupg logrotate kmod pciutils procps iproute2 systemd udev \
  python3 python3-venv python3-dev gcc g++ libc6-dev libgomp1 libnuma1 libhwloc15

if ! getent group kvduplex >/dev/null; then
  groupadd --system kvduplex
  changed=$((changed + 1))
fi
if ! getent passwd kvduplex >/dev/null; then
  useradd --system --gid kvduplex --home-dir /var/lib/kvduplex --no-create-home --shell /usr/sbin/nologin kvduplex
  changed=$((changed + 1))
fi
make_folder "$PREFIX" 0755 root:root
make_folder /etc/kvduplex 0750 root:kvduplex
make_folder /var/lib/kvduplex 0750 kvduplex:kvduplex
make_folder /var/lib/kvduplex/models 0750 kvduplex:kvduplex
make_folder /var/lib/kvduplex/compile-cache 0750 kvduplex:kvduplex
make_folder /var/log/kvduplex 0750 kvduplex:kvduplex

# RDMA pins memory; the default limit of 64 KiB to 8 MiB makes every registration fail. Services get theirs from
# their units, this is for a person's shell.
write_file /etc/security/limits.d/90-kvduplex.conf 0644 <<'LIMITS'
*    soft memlock unlimited
*    hard memlock unlimited
root soft memlock unlimited
root hard memlock unlimited
*    soft nofile  1048576
*    hard nofile  1048576
LIMITS
write_file /etc/sysctl.d/90-kvduplex.conf 0644 <<'SYSCTL'
# One connection per streaming client and per engine pair, and short ports between router and engines.
net.core.somaxconn = 4096
net.ipv4.ip_local_port_range = 20000 65535
# Engines keep weights and KV in memory; swapping them out would stop a turn for seconds.
vm.swappiness = 1
SYSCTL

# A new kernel would leave the accelerator and EFA drivers behind, which were built for this one.
hold linux-aws linux-image-aws linux-headers-aws "linux-image-$(uname -r)" "linux-headers-$(uname -r)"
end

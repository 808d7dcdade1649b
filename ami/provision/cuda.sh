#!/usr/bin/env bash
# Layer "cuda": checks what the parent brings, and holds it.
#
# The parent is the "Deep Learning Base OSS Nvidia Driver" AMI: open kernel module, CUDA, fabric manager, EFA. The
# driver is not replaced, because AWS tests that combination as a whole; a parent that lacks a piece is refused.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
begin cuda

module=$(modinfo -F license nvidia 2>/dev/null || true)
# GPUDirect RDMA over EFA needs the open kernel module, which says so in its licence.
case $module in
*MIT*) ;;
"") die "no nvidia kernel module for kernel $(uname -r); start from the 'Deep Learning Base OSS Nvidia Driver GPU' AMI" ;;
*) die "the nvidia kernel module has licence '$module': the closed one; GPUDirect RDMA over EFA needs the open one" ;;
esac
ldconfig -p | grep -q 'libcuda\.so\.1' || die "libcuda.so.1 is not on the loader path; the parent's driver is incomplete"

# GPUs joined by NVSwitch stay unusable without it.
if systemctl list-unit-files nvidia-fabricmanager.service >/dev/null 2>&1; then
  systemctl is-enabled --quiet nvidia-fabricmanager.service || {
    systemctl enable nvidia-fabricmanager.service
    changed=$((changed + 1))
  }
else
  die "nvidia-fabricmanager.service is missing; start from the 'Deep Learning Base OSS Nvidia Driver GPU' AMI"
fi
mapfile -t packages < <(dpkg-query -W -f '${Package}\n' 'nvidia-driver*' 'nvidia-fabricmanager*' 'nvidia-open*' 'libnvidia-compute*' 'cuda-drivers*' 2>/dev/null | sort -u)
hold "${packages[@]}"
end

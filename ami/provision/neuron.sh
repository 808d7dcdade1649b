#!/usr/bin/env bash
# Layer "neuron": driver, runtime, collectives and tools, and what NIXL's libfabric plugin needs on a Neuron host.
#
# The parent is a Neuron Deep Learning AMI, which brings the SDK and the engine's virtual environment. NEURON_PACKAGES
# says "parent" to keep its versions, or lists "name=version ..." of the Neuron apt repository.
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
begin neuron
need NEURON_PACKAGES "'parent', or the Neuron packages with their versions"
need ENGINE_PYTHON "the interpreter of the virtual environment that has vLLM with the Neuron plugin"
readonly REQUIRED=(aws-neuronx-dkms aws-neuronx-runtime-lib aws-neuronx-collectives aws-neuronx-tools)

add_repository() {
  need NEURON_APT_URL "where the Neuron apt repository is"
  need NEURON_KEY_FINGERPRINT "which key signs it"
  local work codename
  codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
  work=$(mktemp -d)
  download "$NEURON_APT_URL/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB" "$work/key"
  trusted_key "$work/key" "$NEURON_KEY_FINGERPRINT" /usr/share/keyrings/neuron.gpg
  rm -rf "$work"
  write_file /etc/apt/sources.list.d/neuron.list 0644 <<<"deb [signed-by=/usr/share/keyrings/neuron.gpg] $NEURON_APT_URL $codename main"
}

if [ "$NEURON_PACKAGES" = parent ]; then
  say "keeping the parent's Neuron packages"
else
  add_repository
  read -r -a packages <<<"$NEURON_PACKAGES"
  for entry in "${packages[@]}"; do
    case $entry in *=*) ;; *) die "NEURON_PACKAGES: '$entry' has no version; write $entry=VERSION" ;; esac
  done
  apt_install "${packages[@]}"
fi
for name in "${REQUIRED[@]}"; do
  package_installed "$name" || die "$name is not installed; start from a Neuron DLAMI, or list it in NEURON_PACKAGES"
done
hold "${REQUIRED[@]}"
[ -x "$ENGINE_PYTHON" ] || die "ENGINE_PYTHON $ENGINE_PYTHON is no program; the Neuron DLAMI has /opt/aws_neuronx_venv_pytorch_inference_vllm_*/bin/python"

# libfabric finds libnrt by the loader alone; without this entry memory registration fails with -FI_ENOSYS.
loader_path kvduplex-neuron /opt/aws/neuron/lib

# NIXL's libfabric plugin is linked to libcuda and libcudart and does not load without them, on any host.
if ldconfig -p | grep -q 'libcuda\.so\.1'; then
  say "libcuda.so.1 is there already"
else
  stub=$PREFIX/lib/cuda-stub
  work=$(mktemp -d)
  "$BUNDLE/provision/cuda-stub/build.sh" "$work"
  for library in libcuda.so.1 libcudart.so.12; do copy_file "$work/$library" "$stub/$library" 0644; done
  rm -rf "$work"
  loader_path kvduplex-cuda-stub "$stub"
fi
end

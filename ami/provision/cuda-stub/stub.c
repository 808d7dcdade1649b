/* Stands for libcuda.so.1 or libcudart.so.12 on hosts without NVIDIA hardware.
 *
 * NIXL's libfabric plugin is linked to both and calls five functions of them, only for CUDA memory. Each answers
 * "no device" (100 in both libraries), so that a caller who does ask is told the truth.
 */
#define NO_DEVICE 100

#ifdef STUB_DRIVER
int cuCtxSetCurrent(void *context) { (void)context; return NO_DEVICE; }
int cuDeviceGetPCIBusId(char *id, int length, int device) { (void)id; (void)length; (void)device; return NO_DEVICE; }
int cuPointerGetAttributes(unsigned count, int *attributes, void **data, unsigned long long pointer) {
  (void)count; (void)attributes; (void)data; (void)pointer;
  return NO_DEVICE;
}
#else
int cudaSetDevice(int device) { (void)device; return NO_DEVICE; }
const char *cudaGetErrorString(int error) { (void)error; return "no CUDA device: this is a stub library"; }
#endif

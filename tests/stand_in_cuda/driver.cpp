// libcuda.so.1: what Triton and its launchers call.  Modules are accepted, launches are counted, nothing is executed.  In a
// capture a launch becomes a node, which counts when it is replayed.
#include <dlfcn.h>

#include <atomic>
#include <cstring>

#define EXPORTED extern "C" __attribute__((visibility("default")))

static std::atomic<long> launches{0}, modules{0};
EXPORTED long stand_in_launches() { return launches; }
EXPORTED long stand_in_modules() { return modules; }

static void* const context = reinterpret_cast<void*>(0x10);
static void* const module = reinterpret_cast<void*>(0x20);

EXPORTED int cuInit(unsigned) { return 0; }
EXPORTED int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
EXPORTED int cuCtxGetCurrent(void** found) { *found = context; return 0; }
EXPORTED int cuCtxGetDevice(int* device) { *device = 0; return 0; }
EXPORTED int cuDeviceGet(int* device, int index) { *device = index; return 0; }
EXPORTED int cuDeviceGetCount(int* n) { *n = 1; return 0; }
EXPORTED int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  static auto contexts = reinterpret_cast<long (*)()>(dlsym(RTLD_DEFAULT, "stand_in_contexts"));  // of the runtime
  *flags = 0;
  *active = contexts ? contexts() >> device & 1 : 1;
  return 0;
}
EXPORTED int cuDevicePrimaryCtxRetain(void** found, int) { *found = context; return 0; }
EXPORTED int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {  // numbers of CUdevice_attribute; an H200
    case 8: *value = 49152; break;          // shared memory of a block
    case 10: *value = 32; break;            // warp
    case 12: case 82: *value = 65536; break;  // registers of a block, of a multiprocessor
    case 16: *value = 132; break;           // multiprocessors
    case 75: *value = 9; break;             // compute capability
    case 76: *value = 0; break;
    case 81: *value = 233472; break;        // shared memory of a multiprocessor
    case 97: *value = 232448; break;        // shared memory that a block may ask for
    default: *value = 1;
  }
  return 0;
}
EXPORTED int cuFuncGetAttribute(int* value, int attribute, void*) {
  *value = attribute == 4 ? 32 : attribute == 0 ? 1024 : 0;  // registers; threads of a block
  return 0;
}
EXPORTED int cuGetErrorString(int, const char** text) { *text = "an error of the stand-in"; return 0; }
EXPORTED int cuGetErrorName(int, const char** text) { *text = "CUDA_ERROR_OF_THE_STAND_IN"; return 0; }
static int loaded(void** found) { modules++; *found = module; return 0; }
EXPORTED int cuModuleLoad(void** found, const char*) { return loaded(found); }
EXPORTED int cuModuleLoadData(void** found, const void*) { return loaded(found); }
EXPORTED int cuModuleLoadDataEx(void** found, const void*, unsigned, void*, void*) { return loaded(found); }
EXPORTED int cuModuleGetFunction(void** function, void*, const char* name) { *function = strdup(name); return 0; }
static int launched(void* stream) {
  static auto captured = reinterpret_cast<int (*)(void*, int*)>(dlsym(RTLD_DEFAULT, "stand_in_launched"));  // of the runtime
  int error = 0;
  if (!captured || !captured(stream, &error)) launches++;
  return error;
}
struct Configuration {  // the beginning of CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
};
EXPORTED int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream) {
  return launched(stream);
}
EXPORTED int cuLaunchKernelEx(const Configuration* given, void*) { return launched(given->stream); }
EXPORTED int cuLaunchCooperativeKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                       void* stream) {
  return launched(stream);
}
EXPORTED int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n) { *n = 2; return 0; }
EXPORTED int cuOccupancyMaxActiveClusters(int* n) { *n = 2; return 0; }
EXPORTED int cuPointerGetAttribute(void* value, int, unsigned long long address) {
  *static_cast<unsigned long long*>(value) = address;
  return 0;
}
EXPORTED int cuGetProcAddress_v2() { return 1; }  // runtimes linked into other libraries find no driver

#define ABSENT(name) EXPORTED int name() { return 0; }
ABSENT(cuCtxSetCurrent)
ABSENT(cuCtxGetLimit)
ABSENT(cuCtxSetLimit)
ABSENT(cuCtxPushCurrent)
ABSENT(cuCtxPopCurrent)
ABSENT(cuFuncSetAttribute)
ABSENT(cuFuncSetCacheConfig)
ABSENT(cuLinkAddData_v2)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate_v2)
ABSENT(cuLinkDestroy)
ABSENT(cuModuleUnload)
ABSENT(cuTensorMapEncodeTiled)

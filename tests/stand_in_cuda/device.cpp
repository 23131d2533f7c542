// Devices, their properties, errors, settings and counters.
#include "stand_in.h"

#include <dlfcn.h>
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace stand_in {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;
std::atomic<bool> stuck{false};
std::atomic<long> contexts{0};  // a bit for each device
std::atomic<bool> started{false}, forked{false};

std::mutex& counters_lock() {
  static auto* lock = new std::mutex;  // never destroyed: streams outlive static objects
  return *lock;
}

std::map<std::string, std::atomic<long>>& counters() {
  static auto* all = new std::map<std::string, std::atomic<long>>;
  return *all;
}

std::map<std::string, std::atomic<long>*> named_settings(Settings& s) {
  return {{"devices", &s.devices}, {"total", &s.total}, {"taken", &s.taken}, {"rate", &s.rate},
          {"compute", &s.compute}, {"kernel_us", &s.kernel_us}, {"lag", &s.lag},
          {"pause_us", &s.pause_us}, {"allocations", &s.allocations}, {"pins", &s.pins}, {"pinned_allocations", &s.pinned_allocations},
          {"pin_bytes", &s.pin_bytes}, {"refused_address", &s.refused_address}, {"driver", &s.driver}};
}

}  // namespace

std::atomic<long>& counter(const char* name) {
  Lock lock(counters_lock());
  return counters()[name];
}

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

bool broken() { return stuck; }

bool in_child() {
  static int failed = pthread_atfork(nullptr, nullptr, [] { forked = started.load(); });
  started = true;
  return forked || failed;
}

void break_device(const char* why) {
  std::fprintf(stderr, "[stand-in] %s\n", why);
  stuck = true;
}

int current_device() { return device_of_thread; }

void use_device(int device) { contexts |= 1l << device; }

Settings& settings() {
  static Settings* made = [] {
    auto* s = new Settings;
    for (auto& [name, value] : named_settings(*s)) {
      std::string key = "STAND_IN_";
      for (char c : name) key += static_cast<char>(std::toupper(c));
      if (const char* text = std::getenv(key.c_str())) *value = static_cast<long>(std::atof(text));
    }
    if (!s->compute && !s->kernel_us) s->kernel_us = 2000;  // on their own clock, nothing takes no time
    if (!s->compute && !s->rate) s->rate = 50'000'000'000;
    return s;
  }();
  return *made;
}

Waiting::Waiting() {
  static auto held = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  static auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  static auto ready = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  if (held && save && ready && ready() && held()) state_ = save();
}

Waiting::~Waiting() {
  static auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
  if (state_) restore(state_);
}

}  // namespace stand_in

using namespace stand_in;

// What tests call.
EXPORTED long stand_in_count(const char* name) { return counter(name); }
EXPORTED long stand_in_counts(char* text, long size) {  // lines of name and number; returns the length
  std::string lines;
  {
    Lock lock(counters_lock());
    for (auto& [name, n] : counters()) lines += name + " " + std::to_string(n) + "\n";
  }
  std::snprintf(text, size, "%s", lines.c_str());
  return static_cast<long>(lines.size());
}
EXPORTED int stand_in_set(const char* name, long value) {
  auto known = named_settings(settings());
  auto found = known.find(name);
  if (found == known.end()) return 1;
  *found->second = value;
  return 0;
}
EXPORTED long stand_in_contexts() { return contexts; }
EXPORTED void stand_in_break(int on) {
  stuck = on;
  last_error = cudaSuccess;
}
EXPORTED void stand_in_failed(const char* why) { break_device(why); }

EXPORTED cudaError_t cudaGetDeviceCount(int* n) {
  ANYWAY;
  bool old = settings().driver < CUDART_VERSION / 1000 * 1000;  // a driver serves all runtimes of its major version
  *n = old ? 0 : static_cast<int>(settings().devices);
  return old ? fail(cudaErrorInsufficientDriver) : cudaSuccess;
}
EXPORTED cudaError_t cudaGetDevice(int* d) { ANYWAY; *d = device_of_thread; return cudaSuccess; }
EXPORTED cudaError_t cudaSetDevice(int d) {
  ENTER;
  if (d < 0 || d >= settings().devices) return fail(cudaErrorInvalidDevice);
  device_of_thread = d;
  use_device(d);  // since CUDA 12
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDriverGetVersion(int* v) { COUNTED; *v = settings().driver; return cudaSuccess; }
EXPORTED cudaError_t cudaRuntimeGetVersion(int* v) { COUNTED; *v = CUDART_VERSION; return cudaSuccess; }
EXPORTED cudaError_t cudaGetLastError() {
  COUNTED;
  if (broken()) return cudaErrorLaunchFailure;
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
EXPORTED cudaError_t cudaPeekAtLastError() { COUNTED; return broken() ? cudaErrorLaunchFailure : last_error; }
EXPORTED const char* cudaGetErrorString(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge: return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnmatched: return "capture was not ended in the same stream as it began";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorStreamCaptureWrongThread: return "attempt to terminate a thread-local capture sequence from another thread";
    default: return "an error of the stand-in";
  }
}
EXPORTED const char* cudaGetErrorName(cudaError_t e) {
  switch (e) {
#define NAMED(error) case error: return #error;
    NAMED(cudaErrorMemoryAllocation)
    NAMED(cudaErrorStreamCaptureUnsupported)
    NAMED(cudaErrorStreamCaptureInvalidated)
    NAMED(cudaErrorStreamCaptureMerge)
    NAMED(cudaErrorStreamCaptureUnmatched)
    NAMED(cudaErrorStreamCaptureUnjoined)
    NAMED(cudaErrorStreamCaptureIsolation)
    NAMED(cudaErrorStreamCaptureImplicit)
    NAMED(cudaErrorCapturedEvent)
    NAMED(cudaErrorStreamCaptureWrongThread)
    default: return "cudaErrorOfTheStandIn";
  }
}
EXPORTED cudaError_t cudaDeviceSynchronize() {
  ENTER;
  if (cudaError_t error = forbidden_on_device()) return fail(error);
  synchronize_all();
  return broken() ? fail(cudaErrorLaunchFailure) : cudaSuccess;
}

// The properties of an H200, as far as torch, Inductor and Triton ask.
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  ENTER;
  std::memset(p, 0, sizeof *p);
  std::snprintf(p->name, sizeof p->name, "NVIDIA H200 (stand-in)");
  p->totalGlobalMem = settings().total;
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->textureAlignment = 512;
  p->memoryBusWidth = 6144;
  p->l2CacheSize = 60 << 20;
  p->asyncEngineCount = 3;
  p->pciBusID = 1 + device;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = 1;
  p->cooperativeLaunch = p->hostRegisterSupported = 1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  ENTER;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  ENTER;
  std::snprintf(text, size, "0000:%02x:00.0", 1 + device);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  ENTER;
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  ENTER;
  *can = device != peer;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { ENTER; return cudaSuccess; }

// What torch asks the driver for through the runtime.
static int driver_context(int device, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  if (active) *active = stand_in_contexts() >> device & 1;
  return 0;
}
static int driver_error(int, const char** text) { *text = "an error of the stand-in"; return 0; }
static int driver_done() { return 0; }
EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  COUNTED;
  std::string wanted(name);
  if (wanted == "cuDevicePrimaryCtxGetState") *function = reinterpret_cast<void*>(driver_context);
  else if (wanted == "cuGetErrorString") *function = reinterpret_cast<void*>(driver_error);
  else *function = reinterpret_cast<void*>(driver_done);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

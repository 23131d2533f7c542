// Launches.  Compiled kernels do nothing; aten's kernels are Python functions, queued by stand_in_enqueue.
#include "stand_in.h"

#include <cstring>

using namespace stand_in;

// Queue ``function(job)`` on a stream, as a kernel.
EXPORTED void stand_in_enqueue(void* stream, void (*function)(long), long job) {
  auto kernel = [=] {
    if (long us = settings().kernel_us) pass(1e-6 * static_cast<double>(us));
    function(job);
  };
  fail(push(stream_of(static_cast<cudaStream_t>(stream)), kernel, "kernels of aten"));
}
EXPORTED int stand_in_capturing(void* stream) { return capturing(stream_of(static_cast<cudaStream_t>(stream))); }
EXPORTED int stand_in_on_device(const void* address) { return on_device(address); }
// A launch of Triton becomes a node if its stream is captured: returns whether it is, and sets the error.
EXPORTED int stand_in_launched(void* stream, cudaError_t* error) {
  Stream* queue = stream_of(static_cast<cudaStream_t>(stream));
  if (!capturing(queue)) return 0;
  *error = fail(push(queue, [] {}, "launches of Triton"));
  return 1;
}

static cudaError_t launched(cudaStream_t stream) {
  return fail(push(stream_of(stream), [] {}, "kernels not computed"));
}
EXPORTED cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  ENTER;
  return launched(stream);
}
EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
  ENTER;
  return launched(stream);
}
EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  ENTER;
  return launched(config->stream);
}
EXPORTED cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  ENTER;
  return launched(stream);
}
EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  ENTER;
  std::memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  ENTER;
  *blocks = 2;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                            unsigned) {
  ENTER;
  *blocks = 2;
  return cudaSuccess;
}

// What the compiler's start-up code calls for each file with kernels.
EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORTED char __cudaInitModule(void**) { return 0; }
EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
EXPORTED unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st*) { return 0; }
EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  *static_cast<void**>(stream) = nullptr;
  return cudaSuccess;
}

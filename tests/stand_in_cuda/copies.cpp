// Copies and fills, in the order of their stream.
#include "stand_in.h"

#include <cstdio>
#include <cstring>

using namespace stand_in;

namespace {

struct Copy {
  char* target;
  const char* source;
  size_t bytes;
  bool to_device, from_pinned;

  void run() const {
    if (long rate = settings().rate; rate && (to_device || !settings().compute))
      pass(static_cast<double>(bytes) / static_cast<double>(rate));
    if (from_pinned && !on_device(source) && !pinned(source))
      return break_device("a copy reads host memory that was unpinned before the copy had run");
    if (to_device && !on_device(target)) return break_device("a copy writes device memory that was freed");
    std::memcpy(target, source, bytes);
  }
};

}  // namespace

EXPORTED cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind,
                                     cudaStream_t stream) {
  ENTER;
  use_device(current_device());
  if (!bytes) return cudaSuccess;
  bool from_device = on_device(source), to_device = on_device(target);
  bool wrong = (kind == cudaMemcpyHostToDevice && (from_device || !to_device)) ||
               (kind == cudaMemcpyDeviceToHost && (!from_device || to_device)) ||
               (kind == cudaMemcpyDeviceToDevice && !(from_device && to_device));
  if (wrong) {
    std::fprintf(stderr, "[stand-in] a copy of kind %d from %s to %s\n", kind, from_device ? "device" : "host",
                 to_device ? "device" : "host");
    return fail(cudaErrorInvalidValue);
  }
  bool from_pinned = pinned(source), pageable = !(from_device || from_pinned) || !(to_device || pinned(target));
  if (to_device && !from_device) counter(pageable ? "copies to the device, pageable" : "copies to the device, pinned")++;
  Copy copy{static_cast<char*>(target), static_cast<const char*>(source), bytes, to_device && !from_device, from_pinned};
  Stream* queue = stream_of(stream);
  push(queue, [copy] { copy.run(); });
  if (pageable) synchronize(queue);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpyAsync(target, source, bytes, kind, nullptr);
  if (error == cudaSuccess) synchronize(stream_of(nullptr));
  return error;
}
EXPORTED cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream);
}
EXPORTED cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                                       size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  ENTER;
  push(stream_of(stream), [=] {
    for (size_t row = 0; row < height; row++)
      std::memcpy(static_cast<char*>(target) + row * target_pitch,
                  static_cast<const char*>(source) + row * source_pitch, width);
  });
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  ENTER;
  push(stream_of(stream), [=] { std::memset(target, value, bytes); });
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemset(void* target, int value, size_t bytes) {
  cudaError_t error = cudaMemsetAsync(target, value, bytes, nullptr);
  synchronize(stream_of(nullptr));
  return error;
}

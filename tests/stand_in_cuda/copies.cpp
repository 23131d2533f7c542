// Copies and fills, in the order of their stream.
#include "stand_in.h"

#include <cstdio>
#include <cstring>

using namespace stand_in;

namespace {

// Where one end of a copy was when it was issued, and has to be when it runs.
enum class Place { device, pinned, pageable };

Place place(const void* address) {
  return on_device(address) ? Place::device : pinned(address) ? Place::pinned : Place::pageable;
}

// A copy runs after it was issued, and in a graph again and again.
struct Copy {
  char* target;
  const char* source;
  size_t bytes;
  Place to, from;

  void run() const {
    bool to_device = to == Place::device && from != Place::device;
    if (long rate = settings().rate; rate && (to_device || !settings().compute))
      pass(static_cast<double>(bytes) / static_cast<double>(rate));
    if (from == Place::pinned && !on_device(source) && !pinned(source))
      return break_device("a copy reads host memory that was unpinned before the copy had run");
    if (to == Place::pinned && !on_device(target) && !pinned(target))
      return break_device("a copy writes host memory that was unpinned before the copy had run");
    if (from == Place::device && !on_device(source)) return break_device("a copy reads device memory that was freed");
    if (to == Place::device && !on_device(target)) return break_device("a copy writes device memory that was freed");
    std::memcpy(target, source, bytes);
  }
};

}  // namespace

EXPORTED cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind,
                                     cudaStream_t stream) {
  ENTER;
  use_device(current_device());
  if (!bytes) return cudaSuccess;
  Copy copy{static_cast<char*>(target), static_cast<const char*>(source), bytes, place(target), place(source)};
  bool from_device = copy.from == Place::device, to_device = copy.to == Place::device;
  bool wrong = (kind == cudaMemcpyHostToDevice && (from_device || !to_device)) ||
               (kind == cudaMemcpyDeviceToHost && (!from_device || to_device)) ||
               (kind == cudaMemcpyDeviceToDevice && !(from_device && to_device));
  if (wrong) {
    std::fprintf(stderr, "[stand-in] a copy of kind %d from %s to %s\n", kind, from_device ? "device" : "host",
                 to_device ? "device" : "host");
    return fail(cudaErrorInvalidValue);
  }
  Stream* queue = stream_of(stream);
  bool pageable = copy.from == Place::pageable || copy.to == Place::pageable;
  if (pageable)
    if (cudaError_t error = forbidden(queue)) return fail(error);
  const char* name = pageable ? "copies to the device, pageable" : "copies to the device, pinned";
  if (!to_device) name = "copies to the host";
  if (cudaError_t error = push(queue, [copy] { copy.run(); }, to_device != from_device ? name : nullptr)) return fail(error);
  if (pageable) synchronize(queue);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
  if (cudaError_t error = forbidden_to_thread()) return fail(error);
  cudaError_t error = cudaMemcpyAsync(target, source, bytes, kind, nullptr);
  if (error == cudaSuccess) synchronize(stream_of(nullptr));
  return error;
}
EXPORTED cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream);
}
// Their order is nobody's business, so it is another one than the caller's.
EXPORTED cudaError_t cudaMemcpyBatchAsync(void* const* targets, const void* const* sources, const size_t* sizes, size_t count,
                                          cudaMemcpyAttributes* attributes, size_t* from, size_t kinds, cudaStream_t stream) {
  ENTER;
  bool valid = stream && count && kinds == 1 && !from[0] && attributes->srcAccessOrder == cudaMemcpySrcAccessOrderStream;
  if (!valid) return fail(cudaErrorInvalidValue);
  if (cudaError_t error = forbidden(stream_of(stream))) return fail(error);
  for (size_t i = count; i--;)
    if (cudaError_t error = cudaMemcpyAsync(targets[i], sources[i], sizes[i], cudaMemcpyDefault, stream)) return error;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                                       size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  ENTER;
  return fail(push(stream_of(stream), [=] {
    for (size_t row = 0; row < height; row++)
      std::memcpy(static_cast<char*>(target) + row * target_pitch,
                  static_cast<const char*>(source) + row * source_pitch, width);
  }));
}
EXPORTED cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  ENTER;
  return fail(push(stream_of(stream), [=] {
    if (bytes && !on_device(target)) return break_device("a fill writes device memory that was freed");
    std::memset(target, value, bytes);
  }));
}
EXPORTED cudaError_t cudaMemset(void* target, int value, size_t bytes) {
  if (cudaError_t error = forbidden_to_thread()) return fail(error);
  cudaError_t error = cudaMemsetAsync(target, value, bytes, nullptr);
  synchronize(stream_of(nullptr));
  return error;
}

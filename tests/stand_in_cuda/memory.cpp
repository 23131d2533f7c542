// Device memory and pinned memory.
#include "stand_in.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>

namespace stand_in {
namespace {

struct Range {
  size_t bytes;
  int device;
  int file;             // of device memory: other processes map it
  bool theirs = false;  // memory of another process, which this one has opened
};
using Ranges = std::map<const char*, Range>;

std::mutex& lock_of_memory() {
  static auto* lock = new std::mutex;
  return *lock;
}
Ranges& device_ranges() {
  static auto* ranges = new Ranges;
  return *ranges;
}
Ranges& pinned_ranges() {
  static auto* ranges = new Ranges;
  return *ranges;
}

const Range* within(const Ranges& ranges, const void* address) {
  auto after = ranges.upper_bound(static_cast<const char*>(address));
  if (after == ranges.begin()) return nullptr;
  --after;
  return static_cast<const char*>(address) < after->first + after->second.bytes ? &after->second : nullptr;
}

long held(const Ranges& ranges, int device) {
  long sum = 0;
  for (auto& [_, range] : ranges) sum += !range.theirs && (device < 0 || range.device == device) ? range.bytes : 0;
  return sum;
}

bool spend(std::atomic<long>& limit) { return limit < 0 || limit-- > 0 || (limit = 0, false); }

void* mapped(size_t bytes, int file = -1) {
  int kind = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind | MAP_NORESERVE, file, 0);
  return found == MAP_FAILED ? nullptr : found;
}

// What a handle of device memory says to the process that opens it.
struct Handle {
  pid_t process;
  int file;
  size_t bytes;
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

}  // namespace

bool on_device(const void* address) {
  Lock lock(lock_of_memory());
  return within(device_ranges(), address);
}

bool pinned(const void* address) {
  Lock lock(lock_of_memory());
  return within(pinned_ranges(), address);
}

}  // namespace stand_in

using namespace stand_in;

EXPORTED long stand_in_pinned_bytes() {
  Lock lock(lock_of_memory());
  return held(pinned_ranges(), -1);
}

EXPORTED cudaError_t cudaMalloc(void** address, size_t bytes) {
  ENTER;
  if (cudaError_t error = forbidden_to_thread()) return fail(error);
  use_device(current_device());
  Lock lock(lock_of_memory());
  *address = nullptr;
  long room = settings().total - settings().taken - held(device_ranges(), current_device());
  if (static_cast<long>(bytes) > room || !spend(settings().allocations)) return fail(cudaErrorMemoryAllocation);
  int file = memfd_create("stand-in", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, bytes) || !(*address = mapped(bytes, file))) {
    close(file);
    return fail(cudaErrorMemoryAllocation);
  }
  // Fresh device memory holds anything: all bits set is NaN in every floating type.
  if (bytes <= size_t{64} << 20) std::memset(*address, 0xff, bytes);
  device_ranges()[static_cast<char*>(*address)] = {bytes, current_device(), file};
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFree(void* address) {
  ENTER;
  if (!address) return cudaSuccess;
  if (cudaError_t error = forbidden_to_thread()) return fail(error);
  synchronize_all();
  Lock lock(lock_of_memory());
  auto found = device_ranges().find(static_cast<char*>(address));
  if (found == device_ranges().end()) return fail(cudaErrorInvalidValue);
  munmap(address, found->second.bytes);
  close(found->second.file);
  device_ranges().erase(found);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  ENTER;
  Lock lock(lock_of_memory());
  auto found = device_ranges().find(static_cast<char*>(address));
  if (found == device_ranges().end() || found->second.theirs) return fail(cudaErrorInvalidValue);
  Handle said{getpid(), found->second.file, found->second.bytes};
  std::memcpy(handle, &said, sizeof said);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
  ENTER;
  use_device(current_device());
  Handle said;
  std::memcpy(&said, &handle, sizeof said);
  std::string path = "/proc/" + std::to_string(said.process) + "/fd/" + std::to_string(said.file);
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0 || !(*address = mapped(said.bytes, file))) return fail(cudaErrorMapBufferObjectFailed);
  Lock lock(lock_of_memory());
  device_ranges()[static_cast<char*>(*address)] = {said.bytes, current_device(), file, true};
  return cudaSuccess;
}
EXPORTED cudaError_t cudaIpcCloseMemHandle(void* address) { return cudaFree(address); }
EXPORTED cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return cudaMalloc(address, bytes); }
EXPORTED cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }
EXPORTED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ENTER;
  use_device(current_device());
  Lock lock(lock_of_memory());
  *total = settings().total;
  *free = settings().total - settings().taken - held(device_ranges(), current_device());
  return cudaSuccess;
}

EXPORTED cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  ENTER;
  if (cudaError_t error = forbidden_to_thread()) return fail(error);
  use_device(current_device());
  Lock lock(lock_of_memory());
  if (!spend(settings().pinned_allocations) || !(*address = mapped(bytes))) return fail(cudaErrorMemoryAllocation);
  pinned_ranges()[static_cast<char*>(*address)] = {bytes, current_device(), -1};
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMallocHost(void** address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
EXPORTED cudaError_t cudaFreeHost(void* address) {
  ENTER;
  if (cudaError_t error = forbidden_to_thread()) return fail(error);
  synchronize_all();
  Lock lock(lock_of_memory());
  auto found = pinned_ranges().find(static_cast<char*>(address));
  if (found == pinned_ranges().end()) return fail(cudaErrorInvalidValue);
  munmap(address, found->second.bytes);
  pinned_ranges().erase(found);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  ENTER;
  if (cudaError_t error = forbidden_to_thread()) return fail(error);
  use_device(current_device());
  Lock lock(lock_of_memory());
  auto* begin = static_cast<char*>(address);
  if (within(pinned_ranges(), begin) || within(pinned_ranges(), begin + bytes - 1))
    return fail(cudaErrorHostMemoryAlreadyRegistered);
  long refused = settings().refused_address, at = reinterpret_cast<long>(address);
  bool named = refused >= at && refused < at + static_cast<long>(bytes);
  long most = settings().pin_bytes;
  bool full = most >= 0 && held(pinned_ranges(), -1) + static_cast<long>(bytes) > most;
  if (named || full || !spend(settings().pins)) return fail(cudaErrorMemoryAllocation);
  pinned_ranges()[begin] = {bytes, current_device(), -1};
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostUnregister(void* address) {
  ENTER;
  if (cudaError_t error = forbidden_to_thread()) return fail(error);
  Lock lock(lock_of_memory());
  if (!pinned_ranges().erase(static_cast<char*>(address))) return fail(cudaErrorHostMemoryNotRegistered);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  ENTER;
  Lock lock(lock_of_memory());
  std::memset(found, 0, sizeof *found);
  const Range* device = within(device_ranges(), address);
  const Range* host = within(pinned_ranges(), address);
  found->type = device ? cudaMemoryTypeDevice : host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->device = device ? device->device : host ? host->device : -1;
  if (device || host) found->devicePointer = const_cast<void*>(address);
  if (!device) found->hostPointer = const_cast<void*>(address);
  return cudaSuccess;
}

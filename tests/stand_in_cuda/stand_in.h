// A CUDA runtime without a GPU: device memory is host memory, streams are threads, events are real.
//
// torch links its CUDA runtime dynamically.  With this one in its place, everything of torch above the runtime runs as
// on a card: torch.cuda, the caching allocator, the pool of streams, record_stream, Dynamo, AOTAutograd, Inductor,
// Triton down to cubins, and the generated wrappers with their asserts.
//
//   memory.cpp   device and pinned memory; allocations and pins that a test makes fail
//   streams.cpp  streams and events
//   graphs.cpp   captures, and launches of graphs
//   copies.cpp   copies and fills, with a rate for those to the device
//   kernels.cpp  launches, which do nothing, and aten's kernels, which Python computes (aten_on_host.py)
//   device.cpp   devices, their properties, errors
//   driver.cpp   libcuda.so.1, what Triton needs of it
//
// Limits.  What runs here proves the order of operations, not their speed and not all of their results:
//   * Triton's kernels are compiled and launched, but not executed: with Inductor, numbers mean nothing.
//   * aten's CUDA kernels are computed by the CPU's on the same bytes: no number of cuBLAS, cuDNN or SDPA on CUDA.
//   * No time means anything.  One engine per stream: copies do not share a link, kernels do not share an SM.  Where kernels do
//     not compute, it does not depend on the machine either.
//   * No NCCL, managed memory or profiler.  A process opens device memory of another one; events of others are in the past.
//   * Graphs come from captures only: no graph in a graph, no update, no conditional node.  Each stream counts as created with
//     cudaStreamNonBlocking, as torch's are.  Random numbers of aten are the CPU's: a replay draws new ones.
//   * A copy from pageable memory always waits for its stream; CUDA stages small ones at once.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))
// Every entry point counts its calls, and fails in a child that was forked from a process that has used CUDA.  Most fail once
// the device is broken, as after an illegal access.
#define COUNTED                                                                    \
  static std::atomic<long>& calls_of_this = stand_in::counter(__func__);           \
  calls_of_this++
#define ANYWAY                                                                     \
  COUNTED;                                                                         \
  if (stand_in::in_child()) return stand_in::fail(cudaErrorInitializationError)
#define ENTER                                                                      \
  ANYWAY;                                                                          \
  if (stand_in::broken()) return stand_in::fail(cudaErrorLaunchFailure)

namespace stand_in {

using Lock = std::unique_lock<std::mutex>;
using Work = std::function<void()>;

// A stream is a thread, and so is each captured stream in a launch of its graph.
extern thread_local double own_time;           // seconds on the clock of the stream that the calling thread runs
void pass(double seconds);                     // let them pass on that stream
std::atomic<long>& counter(const char* name);  // calls of an entry point
cudaError_t fail(cudaError_t error);           // returns it; an error becomes the calling thread's last one
bool broken();                                 // whether an error stuck
bool in_child();                               // whether CUDA was used before the fork that made this process
void break_device(const char* why);            // let an error stick, and say why on stderr
int current_device();
void use_device(int device);                   // the device gets a context, as at the first call that needs one

// Settings: from the environment (STAND_IN_RATE for "rate"), or set by a test at any time.  -1 stands for no limit.
struct Settings {
  std::atomic<long> devices{1};
  std::atomic<long> total{8l << 30};         // bytes of each device
  std::atomic<long> taken{0};                // bytes of each device that other processes hold
  std::atomic<long> compute{1};              // whether aten's kernels compute; if not, each stream has a clock of its own,
                                             // on which a kernel takes kernel_us and any copy its bytes by rate
  std::atomic<long> rate{0};                 // bytes/s of a copy to the device; 0: at once
  std::atomic<long> kernel_us{0};            // least time of an aten kernel
  std::atomic<long> lag{0};                  // operations that the host is ahead of the streams, unless it waits; a launch of
                                             // a graph is one
  std::atomic<long> pause_us{0};             // launch n of a graph pauses before each node of the captured streams whose bits
                                             // are set in n: slow and fast ones come in all combinations
  std::atomic<long> allocations{-1};         // device allocations that still succeed
  std::atomic<long> pins{-1};                // registrations that still succeed
  std::atomic<long> pinned_allocations{-1};  // allocations of pinned memory that still succeed
  std::atomic<long> pin_bytes{-1};           // bytes that may be registered at a time
  std::atomic<long> refused_address{0};      // a registration of these bytes fails
  std::atomic<long> driver{13000};           // version of the driver
};
Settings& settings();

// Releases Python's GIL, if the calling thread holds it, for as long as the thread waits: kernels need it.
class Waiting {
 public:
  Waiting();
  ~Waiting();

 private:
  void* state_ = nullptr;
};

class Stream;
Stream* stream_of(cudaStream_t stream);        // of the current device for the default stream
bool is_default(cudaStream_t stream);
// Run work in its turn.  In a capture it becomes a node, which each launch of the graph runs.  It counts under its name when it
// is queued, and as "NAME, replayed", or "other nodes, replayed", when a launch runs it.
cudaError_t push(Stream* stream, Work work, const char* name = nullptr);
void synchronize(Stream* stream);
void synchronize_all();

// Captures, graphs.cpp.  What a capture forbids invalidates it, and is an error.
struct Capture;
struct Node;
struct Point {  // of a capture, what an event that was recorded there stands for
  std::shared_ptr<Capture> capture;
  std::vector<Node*> after;
};
bool capturing(Stream* stream);
cudaError_t forbidden(Stream* stream);         // to a stream that is captured
cudaError_t forbidden_on_device();             // while any stream of the current device is captured
cudaError_t forbidden_to_thread();             // while some stream is captured, by the modes of the capture and of the thread
cudaError_t forbidden(const Point& point);     // to an event that was recorded in a capture
cudaError_t add_node(Stream* stream, std::function<Work()> at_launch, const char* name);
cudaError_t record_point(Stream* stream, Point* point);
cudaError_t wait_for_point(Stream* stream, bool is_default, const Point& point);
cudaError_t wait_outside(Stream* stream);      // for an event that was recorded outside of the capture

bool on_device(const void* address);
bool pinned(const void* address);

}  // namespace stand_in

// Streams are threads with a queue; events mark a point of one and make another wait for it.
#include "stand_in.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <thread>
#include <vector>

namespace stand_in {
namespace {

std::atomic<long>& queued() {  // operations of all streams so far
  static std::atomic<long>& found = counter("operations queued");
  return found;
}

// The host waits for a stream or an event: what is queued runs, however far the device lags.
std::atomic<long> waiting{0};  // threads
class HostWaits : Waiting {
 public:
  HostWaits() { waiting++; }
  ~HostWaits() { waiting--; }
};

}  // namespace

thread_local double own_time = 0;

class Stream {
 public:
  Stream() {
    std::thread([this] { run(); }).detach();
  }
  void push(Work work) {
    Lock lock(lock_);
    while (queue_.size() >= kDepth) {
      lock.unlock();
      {
        HostWaits for_room;
        Lock again(lock_);
        done_.wait(again, [this] { return queue_.size() < kDepth; });
      }
      lock.lock();
    }
    queue_.push_back({std::move(work), ++queued()});
    pushed_++;
    filled_.notify_one();
  }
  void synchronize() {  // with what is queued by now; other threads may go on
    HostWaits for_all;
    Lock lock(lock_);
    done_.wait(lock, [this, mark = pushed_] { return over_ >= mark; });
  }
  bool empty() {
    Lock lock(lock_);
    return over_ == pushed_;
  }
  int priority = 0;

 private:
  static constexpr size_t kDepth = 1024;  // then the host waits, as about so many launches fill a queue of CUDA's
  struct Operation {
    Work work;
    long number;  // in the order in which the host queued all of them
  };
  // Whether the host is as far ahead of an operation as the setting says, or waits.
  static bool due(const Operation& next) { return queued() - next.number >= settings().lag || waiting; }
  void run() {
    for (;;) {
      Work work;
      {
        Lock lock(lock_);
        filled_.wait(lock, [this] { return !queue_.empty(); });
        while (!due(queue_.front())) filled_.wait_for(lock, std::chrono::milliseconds(1));
        work = std::move(queue_.front().work);
        queue_.pop_front();
      }
      if (!broken()) work();
      work = nullptr;
      {
        Lock lock(lock_);
        over_++;
      }
      done_.notify_all();
    }
  }
  std::mutex lock_;
  std::condition_variable filled_, done_;
  std::deque<Operation> queue_;
  unsigned long pushed_ = 0, over_ = 0;
};

namespace {

std::mutex& lock_of_streams() {
  static auto* lock = new std::mutex;
  return *lock;
}
std::vector<Stream*>& all_streams() {
  static auto* all = new std::vector<Stream*>;
  return *all;
}
std::map<int, Stream*>& default_streams() {
  static auto* all = new std::map<int, Stream*>;
  return *all;
}

// An event counts the marks made by the host and reached by streams.  One that was last recorded in a capture has a point of it.
struct Event {
  explicit Event(bool is_timed) : timed(is_timed) {}
  std::mutex lock;
  std::condition_variable changed;
  unsigned long made = 0, reached = 0;
  double at = 0;
  Point captured;
  const bool timed;
  bool over() { return reached >= made; }
};

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

double steady() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
double time_of_stream() { return settings().compute ? steady() : own_time; }

// Returns when it was reached.
double wait_for(Event* event, unsigned long mark) {
  Lock lock(event->lock);
  while (event->reached < mark && !broken()) event->changed.wait_for(lock, std::chrono::milliseconds(100));
  return event->at;
}

// Both are called by the host, and return what the stream does.
Work recording(Event* event) {
  Lock lock(event->lock);
  event->captured = {};
  return [event, mark = ++event->made] {
    {
      Lock lock(event->lock);
      event->reached = std::max(event->reached, mark);
      event->at = time_of_stream();
    }
    event->changed.notify_all();
  };
}
Work waiting_for(Event* event) {
  Lock lock(event->lock);  // for the newest mark when the host calls; none: nothing to wait for
  return [event, mark = event->made] { own_time = std::max(own_time, wait_for(event, mark)); };
}

// Whether the host may ask for the state of an event.
cudaError_t askable(Event* event) {
  Lock lock(event->lock);
  return event->captured.capture ? forbidden(event->captured) : forbidden_to_thread();
}

}  // namespace

bool is_default(cudaStream_t stream) {
  return !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

Stream* stream_of(cudaStream_t stream) {
  if (!is_default(stream)) return reinterpret_cast<Stream*>(stream);
  Lock lock(lock_of_streams());
  Stream*& found = default_streams()[current_device()];
  if (!found) all_streams().push_back(found = new Stream);
  return found;
}

void pass(double seconds) {
  if (!settings().compute) {
    own_time += seconds;
    return;
  }
  for (double end = steady() + seconds; steady() < end;) usleep(50);
}

cudaError_t push(Stream* stream, Work work, const char* name) {
  if (capturing(stream)) return add_node(stream, [work] { return work; }, name);
  if (name) counter(name)++;
  stream->push(std::move(work));
  return cudaSuccess;
}
void synchronize(Stream* stream) { stream->synchronize(); }
void synchronize_all() {
  std::vector<Stream*> all;
  {
    Lock lock(lock_of_streams());
    all = all_streams();
  }
  for (Stream* stream : all) stream->synchronize();
}

}  // namespace stand_in

using namespace stand_in;

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  ENTER;
  use_device(current_device());
  auto* made = new Stream;
  made->priority = priority;
  Lock lock(lock_of_streams());
  all_streams().push_back(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t) { ENTER; return cudaSuccess; }
EXPORTED cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ENTER;
  Stream* asked = stream_of(stream);
  if (cudaError_t error = capturing(asked) ? forbidden(asked) : forbidden_to_thread()) return fail(error);
  return asked->empty() ? cudaSuccess : fail(cudaErrorNotReady);
}
EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER;
  Stream* awaited = stream_of(stream);
  if (cudaError_t error = capturing(awaited) ? forbidden(awaited) : forbidden_to_thread()) return fail(error);
  awaited->synchronize();
  return broken() ? fail(cudaErrorLaunchFailure) : cudaSuccess;
}
EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  ENTER;
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  ENTER;
  Event* awaited = event_of(event);
  Stream* waits = stream_of(stream);
  bool inside = capturing(waits);
  if (flags & cudaEventWaitExternal)
    return inside ? fail(add_node(waits, [=] { return waiting_for(awaited); }, nullptr)) : fail(cudaErrorInvalidValue);
  Lock lock(awaited->lock);
  if (awaited->captured.capture) return fail(wait_for_point(waits, is_default(stream), awaited->captured));
  if (inside) return awaited->made ? fail(wait_outside(waits)) : cudaSuccess;
  lock.unlock();
  return push(waits, waiting_for(awaited));
}
EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  ENTER;
  return fail(push(stream_of(stream), [=] { function(data); }));
}
EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  ENTER;
  if (cudaError_t error = forbidden(stream_of(stream))) return fail(error);
  return push(stream_of(stream), [=] { function(stream, cudaSuccess, data); });
}

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  ENTER;
  use_device(current_device());
  *event = reinterpret_cast<cudaEvent_t>(new Event(!(flags & cudaEventDisableTiming)));
  return cudaSuccess;
}
// Of another process: nothing of it is in flight here.
EXPORTED cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { ENTER; return cudaSuccess; }
EXPORTED cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t) {
  return cudaEventCreateWithFlags(event, cudaEventDisableTiming);
}
EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t) { ENTER; return cudaSuccess; }  // a stream may still hold it
EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  ENTER;
  Event* marked = event_of(event);
  Stream* marks = stream_of(stream);
  bool inside = capturing(marks);
  if (flags & cudaEventRecordExternal)
    return inside ? fail(add_node(marks, [=] { return recording(marked); }, nullptr)) : fail(cudaErrorInvalidValue);
  if (!inside) return push(marks, recording(marked));
  Lock lock(marked->lock);
  return fail(record_point(marks, &marked->captured));
}
EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER;
  Event* asked = event_of(event);
  if (cudaError_t error = askable(asked)) return fail(error);
  Lock lock(asked->lock);
  return asked->over() ? cudaSuccess : fail(cudaErrorNotReady);
}
EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER;
  Event* marked = event_of(event);
  if (cudaError_t error = askable(marked)) return fail(error);
  HostWaits for_event;
  unsigned long mark;
  {
    Lock lock(marked->lock);
    mark = marked->made;
  }
  wait_for(marked, mark);
  return broken() ? fail(cudaErrorLaunchFailure) : cudaSuccess;
}
EXPORTED cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  ENTER;
  Event *begin = event_of(from), *end = event_of(to);
  if (!begin->timed || !end->timed) return fail(cudaErrorInvalidResourceHandle);
  for (Event* asked : {begin, end})
    if (cudaError_t error = askable(asked)) return fail(error);
  if (!begin->over() || !end->over()) return fail(cudaErrorNotReady);
  *ms = static_cast<float>(1e3 * (end->at - begin->at));
  return cudaSuccess;
}

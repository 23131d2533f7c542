// Graphs: what captured streams are given becomes nodes, and a launch runs them with a thread for each of these streams.
#include "stand_in.h"

#include <algorithm>
#include <deque>
#include <future>
#include <map>
#include <set>
#include <string>
#include <thread>

namespace stand_in {

struct Node {
  std::function<Work()> at_launch;  // called by the host; returns what the node does in this launch
  const char* name;                 // as in push
  std::vector<Node*> after;
  size_t number, lane;              // its captured stream
};

struct Graph {
  std::deque<Node> nodes;  // in the order of their capture
  size_t lanes = 0;
};

struct Lane {
  size_t number;
  std::vector<Node*> frontier;  // the next node comes after these
};

struct Capture {
  const unsigned long long id;
  const cudaStreamCaptureMode mode;
  Stream* const origin;
  const int device = current_device();
  const std::thread::id thread = std::this_thread::get_id();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;  // None: it has ended
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::map<Stream*, Lane> lanes = {};

  Lane& lane(Stream* stream) { return lanes.try_emplace(stream, Lane{lanes.size(), {}}).first->second; }
  cudaError_t invalidate(cudaError_t error) {
    if (status == cudaStreamCaptureStatusInvalidated) return cudaErrorStreamCaptureInvalidated;
    if (status == cudaStreamCaptureStatusActive) status = cudaStreamCaptureStatusInvalidated;
    return error;
  }
  bool joined() {  // whether the frontier of the origin comes after all nodes
    std::set<Node*> seen;
    std::vector<Node*> left = lane(origin).frontier;
    while (!left.empty()) {
      Node* node = left.back();
      left.pop_back();
      if (seen.insert(node).second) left.insert(left.end(), node->after.begin(), node->after.end());
    }
    return seen.size() == graph->nodes.size();
  }
};

namespace {

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;
using Captured = std::shared_ptr<Capture>;

std::mutex& lock_of_captures() {
  static auto* lock = new std::mutex;
  return *lock;
}
std::map<Stream*, Captured>& captures() {  // by the streams that are captured now
  static auto* all = new std::map<Stream*, Captured>;
  return *all;
}
Captured capture_of(Stream* stream) {
  auto found = captures().find(stream);
  return found == captures().end() ? nullptr : found->second;
}

cudaError_t forbid(const std::function<bool(const Capture&)>& concerned) {
  cudaError_t error = cudaSuccess;
  Lock lock(lock_of_captures());
  for (auto& [stream, capture] : captures())
    if (stream == capture->origin && concerned(*capture)) error = capture->invalidate(cudaErrorStreamCaptureUnsupported);
  return error;
}

}  // namespace

bool capturing(Stream* stream) {
  Lock lock(lock_of_captures());
  return captures().count(stream);
}

cudaError_t forbidden(Stream* stream) {
  return forbid([=](const Capture& capture) { return capture.lanes.count(stream); });
}
cudaError_t forbidden_on_device() {
  return forbid([](const Capture& capture) { return capture.device == current_device(); });
}
cudaError_t forbidden_to_thread() {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  return forbid([](const Capture& capture) {
    bool global = capture.mode == cudaStreamCaptureModeGlobal && mode_of_thread == cudaStreamCaptureModeGlobal;
    return capture.mode != cudaStreamCaptureModeRelaxed && (global || capture.thread == std::this_thread::get_id());
  });
}
cudaError_t forbidden(const Point& point) {
  Lock lock(lock_of_captures());
  return point.capture->invalidate(cudaErrorCapturedEvent);
}

cudaError_t add_node(Stream* stream, std::function<Work()> at_launch, const char* name) {
  Lock lock(lock_of_captures());
  Captured capture = capture_of(stream);
  if (!capture || capture->status != cudaStreamCaptureStatusActive) return cudaErrorStreamCaptureInvalidated;
  Lane& lane = capture->lane(stream);
  auto& nodes = capture->graph->nodes;
  nodes.push_back({std::move(at_launch), name, std::move(lane.frontier), nodes.size(), lane.number});
  lane.frontier = {&nodes.back()};
  return cudaSuccess;
}

cudaError_t record_point(Stream* stream, Point* point) {
  Lock lock(lock_of_captures());
  Captured capture = capture_of(stream);
  if (!capture || capture->status != cudaStreamCaptureStatusActive) return cudaErrorStreamCaptureInvalidated;
  *point = {capture, capture->lane(stream).frontier};
  return cudaSuccess;
}

cudaError_t wait_for_point(Stream* stream, bool is_default, const Point& point) {
  Lock lock(lock_of_captures());
  Captured own = capture_of(stream);
  cudaStreamCaptureStatus status = point.capture->status;
  if (status == cudaStreamCaptureStatusNone)  // it was recorded in a capture that has ended
    return own ? own->invalidate(cudaErrorStreamCaptureIsolation) : cudaErrorStreamCaptureIsolation;
  if (is_default) return point.capture->invalidate(cudaErrorStreamCaptureImplicit);
  if (own && own != point.capture) {
    own->invalidate(cudaErrorStreamCaptureMerge);
    return point.capture->invalidate(cudaErrorStreamCaptureMerge);
  }
  if (status == cudaStreamCaptureStatusInvalidated) return cudaErrorStreamCaptureInvalidated;
  captures()[stream] = point.capture;  // a stream that was not captured forks from the capture
  auto& frontier = point.capture->lane(stream).frontier;
  for (Node* node : point.after)
    if (std::find(frontier.begin(), frontier.end(), node) == frontier.end()) frontier.push_back(node);
  return cudaSuccess;
}

cudaError_t wait_outside(Stream* stream) {
  Lock lock(lock_of_captures());
  Captured capture = capture_of(stream);
  return capture ? capture->invalidate(cudaErrorStreamCaptureIsolation) : cudaErrorStreamCaptureIsolation;
}

namespace {

// One launch.  Nodes wait for each other by events of this launch; a node that the device broke before is skipped.
class Launch {
 public:
  Launch(std::shared_ptr<const Graph> graph, std::shared_future<void> former, unsigned long number)
      : graph_(std::move(graph)), former_(std::move(former)), number_(number), times_(graph_->nodes.size(), -1) {
    for (const Node& node : graph_->nodes) works_.push_back(node.at_launch());
  }
  std::shared_future<void> over() { return over_.get_future().share(); }
  void run() {
    if (former_.valid()) former_.wait();
    double begin = own_time;
    std::vector<std::thread> lanes;
    for (size_t lane = 0; lane < graph_->lanes; lane++) lanes.emplace_back([=] { run_lane(lane, begin); });
    for (std::thread& lane : lanes) lane.join();
    for (double end : times_) own_time = std::max(own_time, end);
    over_.set_value();
  }

 private:
  void run_lane(size_t lane, double begin) {
    bool slow = lane < 64 && number_ >> lane & 1;
    double pause = slow ? 1e-6 * static_cast<double>(settings().pause_us) : 0;
    own_time = begin;
    for (const Node& node : graph_->nodes) {
      if (node.lane != lane) continue;
      for (Node* former : node.after) wait_for(*former);
      if (pause > 0) pass(pause);
      if (!broken()) {
        counter(((node.name ? node.name : "other nodes") + std::string(", replayed")).c_str())++;
        works_[node.number]();
      }
      {
        Lock lock(lock_);
        times_[node.number] = own_time;
      }
      done_.notify_all();
    }
  }
  void wait_for(const Node& node) {
    Lock lock(lock_);
    done_.wait(lock, [&] { return times_[node.number] >= 0; });
    own_time = std::max(own_time, times_[node.number]);
  }
  std::shared_ptr<const Graph> graph_;
  std::shared_future<void> former_;  // launch of the same graph; ready also when the device broke before it ran
  const unsigned long number_;  // of the launches of its graph
  std::vector<double> times_;  // when each node ended, on its own clock; -1: not yet
  std::vector<Work> works_;
  std::mutex lock_;
  std::condition_variable done_;
  std::promise<void> over_;
};

// What handles point to.  A launch that is under way holds its graph, whatever is destroyed.
struct Executable {
  std::shared_ptr<const Graph> graph;
  std::shared_future<void> last = {};
  unsigned long launches = 0;
};
using Held = std::shared_ptr<Graph>;

Held& graph_of(cudaGraph_t graph) { return *reinterpret_cast<Held*>(graph); }
Executable* executable_of(cudaGraphExec_t executable) { return reinterpret_cast<Executable*>(executable); }
Node* node_of(cudaGraphNode_t node) { return reinterpret_cast<Node*>(node); }
cudaGraphNode_t handle_of(Node* node) { return reinterpret_cast<cudaGraphNode_t>(node); }

}  // namespace
}  // namespace stand_in

using namespace stand_in;

EXPORTED cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  ENTER;
  static std::atomic<unsigned long long> ids{0};
  if (is_default(stream)) return fail(cudaErrorStreamCaptureUnsupported);
  Stream* origin = stream_of(stream);
  Lock lock(lock_of_captures());
  if (capture_of(origin)) return fail(cudaErrorIllegalState);
  auto begun = std::make_shared<Capture>(Capture{++ids, mode, origin});
  begun->lane(origin);
  captures()[origin] = begun;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  ENTER;
  Stream* origin = stream_of(stream);
  Lock lock(lock_of_captures());
  Captured capture = capture_of(origin);
  *graph = nullptr;
  if (!capture) return fail(cudaErrorIllegalState);
  if (capture->origin != origin) return fail(capture->invalidate(cudaErrorStreamCaptureUnmatched));
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return fail(cudaErrorStreamCaptureWrongThread);
  bool valid = capture->status == cudaStreamCaptureStatusActive, joined = capture->joined();
  capture->status = cudaStreamCaptureStatusNone;
  for (auto& [captured, _] : capture->lanes) captures().erase(captured);
  Held held = std::move(capture->graph);  // events may hold the capture for longer
  held->lanes = capture->lanes.size();
  if (!valid) return fail(cudaErrorStreamCaptureInvalidated);
  if (!joined) return fail(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new Held(held));
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                              unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                              const cudaGraphEdgeData** edges, size_t* count) {
  COUNTED;
  Stream* asked = stream_of(stream);
  Lock lock(lock_of_captures());
  Captured capture = capture_of(asked);
  *status = capture ? capture->status : cudaStreamCaptureStatusNone;
  if (!capture) return cudaSuccess;
  auto& frontier = capture->lane(asked).frontier;
  if (id) *id = capture->id;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(&capture->graph);
  if (nodes) *nodes = reinterpret_cast<const cudaGraphNode_t*>(frontier.data());
  if (edges) *edges = nullptr;
  if (count) *count = frontier.size();
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  COUNTED;
  Lock lock(lock_of_captures());
  Captured capture = capture_of(stream_of(stream));
  *status = capture ? capture->status : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  COUNTED;
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  ENTER;
  auto& all = graph_of(graph)->nodes;
  for (size_t i = 0; nodes && i < std::min(*count, all.size()); i++) nodes[i] = handle_of(&all[i]);
  *count = all.size();
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes, cudaGraphEdgeData*,
                                                  size_t* count) {
  ENTER;
  auto& all = node_of(node)->after;
  for (size_t i = 0; nodes && i < std::min(*count, all.size()); i++) nodes[i] = handle_of(all[i]);
  *count = all.size();
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  COUNTED;
  delete &graph_of(graph);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  ENTER;
  *executable = reinterpret_cast<cudaGraphExec_t>(new Executable{graph_of(graph)});
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
EXPORTED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  COUNTED;
  delete executable_of(executable);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  ENTER;
  Stream* queue = stream_of(stream);
  if (cudaError_t error = forbidden(queue)) return fail(error);  // it would be a node that is a graph
  Executable* launched = executable_of(executable);
  auto launch = std::make_shared<Launch>(launched->graph, launched->last, launched->launches++);
  launched->last = launch->over();
  return push(queue, [launch] { launch->run(); });
}

// SPDX-License-Identifier: Apache-2.0
// Capture of streams, and graphs: a list of what was captured, done again with the same arguments.
#include "call.h"
#include "stream.h"

namespace cuda_double {

Handles<Graph>& Graphs() {
  static auto* graphs = new Handles<Graph>(0x6A);
  return *graphs;
}

Handles<GraphExec>& GraphExecs() {
  static auto* execs = new Handles<GraphExec>(0x6E);
  return *execs;
}

}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API int cuStreamBeginCapture_v2(Handle handle, int mode) {
  return Call("cuStreamBeginCapture", Needs::kContext,
              [&](Context& context) { BeginCapture(*StreamOf(context, handle), mode); });
}

CUDA_DOUBLE_API int cuStreamEndCapture(Handle handle, Handle* graph) {
  return Call("cuStreamEndCapture", Needs::kContext, [&](Context& context) {
    *graph = 0;
    *graph = Graphs().Add(EndCapture(*StreamOf(context, handle)));
  });
}

CUDA_DOUBLE_API int cuThreadExchangeStreamCaptureMode(int* mode) {
  return Call("cuThreadExchangeStreamCaptureMode", Needs::kInit, [&] {
    Require(*mode >= 0 && *mode <= 2, kInvalidValue, "no such mode of capture");
    *mode = ExchangeCaptureMode(*mode);
  });
}

CUDA_DOUBLE_API int cuStreamIsCapturing(Handle handle, int* status) {
  return Call("cuStreamIsCapturing", Needs::kContext, [&](Context& context) {
    bool invalid = false;
    uint64_t id = 0;
    bool captured = IsCapturing(*StreamOf(context, handle), &invalid, &id);
    *status = !captured ? 0 : invalid ? 2 : 1;
  });
}

static int CaptureInfo(Handle handle, int* status, uint64_t* id, const void* nodes) {
  return Call("cuStreamGetCaptureInfo", Needs::kContext, [&](Context& context) {
    Require(nodes == nullptr, kNotSupported, "the double does not show the nodes of a capture");
    bool invalid = false;
    uint64_t found = 0;
    bool captured = IsCapturing(*StreamOf(context, handle), &invalid, &found);
    *status = !captured ? 0 : invalid ? 2 : 1;
    if (id != nullptr && captured) *id = found;
  });
}

CUDA_DOUBLE_API int cuStreamGetCaptureInfo_v2(Handle handle, int* status, uint64_t* id, void* graph,
                                              const void* nodes, size_t*) {
  return CaptureInfo(handle, status, id, graph != nullptr ? graph : nodes);
}

CUDA_DOUBLE_API int cuStreamGetCaptureInfo_v3(Handle handle, int* status, uint64_t* id, void* graph,
                                              const void* nodes, const void*, size_t*) {
  return CaptureInfo(handle, status, id, graph != nullptr ? graph : nodes);
}

CUDA_DOUBLE_API int cuGraphInstantiateWithFlags(Handle* exec, Handle graph,
                                                unsigned long long flags) {
  return Call("cuGraphInstantiate", Needs::kContext, [&](Context& context) {
    Require(flags < 16, kInvalidValue, "flags of cuGraphInstantiate");
    auto made = std::make_shared<GraphExec>();
    made->graph = *Graphs().Get(graph, "no graph, or destroyed", kInvalidValue);
    made->context = &context;
    *exec = GraphExecs().Add(made);
  });
}

CUDA_DOUBLE_API int cuGraphLaunch(Handle exec, Handle stream) {
  return Call("cuGraphLaunch", Needs::kContext, [&](Context& context) {
    LaunchGraph(GraphExecs().Get(exec, "no graph, or destroyed", kInvalidValue),
                *StreamOf(context, stream));
  });
}

CUDA_DOUBLE_API int cuGraphUpload(Handle exec, Handle stream) {
  return Call("cuGraphUpload", Needs::kContext, [&](Context& context) {
    GraphExecs().Get(exec, "no graph, or destroyed", kInvalidValue);
    StreamOf(context, stream);
  });
}

CUDA_DOUBLE_API int cuGraphGetNodes(Handle graph, void* nodes, size_t* count) {
  return Call("cuGraphGetNodes", Needs::kInit, [&] {
    Require(nodes == nullptr, kNotSupported, "the double only says how many nodes there are");
    *count = Graphs().Get(graph, "no graph, or destroyed", kInvalidValue)->nodes.size();
  });
}

CUDA_DOUBLE_API int cuGraphDestroy(Handle graph) {
  return Call("cuGraphDestroy", Needs::kInit, [&] { Graphs().Remove(graph); });
}

CUDA_DOUBLE_API int cuGraphExecDestroy(Handle exec) {
  return Call("cuGraphExecDestroy", Needs::kInit, [&] { GraphExecs().Remove(exec); });
}

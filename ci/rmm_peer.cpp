// Replays traces to RMM's pool and arena, on a CUDA driver alone: what RMM's headers call of the CUDA runtime is
// here, on top of the driver's functions. Prints a row of `aquifer-stress bench --peers` for each trace of one
// stream and each of the two. ci/benchmarks compiles and runs it where RMM's headers are installed.

#include <linux/limits.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <rmm/mr/device/arena_memory_resource.hpp>
#include <rmm/mr/device/pool_memory_resource.hpp>

static std::uint64_t calls = 0;

// The driver and the runtime number errors alike.
static cudaError_t answer(CUresult code) { ++calls; return static_cast<cudaError_t>(code); }

extern "C" {
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorName(cudaError_t error) {
  char const* name = "an unknown error";
  cuGetErrorName(static_cast<CUresult>(error), &name);
  return name;
}
char const* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return answer(cuMemGetInfo(free, total)); }
cudaError_t cudaDeviceSynchronize() { return answer(cuCtxSynchronize()); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return answer(cuStreamSynchronize(stream)); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return answer(cuStreamWaitEvent(stream, event, flags));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) { return answer(cuEventCreate(event, flags)); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return answer(cuEventRecord(event, stream)); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return answer(cuEventSynchronize(event)); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return answer(cuEventDestroy(event)); }
}

// The device's memory, and the most that was taken of it.
struct Upstream final : rmm::mr::device_memory_resource {
  std::size_t held = 0, most = 0;

  void* do_allocate(std::size_t bytes, rmm::cuda_stream_view) override {
    CUdeviceptr address = 0;
    if (answer(cuMemAlloc(&address, bytes)) != cudaSuccess) throw rmm::out_of_memory("the device refuses");
    most = std::max(most, held += bytes);
    return reinterpret_cast<void*>(address);
  }

  void do_deallocate(void* address, std::size_t bytes, rmm::cuda_stream_view) override {
    answer(cuMemFree(reinterpret_cast<CUdeviceptr>(address)));
    held -= bytes;
  }
};

struct Event { bool allocates; std::size_t slot, bytes; };

struct Program {
  std::string name, source;
  std::vector<Event> events;
  std::size_t slots = 0, peak = 0;
  bool has_one_stream = true;
};

static Program read(char const* path) {
  std::ifstream file(path);
  Program program;
  std::unordered_map<std::string, std::pair<std::size_t, std::size_t>> live;
  std::size_t sum = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string action, id, stream;
    std::size_t bytes = 0;
    words >> action >> id;
    if (action == "#") {
      std::string value = line.substr(std::min(line.size(), line.find(": ") + 2));
      if (id == "name:") program.name = value;
      if (id == "source:") program.source = value;
    } else if (action == "a") {
      words >> bytes >> stream;
      live[id] = {program.slots, bytes};
      program.events.push_back({true, program.slots++, bytes});
      program.peak = std::max(program.peak, sum += bytes);
    } else if (action == "f") {
      words >> stream;
      program.events.push_back({false, live[id].first, live[id].second});
      sum -= live[id].second;
      live.erase(id);
    } else if (action == "r") {
      program.has_one_stream = false;
    }
    program.has_one_stream &= stream.empty() || stream == "0";
  }
  return program;
}

// Replays a program once and frees what it leaves. Returns the refused requests and nanoseconds per event.
static std::pair<std::uint64_t, double> pass(rmm::mr::device_memory_resource& allocator, Program const& program) {
  std::vector<std::pair<void*, std::size_t>> blocks(program.slots);
  std::uint64_t refused = 0;
  auto const begin = std::chrono::steady_clock::now();
  for (auto const& [allocates, slot, bytes] : program.events) {
    auto& block = blocks[slot];
    if (allocates) {
      try { block = {allocator.allocate(bytes), bytes}; } catch (std::bad_alloc const&) { ++refused; }
    } else if (block.first) {
      allocator.deallocate(block.first, block.second);
      block.first = nullptr;
    }
  }
  std::chrono::duration<double, std::nano> const took = std::chrono::steady_clock::now() - begin;
  for (auto const& [address, bytes] : blocks) if (address) allocator.deallocate(address, bytes);
  return {refused, took.count() / std::max<std::size_t>(1, program.events.size())};
}

template <class Make>
static void measure(char const* name, Program const& program, Make make) {
  Upstream upstream;
  auto const allocator = make(upstream);
  std::uint64_t refused = 0, count[3] = {calls};
  for (int i = 1; i < 3; ++i) {
    refused += pass(*allocator, program).first;
    count[i] = calls;
  }
  double times[3];
  for (auto& time : times) time = pass(*allocator, program).second;
  std::sort(times, times + 3);
  std::string const ratio = refused ? "null" : std::to_string(double(upstream.most) / double(program.peak));
  std::printf("{\"benchmark\":\"%s\",\"source\":\"%s\",\"allocator\":\"%s\",\"peak_requested_bytes\":%zu,"
              "\"peak_reserved_bytes\":%zu,\"reserved_over_requested\":%s,\"driver_calls\":%lu,"
              "\"driver_time_modelled_us\":null,\"warm_driver_calls\":%lu,\"warm_driver_time_modelled_us\":null,"
              "\"ns_per_op\":%.2f,\"ooms\":%lu}\n",
              program.name.c_str(), program.source.c_str(), name, program.peak, upstream.most, ratio.c_str(),
              count[1] - count[0], count[2] - count[1], times[1], refused);
  std::fflush(stdout);
}

int main(int count, char** paths) {
  CUcontext context;
  CUdevice device;
  if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context)) {
    std::fprintf(stderr, "there is no device\n");
    return 1;
  }
  for (int i = 1; i < count; ++i) {
    auto const program = read(paths[i]);
    if (!program.has_one_stream) continue;
    measure("RMM pool", program, [](Upstream& upstream) {
      return std::make_unique<rmm::mr::pool_memory_resource<Upstream>>(&upstream, 0);
    });
    measure("RMM arena", program, [](Upstream& upstream) {
      return std::make_unique<rmm::mr::arena_memory_resource<Upstream>>(&upstream);
    });
  }
}

// Aquifer in place of PyTorch's allocator: see `library.h`.

#include "pools.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <torch/csrc/profiler/combined_traceback.h>

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

using c10::DeviceIndex;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::cuda::MempoolId_t;

// The name that Python gave the thread's allocations.
thread_local std::string user_tag;

// Whether other allocations are named by the calls that make them.
std::atomic<bool> tags_calls{false};

// The innermost calls of the program's own Python code, or else of any. PyTorch's recorder of call stacks finds them.
std::string calls() {
    constexpr int kMost = 3;
    const auto trace = torch::CapturedTraceback::gather(true, false, false);
    const auto stacks = torch::symbolize({trace.get()});
    std::string own, all;
    int count = 0, others = 0;
    for (const uint64_t index : stacks.tracebacks.at(0)) {
        const auto &frame = stacks.all_frames.at(index);
        const bool is_own = frame.filename.find("-packages/") == std::string::npos;
        auto &text = is_own ? own : all;
        if ((is_own ? count : others)++ < kMost) {
            const auto slash = frame.filename.rfind('/');
            const auto folder = slash == std::string::npos || slash == 0 ? slash : frame.filename.rfind('/', slash - 1);
            const auto name = frame.filename.substr(folder + 1);
            text += (text.empty() ? "" : " < ") + frame.funcname + " (" + name + ":" + std::to_string(frame.lineno) + ")";
        }
    }
    return own.empty() ? all : own;
}

void free_memory(void *ptr) {
    profile(ptr, -1);
    api.free(ptr, 0, -1, nullptr);
}

// Fails a request for what only PyTorch's own allocator does.
[[noreturn]] void unsupported(const char *what, const char *instead = "") {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "Aquifer does not support ", what, instead);
    std::abort();
}

class Allocator final : public torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
  public:
    Allocator() : CUDAPluggableAllocator(api.malloc, api.free) {}

    c10::DataPtr allocate(size_t size) override {
        const DeviceIndex device = c10::cuda::current_device();
        void *ptr = take(size, device, c10::cuda::getCurrentCUDAStream(device));
        return {ptr, ptr, &free_memory, c10::Device(c10::DeviceType::CUDA, device)};
    }

    c10::DeleterFnPtr raw_deleter() const override {
        return &free_memory;
    }

    void *raw_alloc(size_t size) override {
        const DeviceIndex device = c10::cuda::current_device();
        return take(size, device, c10::cuda::getCurrentCUDAStream(device));
    }

    void *raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
        return take(size, c10::cuda::current_device(), stream);
    }

    void raw_delete(void *ptr) override {
        free_memory(ptr);
    }

    void recordStream(const c10::DataPtr &ptr, c10::cuda::CUDAStream stream) override {
        // Others than ours came from elsewhere, such as from another process.
        if (ptr.get() != nullptr && ptr.get_deleter() == &free_memory) {
            api.record_stream(ptr.get(), stream.stream());
        }
    }

    double getMemoryFraction(DeviceIndex device) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = fractions_.find(device);
        return found == fractions_.end() ? api.memory_fraction(device) : found->second;
    }

    void setMemoryFraction(double fraction, DeviceIndex device) override {
        check(api.set_memory_fraction(device, fraction));
        const std::lock_guard<std::mutex> lock(mutex_);
        fractions_[device] = fraction;
    }

    // A pool's unused memory goes back when the pool is released.
    void emptyCache(MempoolId_t id = {0, 0}) override {
        if (id == MempoolId_t{0, 0}) {
            check(api.empty_cache(-1));
        }
    }

    // Free memory of any address serves a large request, because it is moved there.
    void cacheInfo(DeviceIndex device, size_t *largest) override {
        *largest = getMemoryInfo(device).first + api.memory_reserved(device) - api.memory_allocated(device);
    }

    DeviceStats getDeviceStats(DeviceIndex device) override {
        return device_stats(device);
    }

    void resetAccumulatedStats(DeviceIndex device) override {
        check(api.reset_accumulated(device));
    }

    void resetPeakStats(DeviceIndex device) override {
        check(api.reset_peak(device));
    }

    void enablePeerAccess(DeviceIndex device, DeviceIndex of) override {
        check(api.enable_peer_access(of, device));
    }

    // What watches the allocator. PyTorch has observers of refusals attached for good.

    void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        observers_.push_back(std::move(observer));
    }

    void attachAllocatorTraceTracker(caching::AllocatorTraceTracker) override {
        unsupported("trackers of allocator traces, such as NCCL's registration of tensors");
    }

    bool isHistoryEnabled() override {
        return false;
    }

    void recordHistory(
        bool enabled, caching::CreateContextFn, size_t, caching::RecordContext, bool, const std::vector<std::string> &) override {
        if (enabled) {
            unsupported("torch.cuda.memory._record_memory_history()",
                "; start with AQUIFER_ALLOC_CONF=history:100000 and save with aquifer_torch.snapshot(path)");
        }
    }

    caching::SnapshotInfo snapshot(MempoolId_t, bool) override {
        unsupported("torch.cuda.memory_snapshot(), MemPool.snapshot() and torch.cuda.memory._snapshot()",
            "; aquifer_torch.snapshot(path) saves a snapshot of a device");
    }

    void setUserMetadata(const std::string &name) override {
        user_tag = name;
        check(api.set_tag(name.c_str()));
    }

    std::string getUserMetadata() override {
        return user_tag;
    }

    void enable(bool value) override {
        if (!value) {
            unsupported("an end of caching", "; start with AQUIFER_ALLOC_CONF=no_cache:True");
        }
    }

    // What pieces of memory are made of.

    void *getBaseAllocation(void *, size_t *) override {
        unsupported("base allocations");
    }

    caching::ShareableHandle shareIpcHandle(void *) override {
        unsupported("CUDA tensors between processes", "; copy them to the CPU first");
    }

    std::shared_ptr<void> getIpcDevPtr(std::string) override {
        unsupported("CUDA tensors between processes", "; copy them to the CPU first");
    }

    std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex, MempoolId_t) override {
        unsupported(kCheckpoints, kInstead);
    }

    caching::CheckpointDelta setCheckpointPoolState(DeviceIndex, std::shared_ptr<caching::AllocatorState>) override {
        unsupported(kCheckpoints, kInstead);
    }

    bool checkPoolLiveAllocations(DeviceIndex, MempoolId_t, const std::unordered_set<void *> &) override {
        unsupported(kCheckpoints, kInstead);
    }

    // Pools.

    void createOrIncrefPool(DeviceIndex device, MempoolId_t id, std::shared_ptr<CUDAAllocator> allocator = nullptr) override {
        TORCH_CHECK(allocator == nullptr || allocator.get() == this, "Aquifer: a MemPool with an allocator of its own is not supported");
        pools_.add_use(device, id);
    }

    int getPoolUseCount(DeviceIndex device, MempoolId_t id) override {
        return pools_.uses(device, id);
    }

    void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use_on_oom) override {
        pools_.set_option(device, id, 1, use_on_oom);
    }

    void setNoSplit(DeviceIndex device, MempoolId_t id) override {
        pools_.set_option(device, id, 2, true);
    }

    void beginAllocateToPool(DeviceIndex device, MempoolId_t id, Pools::Filter filter) override {
        pools_.begin(device, id, std::move(filter));
    }

    void endAllocateToPool(DeviceIndex device, MempoolId_t id) override {
        pools_.end(device, id);
    }

    void releasePool(DeviceIndex device, MempoolId_t id) override {
        pools_.release(device, id);
    }

    std::string name() override {
        return "aquifer";
    }

  private:
    static constexpr const char *kCheckpoints = "checkpoints of pools, as of torch.compile(mode=\"reduce-overhead\")";
    static constexpr const char *kInstead = "; compile with mode=\"default\"";

    void *take(size_t size, DeviceIndex device, cudaStream_t stream) {
        if (tags_calls && user_tag.empty()) {
            check(api.set_tag(calls().c_str()));
        }
        void *ptr = pools_.take(size, device, stream);
        if (ptr == nullptr && size != 0) {
            refuse(size, device, [&] { observe_refusal(size, device); });
        }
        profile(ptr, 1);
        return ptr;
    }

    void observe_refusal(size_t size, DeviceIndex device) {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto observers = observers_;
        lock.unlock();
        if (!observers.empty()) {
            const auto [free, total] = getMemoryInfo(device);
            for (const auto &observer : observers) {
                observer(device, size, total, free);
            }
        }
    }

    std::mutex mutex_;
    std::vector<caching::OutOfMemoryObserver> observers_;
    std::map<DeviceIndex, double> fractions_;
    Pools pools_;
};

} // namespace

// Names each allocation by the Python calls that make it, or no longer.
EXPORTED void aquifer_torch_tag_calls(int value) {
    tags_calls = value != 0;
    api.set_tag(user_tag.c_str());
}

// Names what the calling thread allocates.
EXPORTED void aquifer_torch_set_tag(const char *name) {
    user_tag = name;
    api.set_tag(name);
}

// Makes Aquifer PyTorch's allocator. Returns null, or what is wrong.
EXPORTED const char *aquifer_torch_enable() {
    return enabled([] {
        // Never destroyed: tensors are freed as the process exits.
        static auto &allocator = *new std::shared_ptr<caching::CUDAAllocator>(std::make_shared<Allocator>());
        torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(allocator);
        serve_generic_functions(allocator.get());
    });
}

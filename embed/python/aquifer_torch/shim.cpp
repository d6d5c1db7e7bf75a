// Aquifer as the allocator of PyTorch, built by the user's PyTorch at first use. Two forms:
//
// * `Allocator` replaces PyTorch's own, statistics and pools included. It needs CUDA's headers, and PyTorch's of a version that has these
//   virtual functions.
// * With AQUIFER_PLAIN, two functions for `CUDAPluggableAllocator`, for which any PyTorch will do.
//
// In both, a request that finds no memory throws: PyTorch takes a null pointer for memory.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include <c10/util/Exception.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

// The library's functions: see aquifer.h.
struct {
    int (*version)();
    int (*last_status)();
    const char *(*last_error)();
    void *(*malloc)(size_t, int, void *);
    void (*free)(void *, size_t, int, void *);
    void (*record_stream)(void *, void *);
    int (*empty_cache)(int);
    int (*set_memory_fraction)(int, double);
    uint64_t (*memory_allocated)(int);
    uint64_t (*memory_reserved)(int);
    int (*reset_peak)(int);
    int (*reset_accumulated)(int);
    size_t (*stats_json)(int, char *, size_t);
    int (*enable_peer_access)(int, int);
    uint64_t (*pool_create)(int, int);
    void *(*pool_malloc)(uint64_t, size_t, void *);
    int (*pool_end_captures)(uint64_t);
    int (*pool_release)(uint64_t);
} api;

constexpr int kVersion = 1;
constexpr int kOutOfMemory = 2;

[[noreturn]] void fail() {
    const std::string text = api.last_error();
    TORCH_CHECK_WITH(OutOfMemoryError, api.last_status() != kOutOfMemory, "CUDA out of memory. ", text);
    TORCH_CHECK(false, "Aquifer: ", text);
    std::abort();
}

void check(int status) {
    if (status != 0) {
        fail();
    }
}

} // namespace

// Finds the library's functions. Returns null, or what is wrong.
EXPORTED const char *aquifer_torch_connect(const char *path) {
    static std::string error;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        error = dlerror();
        return error.c_str();
    }
    const auto find = [&](auto &function, const char *name) {
        void *found = dlsym(library, name);
        if (found == nullptr) {
            error += std::string(path) + " has no function " + name + "; ";
        }
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    error.clear();
#define FIND(name) find(api.name, "aquifer_" #name)
    FIND(version);
    FIND(last_status);
    FIND(last_error);
    FIND(malloc);
    FIND(free);
    FIND(record_stream);
    FIND(empty_cache);
    FIND(set_memory_fraction);
    FIND(memory_allocated);
    FIND(memory_reserved);
    FIND(reset_peak);
    FIND(reset_accumulated);
    FIND(stats_json);
    FIND(enable_peer_access);
    FIND(pool_create);
    FIND(pool_malloc);
    FIND(pool_end_captures);
    FIND(pool_release);
#undef FIND
    if (error.empty() && api.version() != kVersion) {
        error = std::string(path) + " has version " + std::to_string(api.version()) + " of the interface, not " + std::to_string(kVersion);
    }
    return error.empty() ? nullptr : error.c_str();
}

#ifdef AQUIFER_PLAIN

EXPORTED void *aquifer_torch_malloc(ssize_t size, int device, void *stream) {
    void *ptr = api.malloc(size, device, stream);
    if (ptr == nullptr && size != 0) {
        fail();
    }
    return ptr;
}

EXPORTED void aquifer_torch_free(void *ptr, ssize_t size, int device, void *stream) {
    api.free(ptr, size, device, stream);
}

#else

#include <atomic>
#include <cctype>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

namespace {

using c10::DeviceIndex;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::cuda::MempoolId_t;
using Filter = std::function<bool(cudaStream_t)>;

void free_memory(void *ptr) {
    api.free(ptr, 0, -1, nullptr);
}

// The numbers of a JSON object without objects in it.
std::unordered_map<std::string, int64_t> numbers(int device) {
    std::string text(api.stats_json(device, nullptr, 0) + 64, '\0');
    if (api.stats_json(device, text.data(), text.size()) == 0) {
        fail();
    }
    std::unordered_map<std::string, int64_t> found;
    size_t from = 0;
    while ((from = text.find('"', from)) != std::string::npos) {
        const size_t to = text.find("\":", from + 1);
        found[text.substr(from + 1, to - from - 1)] = std::strtoll(text.c_str() + to + 2, nullptr, 10);
        from = to + 2;
    }
    return found;
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
        return found == fractions_.end() ? 1.0 : found->second;
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
        size_t free = 0, total = 0;
        TORCH_CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess, "cudaMemGetInfo failed");
        *largest = free + api.memory_reserved(device) - api.memory_allocated(device);
    }

    DeviceStats getDeviceStats(DeviceIndex device) override {
        const auto all = numbers(device);
        const auto number = [&](const std::string &name) {
            const auto found = all.find(name);
            return found == all.end() ? int64_t{0} : found->second;
        };
        const auto stat = [&](const std::string &name) {
            c10::CachingAllocator::Stat stat;
            stat.current = number(name + ".current");
            stat.peak = number(name + ".peak");
            stat.allocated = number(name + ".allocated");
            stat.freed = number(name + ".freed");
            return stat;
        };
        const auto stats = [&](const std::string &name) {
            return c10::CachingAllocator::StatArray{stat(name + ".all"), stat(name + ".small_pool"), stat(name + ".large_pool")};
        };
        DeviceStats of;
        of.allocation = stats("allocation");
        of.segment = stats("segment");
        of.active = stats("active");
        of.inactive_split = stats("inactive_split");
        of.allocated_bytes = stats("allocated_bytes");
        of.reserved_bytes = stats("reserved_bytes");
        of.active_bytes = stats("active_bytes");
        of.inactive_split_bytes = stats("inactive_split_bytes");
        of.requested_bytes = stats("requested_bytes");
        of.oversize_allocations = stat("oversize_allocations");
        of.oversize_segments = stat("oversize_segments");
        of.num_alloc_retries = number("num_alloc_retries");
        of.num_ooms = number("num_ooms");
        of.num_sync_all_streams = number("num_sync_all_streams");
        of.num_device_alloc = number("num_device_alloc");
        of.num_device_free = number("num_device_free");
        of.max_split_size = number("max_split_size");
        return of;
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

    // Pools: those of `torch.cuda.MemPool` and of graphs. A pool of Aquifer's is created when memory is first asked of it, because PyTorch
    // tells its options only after it has made one.

    void createOrIncrefPool(DeviceIndex device, MempoolId_t id, std::shared_ptr<CUDAAllocator> allocator = nullptr) override {
        TORCH_CHECK(allocator == nullptr || allocator.get() == this, "Aquifer: a MemPool with an allocator of its own is not supported");
        const std::lock_guard<std::mutex> lock(mutex_);
        pools_[{device, id}].uses += 1;
    }

    int getPoolUseCount(DeviceIndex device, MempoolId_t id) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = pools_.find({device, id});
        return found == pools_.end() ? 0 : found->second.uses;
    }

    void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use_on_oom) override {
        set_option(device, id, 1, use_on_oom);
    }

    void setNoSplit(DeviceIndex device, MempoolId_t id) override {
        set_option(device, id, 2, true);
    }

    void beginAllocateToPool(DeviceIndex device, MempoolId_t id, Filter filter) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        pools_[{device, id}].uses += 1;
        routes_.push_back({device, id, std::move(filter)});
        routed_.store(true);
    }

    void endAllocateToPool(DeviceIndex device, MempoolId_t id) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto route = routes_.rbegin(); route != routes_.rend(); ++route) {
            if (route->device == device && route->id == id) {
                routes_.erase(std::next(route).base());
                break;
            }
        }
        routed_.store(!routes_.empty());
        const uint64_t pool = pools_[{device, id}].pool;
        if (pool != 0) {
            check(api.pool_end_captures(pool));
        }
    }

    void releasePool(DeviceIndex device, MempoolId_t id) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = pools_.find({device, id});
        if (found == pools_.end() || --found->second.uses > 0) {
            return;
        }
        const uint64_t pool = found->second.pool;
        pools_.erase(found);
        if (pool != 0) {
            check(api.pool_release(pool));
        }
    }

    std::string name() override {
        return "aquifer";
    }

  private:
    struct Pool {
        int uses = 0;
        int options = 0;
        uint64_t pool = 0;
    };

    struct Route {
        DeviceIndex device;
        MempoolId_t id;
        Filter filter;
    };

    void *take(size_t size, DeviceIndex device, cudaStream_t stream) {
        const uint64_t pool = routed_.load(std::memory_order_relaxed) ? pool_of(device, stream) : 0;
        void *ptr = pool == 0 ? api.malloc(size, device, stream) : api.pool_malloc(pool, size, stream);
        if (ptr == nullptr && size != 0) {
            fail();
        }
        return ptr;
    }

    // The pool that this thread's requests for the stream come from; 0 if there is none.
    uint64_t pool_of(DeviceIndex device, cudaStream_t stream) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto route = routes_.rbegin(); route != routes_.rend(); ++route) {
            if (route->device == device && route->filter(stream)) {
                Pool &pool = pools_[{device, route->id}];
                if (pool.pool == 0) {
                    pool.pool = api.pool_create(device, pool.options);
                }
                if (pool.pool == 0) {
                    fail();
                }
                return pool.pool;
            }
        }
        return 0;
    }

    void set_option(DeviceIndex device, MempoolId_t id, int option, bool on) {
        const std::lock_guard<std::mutex> lock(mutex_);
        Pool &pool = pools_[{device, id}];
        // PyTorch turns options off as it destroys a pool, when there must be no exception.
        TORCH_CHECK(pool.pool == 0 || !on, "Aquifer: the options of a pool must be set before memory is asked of it");
        pool.options = on ? pool.options | option : pool.options & ~option;
    }

    std::mutex mutex_;
    std::map<DeviceIndex, double> fractions_;
    std::map<std::pair<DeviceIndex, MempoolId_t>, Pool> pools_;
    std::vector<Route> routes_;
    std::atomic<bool> routed_{false};
};

} // namespace

// Makes Aquifer PyTorch's allocator. Returns null, or what is wrong.
EXPORTED const char *aquifer_torch_enable() {
    static std::string error;
    try {
        // Never destroyed: tensors are freed as the process exits.
        static auto &allocator = *new std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator>(std::make_shared<Allocator>());
        torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(allocator);
        return nullptr;
    } catch (const std::exception &thrown) {
        error = thrown.what();
        return error.c_str();
    }
}

#endif

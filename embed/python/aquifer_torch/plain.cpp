// Aquifer through PyTorch's pluggable allocator: see `library.h`.

#include "pools.h"

#include <ATen/detail/CUDAHooksInterface.h>

namespace {

// Never destroyed: tensors are freed as the process exits.
Pools &pools() {
    static auto &pools = *new Pools;
    return pools;
}

} // namespace

EXPORTED void *aquifer_torch_malloc(ssize_t size, int device, CUstream_st *stream) {
    void *ptr = pools().take(size, device, stream);
    if (ptr == nullptr && size != 0) {
        refuse(size, device, [] {});
    }
    profile(ptr, 1);
    return ptr;
}

EXPORTED void aquifer_torch_free(void *ptr, ssize_t size, int device, void *stream) {
    profile(ptr, -1);
    api.free(ptr, size, device, stream);
}

// For graphs. PyTorch passes these by value, as C++ has them.

EXPORTED void aquifer_torch_begin_allocate_to_pool(int device, c10::MempoolId_t id, Pools::Filter filter) {
    pools().begin(device, id, std::move(filter));
}

EXPORTED void aquifer_torch_end_allocate_to_pool(int device, c10::MempoolId_t id) {
    pools().end(device, id);
}

EXPORTED void aquifer_torch_release_pool(int device, c10::MempoolId_t id) {
    pools().release(device, id);
}

EXPORTED void aquifer_torch_empty_cache() {
    check(api.empty_cache(-1));
}

EXPORTED void aquifer_torch_set_memory_fraction(double fraction, int device) {
    check(api.set_memory_fraction(device, fraction));
}

namespace {

// PyTorch's pluggable allocator, with the functions of `torch.accelerator` that it lacks.
class Generic final : public c10::DeviceAllocator {
  public:
    explicit Generic(c10::DeviceAllocator &pluggable) : pluggable_(pluggable) {}

    c10::DataPtr allocate(size_t size) override {
        return pluggable_.allocate(size);
    }

    c10::DeleterFnPtr raw_deleter() const override {
        return pluggable_.raw_deleter();
    }

    void copy_data(void *to, const void *from, size_t size) const override {
        pluggable_.copy_data(to, from, size);
    }

    bool initialized() override {
        return pluggable_.initialized();
    }

    void recordStream(const c10::DataPtr &ptr, c10::Stream stream) override {
        pluggable_.recordStream(ptr, stream);
    }

    void emptyCache(c10::MempoolId_t id) override {
        pluggable_.emptyCache(id);
    }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        return device_stats(device);
    }

    void resetAccumulatedStats(c10::DeviceIndex device) override {
        check(api.reset_accumulated(device));
    }

    void resetPeakStats(c10::DeviceIndex device) override {
        check(api.reset_peak(device));
    }

    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        return pluggable_.getMemoryInfo(device);
    }

  private:
    c10::DeviceAllocator &pluggable_;
};

} // namespace

// Makes the pluggable allocator, which PyTorch uses by now, that of device-generic functions. Returns null, or what is wrong.
EXPORTED const char *aquifer_torch_enable() {
    return enabled([] {
        auto *pluggable = dynamic_cast<c10::DeviceAllocator *>(at::detail::getCUDAHooks().getCUDADeviceAllocator());
        TORCH_CHECK(pluggable != nullptr, "PyTorch's pluggable allocator is no DeviceAllocator");
        // Never destroyed: tensors are freed as the process exits.
        serve_generic_functions(new Generic(*pluggable));
    });
}

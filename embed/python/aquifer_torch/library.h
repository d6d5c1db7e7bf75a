// What the two forms of Aquifer as PyTorch's allocator share: the functions of the C library, errors, statistics, and reports to PyTorch's
// profiler. Each form is one source file, which a user's PyTorch builds at first use:
//
// * `shim.cpp` replaces PyTorch's own allocator, statistics and pools included. It needs CUDA's headers, and PyTorch's of a version that has
//   these virtual functions.
// * `plain.cpp` has functions for `CUDAPluggableAllocator`, and needs no headers of CUDA.
//
// Both also become c10's allocator of CUDA devices, which device-generic functions (`torch.accelerator`) ask. In both, a request that finds no
// memory throws: PyTorch takes a null pointer for memory.

#pragma once

#include <dlfcn.h>

#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <string>
#include <type_traits>
#include <unordered_map>

#include <c10/core/CachingDeviceAllocator.h>
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
    double (*memory_fraction)(int);
    int (*set_tag)(const char *);
    uint64_t (*memory_allocated)(int);
    uint64_t (*memory_reserved)(int);
    uint64_t (*allocation_size)(void *, int *);
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

// The report of a request that found no memory, in the words that programs look for in PyTorch's errors.
std::string out_of_memory() {
    const std::string said = "out of memory";
    std::string text = api.last_error();
    if (text.compare(0, said.size(), said) == 0) {
        text.erase(0, text.find(' ', said.size()) + 1);
    }
    if (!text.empty()) {
        text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
    }
    return "CUDA out of memory. " + text;
}

[[noreturn]] void fail() {
    TORCH_CHECK_WITH(OutOfMemoryError, api.last_status() != kOutOfMemory, out_of_memory());
    TORCH_CHECK(false, "Aquifer: ", api.last_error());
    std::abort();
}

void check(int status) {
    if (status != 0) {
        fail();
    }
}

c10::Device cuda(int device) {
    return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)};
}

// Fails a request for memory. If there was not enough, calls `observe` before; it may call the library.
template <typename Observe> [[noreturn]] void refuse(size_t size, int device, Observe observe) {
    if (api.last_status() != kOutOfMemory) {
        fail();
    }
    const std::string text = out_of_memory();
    if (c10::memoryProfilingEnabled()) {
        c10::reportOutOfMemoryToProfiler(
            static_cast<int64_t>(size), api.memory_allocated(device), api.memory_reserved(device), cuda(device));
    }
    observe();
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    std::abort();
}

// Tells the profiler of memory that was just allocated, or with `sign` -1 is about to be freed.
void profile(void *ptr, int sign) {
    if (ptr == nullptr || !c10::memoryProfilingEnabled()) {
        return;
    }
    int device = 0;
    const uint64_t size = api.allocation_size(ptr, &device);
    if (size != 0) {
        const uint64_t allocated = api.memory_allocated(device) - (sign < 0 ? size : 0);
        c10::reportMemoryUsageToProfiler(ptr, sign * static_cast<int64_t>(size), allocated, api.memory_reserved(device), cuda(device));
    }
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

c10::CachingDeviceAllocator::DeviceStats device_stats(int device) {
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
    c10::CachingDeviceAllocator::DeviceStats of;
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

// Makes an allocator that is never destroyed c10's of CUDA devices. PyTorch registers its own with a priority.
void serve_generic_functions(c10::Allocator *allocator) {
    c10::SetAllocator(c10::DeviceType::CUDA, allocator, UINT8_MAX);
}

// Runs `enable` and returns null, or what is wrong.
template <typename Enable> const char *enabled(Enable enable) {
    static std::string error;
    try {
        enable();
        return nullptr;
    } catch (const c10::Error &thrown) {
        error = thrown.what_without_backtrace();
        return error.c_str();
    } catch (const std::exception &thrown) {
        error = thrown.what();
        return error.c_str();
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
    FIND(memory_fraction);
    FIND(set_tag);
    FIND(memory_allocated);
    FIND(memory_reserved);
    FIND(allocation_size);
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

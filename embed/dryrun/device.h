// The simulated device of a dry run: its memory and addresses, which the functions of the CUDA runtime and of the driver share.
//
// Addresses come from a reservation that nothing can read or write, so the device has no contents: kernels and copies to it do nothing.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace dryrun {

// Unit of physical memory, of reservations, and of what cudaMalloc takes from the device.
constexpr uint64_t GRANULE = 2 << 20;

// What `aquifer-stress` reads when the process has ended, in this order: a file of the run's folder, named by the process id.
struct Figures {
    std::atomic<uint64_t> capacity, held, peak, refusals, refused, reads;
};

// The card, as AQUIFER_DRYRUN_DEVICE has it.
struct Card {
    uint64_t bytes = 80ull << 30;
    int major = 9, minor = 0, multiprocessors = 132, maps = 1, shares_host_memory = 0;
    char name[128] = "NVIDIA H100 (simulated)";

    // Shared memory that a block may have at most; a multiprocessor has 1 KiB more.
    int shared_memory() const;
    // Threads that a multiprocessor runs at most.
    int threads() const;
    // The architecture of the code for it in PyTorch's wheels.
    int code() const;
};

const Card& card();
Figures& figures();

// The functions below return CUDA_SUCCESS or the error that CUDA's function of that name gives; runtime and driver number these alike.

CUresult allocate(uint64_t* address, size_t bytes);
CUresult release(uint64_t address);
CUresult reserve(uint64_t* address, size_t bytes, size_t alignment);
CUresult unreserve(uint64_t address, size_t bytes);
CUresult create_physical(CUmemGenericAllocationHandle* handle, size_t bytes);
CUresult release_physical(CUmemGenericAllocationHandle handle);
CUresult map(uint64_t address, size_t bytes, CUmemGenericAllocationHandle handle);
CUresult unmap(uint64_t address, size_t bytes);
CUresult allocate_host(void** memory, size_t bytes);
CUresult release_host(void* memory);

// Notes host memory of the program as pinned, or no longer.
void pin(void* memory, size_t bytes);
void unpin(void* memory);

bool is_device(const void* address);
bool is_pinned(const void* address);
void memory_info(size_t* free, size_t* total);

// Copies, at once. What is read from the device is zeros, but every Nth single byte, which conditions are, is 1: AQUIFER_DRYRUN_FILL is N.
void copy(void* to, const void* from, size_t bytes);
void fill(void* to, int value, size_t bytes);

// A time in nanoseconds, for events.
uint64_t now();

// Says that a function is not simulated, once for each kind of functions. Returns `code`.
int unsupported(const char* function, int code);

}  // namespace dryrun

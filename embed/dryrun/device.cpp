#include "device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <unordered_map>

namespace dryrun {
namespace {

uint64_t rounded(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

// Free addresses: the lowest that fit are taken.
class Addresses {
    std::map<uint64_t, uint64_t> free;  // start → length, no two adjacent

public:
    uint64_t start = 0, bytes = 0;

    // Reserves what the process can have, up to 32 TiB.
    Addresses() {
        for (bytes = 32ull << 40; bytes >= GRANULE; bytes /= 2) {
            void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (memory == MAP_FAILED) continue;
            start = rounded(reinterpret_cast<uint64_t>(memory), GRANULE);
            bytes -= GRANULE;
            free[start] = bytes;
            return;
        }
        fprintf(stderr, "aquifer: the dry run cannot reserve addresses; raise the limit of virtual memory (ulimit -v)\n");
        abort();
    }

    // 0 if no range is long enough.
    uint64_t take(uint64_t length, uint64_t alignment) {
        for (auto range = free.begin(); range != free.end(); ++range) {
            auto [from, whole] = *range;
            uint64_t address = rounded(from, alignment), before = address - from;
            if (before + length > whole) continue;
            free.erase(range);
            if (before) free[from] = before;
            if (before + length < whole) free[address + length] = whole - before - length;
            return address;
        }
        return 0;
    }

    void give(uint64_t address, uint64_t length) {
        auto next = free.lower_bound(address);
        if (next != free.end() && next->first == address + length) {
            length += next->second;
            next = free.erase(next);
        }
        if (next != free.begin()) {
            auto before = std::prev(next);
            if (before->first + before->second == address) {
                before->second += length;
                return;
            }
        }
        free[address] = length;
    }
};

struct Physical {
    uint64_t bytes;
    int references;  // its handle, and mappings
    bool has_handle;
};

struct Mapping {
    uint64_t bytes;
    CUmemGenericAllocationHandle handle;
};

struct Device {
    std::mutex lock;
    Addresses addresses;
    std::map<uint64_t, uint64_t> allocations, reservations, pinned;  // start → length
    std::unordered_map<CUmemGenericAllocationHandle, Physical> physical;
    std::map<uint64_t, Mapping> mappings;
    CUmemGenericAllocationHandle next_handle = 1;

    // Takes memory from the device; false where it has not so much.
    bool take(uint64_t bytes) {
        Figures& now = figures();
        if (bytes > now.capacity - now.held) {
            now.refusals++;
            now.refused = bytes;
            return false;
        }
        now.held += bytes;
        if (now.held > now.peak) now.peak = now.held.load();
        return true;
    }

    void unreference(CUmemGenericAllocationHandle handle) {
        auto found = physical.find(handle);
        if (--found->second.references == 0) {
            figures().held -= found->second.bytes;
            physical.erase(found);
        }
    }
};

// Never destroyed: programs free memory while they exit.
Device& device() {
    static Device* device = new Device();
    return *device;
}

// What a condition on the device's values is: every Nth is true.
char condition() {
    static const uint64_t every = getenv("AQUIFER_DRYRUN_FILL") ? strtoull(getenv("AQUIFER_DRYRUN_FILL"), nullptr, 10) : 0;
    static std::atomic<uint64_t> asked{0};
    return every != 0 && ++asked % every == 0;
}

}  // namespace

const Card& card() {
    static const Card card = [] {
        Card read;
        const char* text = getenv("AQUIFER_DRYRUN_DEVICE");
        if (text && sscanf(text, "%lu;%d.%d;%d;%d;%d;%127[^\n]", &read.bytes, &read.major, &read.minor, &read.multiprocessors, &read.maps,
                           &read.shares_host_memory, read.name) != 7) {
            fprintf(stderr, "aquifer: AQUIFER_DRYRUN_DEVICE is not BYTES;MAJOR.MINOR;MULTIPROCESSORS;MAPS;SHARES_HOST_MEMORY;NAME: %s\n", text);
            abort();
        }
        return read;
    }();
    return card;
}

int Card::shared_memory() const { return (major == 8 && (minor == 0 || minor == 7) ? 163 : major == 9 || major == 10 ? 227 : 99) << 10; }
int Card::threads() const { return (major == 8 && minor != 0) || major == 12 ? 1536 : 2048; }
int Card::code() const { return major * 10 + (major == 8 && minor >= 6 ? 6 : 0); }

Figures& figures() {
    static Figures* figures = [] {
        void* memory = MAP_FAILED;
        if (const char* folder = getenv("AQUIFER_DRYRUN_FIGURES")) {
            std::string path = std::string(folder) + "/" + std::to_string(getpid());
            int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
            if (file < 0 || ftruncate(file, sizeof(Figures)) != 0) perror(path.c_str());
            memory = mmap(nullptr, sizeof(Figures), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            close(file);
        }
        auto* figures = memory == MAP_FAILED ? new Figures() : static_cast<Figures*>(memory);
        figures->capacity = card().bytes;
        // A program that replaced this process held what is left in the file.
        figures->held = 0;
        return figures;
    }();
    return *figures;
}

CUresult allocate(uint64_t* address, size_t bytes) {
    Device& on = device();
    // What is larger than the device is refused, and does not overflow.
    uint64_t whole = bytes > card().bytes ? bytes : rounded(bytes, GRANULE);
    std::lock_guard<std::mutex> guard(on.lock);
    if (!on.take(whole)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (!(*address = on.addresses.take(whole, GRANULE))) {
        figures().held -= whole;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    on.allocations[*address] = whole;
    return CUDA_SUCCESS;
}

CUresult release(uint64_t address) {
    Device& on = device();
    std::lock_guard<std::mutex> guard(on.lock);
    auto found = on.allocations.find(address);
    if (found == on.allocations.end()) return CUDA_ERROR_INVALID_VALUE;
    on.addresses.give(found->first, found->second);
    figures().held -= found->second;
    on.allocations.erase(found);
    return CUDA_SUCCESS;
}

CUresult reserve(uint64_t* address, size_t bytes, size_t alignment) {
    Device& on = device();
    std::lock_guard<std::mutex> guard(on.lock);
    if (bytes == 0 || bytes % GRANULE) return CUDA_ERROR_INVALID_VALUE;
    if (!(*address = on.addresses.take(bytes, alignment > GRANULE ? alignment : GRANULE))) return CUDA_ERROR_OUT_OF_MEMORY;
    on.reservations[*address] = bytes;
    return CUDA_SUCCESS;
}

CUresult unreserve(uint64_t address, size_t bytes) {
    Device& on = device();
    std::lock_guard<std::mutex> guard(on.lock);
    auto found = on.reservations.find(address);
    if (found == on.reservations.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
    on.addresses.give(address, bytes);
    on.reservations.erase(found);
    return CUDA_SUCCESS;
}

CUresult create_physical(CUmemGenericAllocationHandle* handle, size_t bytes) {
    Device& on = device();
    std::lock_guard<std::mutex> guard(on.lock);
    if (bytes == 0 || bytes % GRANULE) return CUDA_ERROR_INVALID_VALUE;
    if (!on.take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = on.next_handle++;
    on.physical[*handle] = {bytes, 1, true};
    return CUDA_SUCCESS;
}

CUresult release_physical(CUmemGenericAllocationHandle handle) {
    Device& on = device();
    std::lock_guard<std::mutex> guard(on.lock);
    auto found = on.physical.find(handle);
    if (found == on.physical.end() || !found->second.has_handle) return CUDA_ERROR_INVALID_VALUE;
    found->second.has_handle = false;
    on.unreference(handle);
    return CUDA_SUCCESS;
}

CUresult map(uint64_t address, size_t bytes, CUmemGenericAllocationHandle handle) {
    Device& on = device();
    std::lock_guard<std::mutex> guard(on.lock);
    auto found = on.physical.find(handle);
    if (found == on.physical.end() || !found->second.has_handle || found->second.bytes < bytes || on.mappings.count(address))
        return CUDA_ERROR_INVALID_VALUE;
    found->second.references++;
    on.mappings[address] = {bytes, handle};
    return CUDA_SUCCESS;
}

CUresult unmap(uint64_t address, size_t bytes) {
    Device& on = device();
    std::lock_guard<std::mutex> guard(on.lock);
    // The range may span several mappings.
    for (uint64_t end = address + bytes; address < end;) {
        auto found = on.mappings.find(address);
        if (found == on.mappings.end()) return CUDA_ERROR_INVALID_VALUE;
        auto [length, handle] = found->second;
        on.unreference(handle);
        on.mappings.erase(found);
        address += length;
    }
    return CUDA_SUCCESS;
}

CUresult allocate_host(void** memory, size_t bytes) {
    *memory = nullptr;
    if (bytes == 0) return CUDA_SUCCESS;
    void* mapped = mmap(nullptr, rounded(bytes, 4096), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    pin(*memory = mapped, rounded(bytes, 4096));
    return CUDA_SUCCESS;
}

CUresult release_host(void* memory) {
    if (!memory) return CUDA_SUCCESS;
    Device& on = device();
    std::lock_guard<std::mutex> guard(on.lock);
    auto found = on.pinned.find(reinterpret_cast<uint64_t>(memory));
    if (found == on.pinned.end()) return CUDA_ERROR_INVALID_VALUE;
    munmap(memory, found->second);
    on.pinned.erase(found);
    return CUDA_SUCCESS;
}

void pin(void* memory, size_t bytes) {
    Device& on = device();
    std::lock_guard<std::mutex> guard(on.lock);
    on.pinned[reinterpret_cast<uint64_t>(memory)] = bytes;
}

void unpin(void* memory) {
    Device& on = device();
    std::lock_guard<std::mutex> guard(on.lock);
    on.pinned.erase(reinterpret_cast<uint64_t>(memory));
}

bool is_device(const void* address) {
    const Addresses& all = device().addresses;
    return reinterpret_cast<uint64_t>(address) - all.start < all.bytes;
}

bool is_pinned(const void* address) {
    Device& on = device();
    std::lock_guard<std::mutex> guard(on.lock);
    auto after = on.pinned.upper_bound(reinterpret_cast<uint64_t>(address));
    if (after == on.pinned.begin()) return false;
    auto [start, bytes] = *std::prev(after);
    return reinterpret_cast<uint64_t>(address) - start < bytes;
}

void memory_info(size_t* free, size_t* total) {
    *total = figures().capacity;
    *free = *total - figures().held;
}

void copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0 || is_device(to)) return;
    if (!is_device(from)) {
        memmove(to, from, bytes);
        return;
    }
    figures().reads++;
    memset(to, bytes == 1 ? condition() : 0, bytes);
}

void fill(void* to, int value, size_t bytes) {
    if (bytes && !is_device(to)) memset(to, value, bytes);
}

uint64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return uint64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

int unsupported(const char* function, int code) {
    static std::mutex lock;
    // Never destroyed, as programs call while they exit.
    static std::set<std::string>& said = *new std::set<std::string>();
    static const char* const kinds[][2] = {
        {"Graph", "CUDA graphs"},
        {"Capture", "CUDA graphs"},
        {"UserObject", "CUDA graphs"},
        {"Peer", "several devices"},
        {"Ipc", "memory of other processes"},
        {"Handle", "memory of other processes"},
        {"MemPool", "the driver's pools"},
        {"MallocAsync", "the driver's pools"},
        {"Managed", "managed memory"},
        {"cudnn", "cuDNN"},
        {"cusolver", "cuSOLVER"},
        {"cusparse", "cuSPARSE"},
        {"cufft", "cuFFT"},
        {"nccl", "NCCL"},
        {"cupti", "measuring kernels"},
    };
    const char* what = nullptr;
    for (auto [part, kind] : kinds)
        if (!what && strstr(function, part)) what = kind;
    std::lock_guard<std::mutex> guard(lock);
    if (said.insert(what ? what : function).second)
        fprintf(stderr, "aquifer: a dry run does not simulate %s: %s fails with %d; docs/dry-run.md lists what it cannot do\n",
                what ? what : "this", function, code);
    return code;
}

}  // namespace dryrun

// For the functions that `build` adds.
extern "C" int aquifer_dryrun_unsupported(const char* function, int code) { return dryrun::unsupported(function, code); }

// The functions of the CUDA runtime that eager programs call. `build` adds the others, which say that they are not simulated.
//
// Each does what CUDA documents for its name, on one device whose work is done at once.
#include <cstdio>
#include <cstring>
#include <utility>

#include "device.h"

using namespace dryrun;

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t result(CUresult code) {
    if (code != CUDA_SUCCESS) last_error = cudaError_t(code);
    return cudaError_t(code);
}

cudaError_t allocate_for(void** memory, size_t bytes) {
    *memory = nullptr;
    if (bytes == 0) return cudaSuccess;
    uint64_t address;
    CUresult code = allocate(&address, bytes);
    if (code == CUDA_SUCCESS) *memory = reinterpret_cast<void*>(address);
    return result(code);
}

cudaError_t copied(void* to, const void* from, size_t bytes) {
    copy(to, from, bytes);
    return cudaSuccess;
}

// The time at which it was recorded.
struct Event {
    uint64_t at = 0;
};

// The answer to a question about capture: there is none.
cudaError_t not_capturing(cudaStreamCaptureStatus* status) {
    if (status) *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

}  // namespace

// The device.

EXPORT cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) { return result(device == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE); }
EXPORT cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return memory_info(free, total), cudaSuccess; }
EXPORT cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int) { return snprintf(text, length, "0000:01:00.0"), cudaSuccess; }

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    const Card& card = dryrun::card();
    switch (int(attribute)) {
        case cudaDevAttrMaxThreadsPerBlock:
        case cudaDevAttrMaxBlockDimX:
        case cudaDevAttrMaxBlockDimY: *value = 1024; break;
        case cudaDevAttrMaxBlockDimZ: *value = 64; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = card.shared_memory(); break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = card.shared_memory() + 1024; break;
        case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrMultiProcessorCount: *value = card.multiprocessors; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card.threads(); break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
        case cudaDevAttrComputeCapabilityMajor: *value = card.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = card.minor; break;
        case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
        case cudaDevAttrClockRate: *value = 1980000; break;
        case cudaDevAttrTextureAlignment: *value = 512; break;
        case cudaDevAttrIntegrated: *value = card.shares_host_memory; break;
        case cudaDevAttrConcurrentKernels:
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrCooperativeLaunch:
        case cudaDevAttrHostRegisterSupported:
        case cudaDevAttrStreamPrioritiesSupported: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device != 0) return result(CUDA_ERROR_INVALID_DEVICE);
    const Card& card = dryrun::card();
    *properties = {};
    strcpy(properties->name, card.name);
    memcpy(&properties->uuid, "aquifer-dry-run", 16);
    properties->totalGlobalMem = card.bytes;
    properties->sharedMemPerBlock = 48 << 10;
    properties->regsPerBlock = properties->regsPerMultiprocessor = properties->totalConstMem = 65536;
    properties->warpSize = 32;
    properties->memPitch = 2147483647;
    properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->major = card.major;
    properties->minor = card.minor;
    properties->textureAlignment = properties->surfaceAlignment = 512;
    properties->texturePitchAlignment = 32;
    properties->multiProcessorCount = card.multiprocessors;
    properties->integrated = card.shares_host_memory;
    properties->canMapHostMemory = properties->concurrentKernels = properties->unifiedAddressing = 1;
    properties->streamPrioritiesSupported = properties->cooperativeLaunch = properties->hostRegisterSupported = 1;
    properties->pciBusID = 1;
    properties->asyncEngineCount = 3;
    properties->memoryBusWidth = 5120;
    properties->l2CacheSize = 50 << 20;
    properties->maxThreadsPerMultiProcessor = card.threads();
    properties->sharedMemPerMultiprocessor = card.shared_memory() + 1024;
    properties->sharedMemPerBlockOptin = card.shared_memory();
    properties->maxBlocksPerMultiProcessor = 32;
    properties->reservedSharedMemPerBlock = 1024;
    properties->hostNumaId = -1;
    return cudaSuccess;
}

// Memory.

EXPORT cudaError_t cudaMalloc(void** memory, size_t bytes) { return allocate_for(memory, bytes); }
EXPORT cudaError_t cudaFree(void* memory) {
    return memory ? result(release(reinterpret_cast<uint64_t>(memory))) : cudaSuccess;
}
EXPORT cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) { return result(allocate_host(memory, bytes)); }
EXPORT cudaError_t cudaMallocHost(void** memory, size_t bytes) { return result(allocate_host(memory, bytes)); }
EXPORT cudaError_t cudaFreeHost(void* memory) { return result(release_host(memory)); }
EXPORT cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) { return pin(memory, bytes), cudaSuccess; }
EXPORT cudaError_t cudaHostUnregister(void* memory) { return unpin(memory), cudaSuccess; }

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
    *attributes = {};
    void* address = const_cast<void*>(memory);
    if (is_device(memory)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = address;
    } else if (is_pinned(memory)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->hostPointer = attributes->devicePointer = address;
    } else {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = cudaInvalidDeviceId;
        attributes->hostPointer = address;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { return copied(to, from, bytes); }
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    return copied(to, from, bytes);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                                     cudaMemcpyKind, cudaStream_t) {
    for (size_t row = 0; row < height; row++)
        copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
EXPORT cudaError_t cudaMemset(void* to, int value, size_t bytes) { return fill(to, value, bytes), cudaSuccess; }
EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { return fill(to, value, bytes), cudaSuccess; }

// Streams and events.

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    return *stream = reinterpret_cast<cudaStream_t>(new char), cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete reinterpret_cast<char*>(stream), cudaSuccess; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
    return callback(stream, cudaSuccess, data), cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) { return function(data), cudaSuccess; }
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) { return not_capturing(status); }
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                            const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    return not_capturing(status);
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
    return std::swap(*mode, current), cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return *event = reinterpret_cast<cudaEvent_t>(new Event()), cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<Event*>(event), cudaSuccess; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) {
    return reinterpret_cast<Event*>(event)->at = now(), cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    int64_t ns = reinterpret_cast<Event*>(to)->at - reinterpret_cast<Event*>(from)->at;
    return *ms = ns * 1e-6f, cudaSuccess;
}

// Kernels, which do nothing.

EXPORT cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return cudaSuccess; }
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = card().code();
    attributes->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t, unsigned) {
    int most = threads > 0 ? card().threads() / threads : 1;
    return *blocks = most < 1 ? 1 : most > 32 ? 32 : most, cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

// What compiled CUDA programs call to register and launch their kernels.

EXPORT void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st*) { return 0; }
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    if (grid) *grid = {};
    if (block) *block = {};
    if (shared) *shared = 0;
    if (stream) *static_cast<cudaStream_t*>(stream) = nullptr;
    return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    return *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function)), cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaSuccess; }

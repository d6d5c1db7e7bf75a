// The functions of the CUDA driver that PyTorch, Triton and Aquifer call. A function that is not here is not found.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "device.h"

using namespace dryrun;

namespace {

const CUcontext CONTEXT = reinterpret_cast<CUcontext>(0x100);
const CUmodule MODULE = reinterpret_cast<CUmodule>(0x200);
const CUfunction FUNCTION = reinterpret_cast<CUfunction>(0x300);

CUresult done(cudaError_t code) { return CUresult(code); }

CUresult copied(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return CUDA_SUCCESS;
}

// A function of this library by the name that programs ask for, of which there may be a later form.
void* entry(const char* name) {
    static void* const self = [] {
        Dl_info info;
        return dladdr(reinterpret_cast<void*>(&entry), &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
    }();
    void* later = dlsym(self, (std::string(name) + "_v2").c_str());
    return later ? later : dlsym(self, name);
}

}  // namespace

EXPORT CUresult cuGetErrorString(CUresult code, const char** text) {
    switch (code) {
        case CUDA_SUCCESS: *text = "no error"; break;
        case CUDA_ERROR_OUT_OF_MEMORY: *text = "out of memory"; break;
        case CUDA_ERROR_INVALID_VALUE: *text = "invalid argument"; break;
        case CUDA_ERROR_NOT_SUPPORTED: *text = "operation not supported"; break;
        default: *text = "an error of the dry run"; break;
    }
    return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult, const char** text) { return *text = "CUDA_ERROR", CUDA_SUCCESS; }

// The device and its context.

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = 0, ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }
EXPORT CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetName(char* text, int length, CUdevice) { return snprintf(text, length, "%s", card().name), CUDA_SUCCESS; }
EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) { return *bytes = card().bytes, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice) { return memcpy(uuid, "aquifer-dry-run", 16), CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return *value = card().maps, CUDA_SUCCESS;
        default: return done(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
    }
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { return *flags = 0, *active = 1, CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return *context = CONTEXT, CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) { return *context = CONTEXT, CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent(CUcontext* context) {
    if (context) *context = CONTEXT;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
EXPORT CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 0, CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return done(cudaDeviceGetStreamPriorityRange(least, greatest));
}

// Memory.

EXPORT CUresult cuMemGetInfo(size_t* free, size_t* total) { return memory_info(free, total), CUDA_SUCCESS; }
EXPORT CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
    uint64_t allocated;
    CUresult code = bytes == 0 ? CUDA_ERROR_INVALID_VALUE : allocate(&allocated, bytes);
    if (code == CUDA_SUCCESS) *address = allocated;
    return code;
}
EXPORT CUresult cuMemFree(CUdeviceptr address) { return address ? release(address) : CUDA_SUCCESS; }
EXPORT CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned) { return allocate_host(memory, bytes); }
EXPORT CUresult cuMemFreeHost(void* memory) { return release_host(memory); }
EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    const void* memory = reinterpret_cast<const void*>(address);
    if (!is_device(memory) && !is_pinned(memory)) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(value) = CONTEXT; break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned*>(value) = is_device(memory) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = address; break;
        // The values of 8 bytes that are not known.
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: return CUDA_ERROR_NOT_SUPPORTED;
        default: *static_cast<int*>(value) = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    return *bytes = GRANULE, CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long) {
    uint64_t reserved;
    CUresult code = reserve(&reserved, bytes, alignment);
    if (code == CUDA_SUCCESS) *address = reserved;
    return code;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { return unreserve(address, bytes); }
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
    return create_physical(handle, bytes);
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return release_physical(handle); }
EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    return map(address, bytes, handle);
}
EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) { return unmap(address, bytes); }
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
// PyTorch wants these to be there.
#define ABSENT(function, ...) \
    EXPORT CUresult function(__VA_ARGS__) { return CUresult(unsupported(#function, CUDA_ERROR_NOT_SUPPORTED)); }

ABSENT(cuMemGetAddressRange, CUdeviceptr*, size_t*, CUdeviceptr)
ABSENT(cuMemRetainAllocationHandle, CUmemGenericAllocationHandle*, void*)
ABSENT(cuMemGetAllocationPropertiesFromHandle, CUmemAllocationProp*, CUmemGenericAllocationHandle)
ABSENT(cuMemExportToShareableHandle, void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long)
ABSENT(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType)

EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
    return copied(to, reinterpret_cast<CUdeviceptr>(from), bytes);
}
EXPORT CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream) {
    return copied(reinterpret_cast<CUdeviceptr>(to), from, bytes);
}
EXPORT CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) { return copied(to, from, bytes); }
EXPORT CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemsetD32Async(CUdeviceptr, unsigned, size_t, CUstream) { return CUDA_SUCCESS; }
EXPORT CUresult cuStreamWriteValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned) { return CUDA_SUCCESS; }

// Streams and events: the runtime's.

EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned) { return done(cudaStreamCreate(stream)); }
EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int) { return done(cudaStreamCreate(stream)); }
EXPORT CUresult cuStreamDestroy(CUstream stream) { return done(cudaStreamDestroy(stream)); }
EXPORT CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
EXPORT CUresult cuStreamQuery(CUstream) { return CUDA_SUCCESS; }
EXPORT CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuStreamGetCtx(CUstream, CUcontext* context) { return *context = CONTEXT, CUDA_SUCCESS; }
EXPORT CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) { return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS; }
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    return done(cudaThreadExchangeStreamCaptureMode(reinterpret_cast<cudaStreamCaptureMode*>(mode)));
}
EXPORT CUresult cuEventCreate(CUevent* event, unsigned flags) { return done(cudaEventCreateWithFlags(event, flags)); }
EXPORT CUresult cuEventDestroy(CUevent event) { return done(cudaEventDestroy(event)); }
EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) { return done(cudaEventRecord(event, stream)); }
EXPORT CUresult cuEventQuery(CUevent) { return CUDA_SUCCESS; }
EXPORT CUresult cuEventSynchronize(CUevent) { return CUDA_SUCCESS; }
EXPORT CUresult cuEventElapsedTime(float* ms, CUevent from, CUevent to) { return done(cudaEventElapsedTime(ms, from, to)); }

// Modules and kernels, which do nothing.

EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) { return *module = MODULE, CUDA_SUCCESS; }
EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) { return *module = MODULE, CUDA_SUCCESS; }
EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) { return *module = MODULE, CUDA_SUCCESS; }
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) { return *function = FUNCTION, CUDA_SUCCESS; }
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) { return *value = 0, CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, size_t) {
    return done(cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, nullptr, threads, 0));
}
EXPORT CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**) {
    return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**) { return CUDA_SUCCESS; }
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**) {
    return CUDA_SUCCESS;
}
EXPORT CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState* state) {
    return *state = reinterpret_cast<CUlinkState>(MODULE), CUDA_SUCCESS;
}
EXPORT CUresult cuLinkAddData(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) { return CUDA_SUCCESS; }
EXPORT CUresult cuLinkComplete(CUlinkState, void** code, size_t* bytes) {
    static char none[16];
    return *code = none, *bytes = sizeof none, CUDA_SUCCESS;
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                       const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    return *map = {}, CUDA_SUCCESS;
}

// Functions by name.

// The form of CUDA 11, which tells nothing beside the function.
CUresult get_proc_address(const char* name, void** function, int, cuuint64_t) {
    *function = entry(name);
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
EXPORT CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t, CUdriverProcAddressQueryResult* found) {
    bool is_old = !strcmp(name, "cuGetProcAddress") && version < 12000;
    *function = is_old ? reinterpret_cast<void*>(get_proc_address) : entry(name);
    if (found) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
    *function = entry(name);
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// NVIDIA's libraries beside the runtime: what PyTorch reads of cuBLAS's results, and the doors of those that are not simulated.
// `build` adds cuBLAS's other functions, which do nothing and succeed.
#include <cublasLt.h>

#include <cstdlib>
#include <cstring>

#include "device.h"

namespace {

// NVML's code.
constexpr int NOT_SUPPORTED = 3;

// An object that is nothing but its address.
template <class Handle>
cublasStatus_t made(Handle* handle) {
    *handle = reinterpret_cast<Handle>(calloc(1, sizeof(cublasLtMatmulAlgo_t)));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t freed(const void* handle) {
    free(const_cast<void*>(handle));
    return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) { return made(handle); }
EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) { return freed(handle); }
EXPORT cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int* version) { return *version = CUBLAS_VERSION, CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) { return *mode = CUBLAS_DEFAULT_MATH, CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* mode) {
    return *mode = CUBLAS_POINTER_MODE_HOST, CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetStream_v2(cublasHandle_t, cudaStream_t* stream) { return *stream = nullptr, CUBLAS_STATUS_SUCCESS; }

EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return made(handle); }
EXPORT cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return freed(handle); }
EXPORT size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made_, cublasComputeType_t, cudaDataType_t) { return made(made_); }
EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t handle) { return freed(handle); }
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made_, cudaDataType, uint64_t, uint64_t, int64_t) {
    return made(made_);
}
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t handle) { return freed(handle); }
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made_) { return made(made_); }
EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle) { return freed(handle); }

// One algorithm, without a workspace.
EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int most,
                                                     cublasLtMatmulHeuristicResult_t results[], int* count) {
    if ((*count = most > 0)) results[0] = {.algo = {}, .workspaceSize = 0, .state = CUBLAS_STATUS_SUCCESS, .wavesCount = 1.0f, .reserved = {}};
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*,
                                              cublasLtMatmulHeuristicResult_t* result) {
    return *result = {}, CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t*, cublasLtMatmulAlgoConfigAttributes_t, void* value,
                                                           size_t bytes, size_t* written) {
    if (value) memset(value, 0, bytes);
    if (written) *written = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

// NVML, as far as PyTorch asks it: one device, of which nothing more is known.

EXPORT int nvmlInit() { return 0; }
EXPORT int nvmlInit_v2() { return 0; }
EXPORT int nvmlShutdown() { return 0; }
EXPORT int nvmlDeviceGetCount_v2(unsigned* count) { return *count = 1, 0; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = CUDA_VERSION, 0; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) { return *device = nullptr, 0; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = nullptr, 0; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, unsigned*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NOT_SUPPORTED; }

// What programs call first of a library that is not simulated, with its status of something that is not initialized.
#define ABSENT(function, status) \
    EXPORT int function() { return dryrun::unsupported(#function, status); }

ABSENT(cudnnCreate, 1001)
ABSENT(cusolverDnCreate, 1)
ABSENT(cusparseCreate, 1)
ABSENT(cufftCreate, 5)
ABSENT(ncclGetUniqueId, 1)
ABSENT(ncclCommInitRank, 1)
ABSENT(ncclCommInitRankConfig, 1)

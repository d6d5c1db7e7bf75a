// aquifer_mr.hpp with libcu++, and with RMM where RMM is defined: `ci/embed cpp` compiles both, and runs the former on
// the stand-in.
#include <cstdio>
#include <cstring>

#include <cuda.h>

#include "aquifer_mr.hpp"

#ifdef RMM
#include <rmm/device_uvector.hpp>
#include <rmm/mr/limiting_resource_adaptor.hpp>
#include <rmm/mr/per_device_resource.hpp>

rmm::device_uvector<int> with_rmm(cuda::stream_ref stream) {
  aquifer::memory_resource memory{0};
  rmm::mr::set_current_device_resource(memory);
  rmm::mr::limiting_resource_adaptor limited{memory, std::size_t{1} << 30};
  return rmm::device_uvector<int>(1000, stream, limited);
}
#endif

#define CHECK(what) if (!(what)) return std::fprintf(stderr, "line %d: %s\n", __LINE__, #what), 1

int main() {
  CUcontext context;
  CUstream handle, other;
  CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
  CHECK(cuStreamCreate(&handle, CU_STREAM_NON_BLOCKING) == 0 && cuStreamCreate(&other, CU_STREAM_NON_BLOCKING) == 0);
  cuda::stream_ref stream{reinterpret_cast<cudaStream_t>(handle)};
  aquifer::memory_resource memory{0};
  cuda::mr::any_resource<cuda::mr::device_accessible> any{memory};
  auto shared = cuda::mr::make_shared_resource<aquifer::memory_resource>(0);
  std::size_t const bytes = 1 << 20;

  void* const one = any.allocate(stream, bytes, 256);
  CHECK(cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(one), 7, bytes, handle) == 0);
  any.deallocate(stream, one, bytes, 256);
  void* const two = shared.allocate(stream, bytes, 512);
  CHECK(two == one && aquifer_memory_allocated(0) == bytes);  // in the order of the stream, without a wait
  shared.deallocate(stream, two, bytes, 512);

  void* const ready = any.allocate_sync(bytes, 256);
  CHECK(cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(ready), 7, bytes, other) == 0 && cuStreamSynchronize(other) == 0);
  any.deallocate_sync(ready, bytes, 256);
  CHECK(memory.allocate(stream, 0) == nullptr && aquifer_memory_allocated(0) == 0);
  CHECK(memory == aquifer::memory_resource{0} && memory != aquifer::memory_resource{1});

  try {
    memory.allocate(stream, std::size_t{1} << 40);
    CHECK(!"the device is that large");
  } catch (std::bad_alloc const& error) {
    CHECK(std::strstr(error.what(), "1024.00 GiB") != nullptr);
  }
  try {
    memory.allocate(stream, bytes, 4096);
    CHECK(!"memory is aligned to a page");
  } catch (std::bad_alloc const& error) {
    CHECK(std::strstr(error.what(), "512") != nullptr);
  }
  CHECK(aquifer_forget_stream(0, handle) == 0 && aquifer_forget_stream(0, other) == 0);
  return cuStreamDestroy(handle) != 0 || cuStreamDestroy(other) != 0;
}

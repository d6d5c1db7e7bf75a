// Aquifer as a memory resource of libcu++ (CCCL 3.3 and later) and of RMM (26.06 and later):
//
//     auto memory = aquifer::memory_resource{0};                       // of device 0
//     rmm::mr::set_current_device_resource(memory);                    // for all of RMM
//     rmm::device_uvector<int> numbers(1000, stream, memory);          // or for one vector
//
// Link with libaquifer_c. The memory is that of the process's allocator of the device, which
// `aquifer.h` describes; copies of a resource are one and the same.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <utility>

#include <cuda/memory_resource>
#include <cuda/stream_ref>

#include "aquifer.h"

namespace aquifer {

// Thrown where memory lacks, and by other errors. The text is Aquifer's report.
class bad_alloc : public std::bad_alloc {
 public:
  explicit bad_alloc(std::string text) : text_(std::move(text)) {}
  char const* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// Memory of one device. Calls may come from any thread.
class memory_resource {
 public:
  // All memory is aligned to so many bytes; a larger alignment is refused.
  static constexpr std::size_t alignment_max = 512;

  explicit memory_resource(int device = 0) noexcept : device_(device) {}

  // Memory for work of the stream; null for no bytes. Throws bad_alloc.
  void* allocate(cuda::stream_ref stream, std::size_t bytes, std::size_t alignment = alignment_max) {
    return checked(bytes, alignment, [&] { return aquifer_malloc(bytes, device_, stream.get()); });
  }

  // Gives memory back in the order of a stream, which need not be that of the allocation: work
  // enqueued there until now may still use it. Nothing waits. Before a stream is destroyed, call
  // aquifer_forget_stream.
  void deallocate(cuda::stream_ref stream, void* ptr, std::size_t, std::size_t = alignment_max) noexcept {
    aquifer_free_on(ptr, stream.get());
  }

  // Memory that every stream may use at once. Throws bad_alloc.
  void* allocate_sync(std::size_t bytes, std::size_t alignment = alignment_max) {
    return checked(bytes, alignment, [&] { return aquifer_malloc_ready(bytes, device_); });
  }

  // Gives memory back whose uses are all done.
  void deallocate_sync(void* ptr, std::size_t bytes, std::size_t = alignment_max) noexcept {
    aquifer_free(ptr, bytes, device_, nullptr);
  }

  friend bool operator==(memory_resource const& one, memory_resource const& other) noexcept {
    return one.device_ == other.device_;
  }
  friend bool operator!=(memory_resource const& one, memory_resource const& other) noexcept { return !(one == other); }
  friend constexpr void get_property(memory_resource const&, cuda::mr::device_accessible) noexcept {}

 private:
  template <typename Allocate>
  void* checked(std::size_t bytes, std::size_t alignment, Allocate allocate) {
    if (bytes == 0) return nullptr;
    if (alignment > alignment_max) throw bad_alloc("Aquifer aligns memory to 512 bytes; more was requested");
    void* const ptr = allocate();
    if (ptr == nullptr) throw bad_alloc(aquifer_last_error());
    return ptr;
  }

  int device_;
};

static_assert(cuda::mr::resource_with<memory_resource, cuda::mr::device_accessible>);

}  // namespace aquifer

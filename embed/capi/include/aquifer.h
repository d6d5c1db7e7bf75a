/* The C interface to Aquifer. Written by ci/header from embed/capi/src/lib.rs: do not edit. */

#ifndef AQUIFER_H
#define AQUIFER_H

#include <stddef.h>
#include <stdint.h>

// The version of this interface. Functions are added without a change of it.
#define AQUIFER_VERSION 1

// The call succeeded.
#define AQUIFER_OK 0

// The caller gave a wrong argument, or the environment a wrong configuration.
#define AQUIFER_INVALID 1

// There was not enough memory. Freeing some may help.
#define AQUIFER_OUT_OF_MEMORY 2

// A driver call failed, or was refused because a stream captures.
#define AQUIFER_DEVICE_ERROR 3

// This process was forked from one that had opened a device.
#define AQUIFER_FORKED 4

// Aquifer has a bug: the text says where.
#define AQUIFER_PANIC 5

// Contents are lost: the memory is uninitialised after waking up.
#define AQUIFER_SLEEP_DISCARD 0

// Contents are kept in pinned host memory and restored.
#define AQUIFER_SLEEP_SAVE 1

// All bytes are 0 after waking up.
#define AQUIFER_SLEEP_ZERO 2

// Other requests may take free memory of the pool rather than fail.
#define AQUIFER_POOL_USE_ON_OOM 1

// Each allocation of the pool has a segment of its own.
#define AQUIFER_POOL_NO_SPLIT 2

// A function that gets the report of an allocation that found no memory, and the data that was registered with it.
typedef void (*aquifer_oom_callback)(const char *report, void *data);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library's interface, to be compared with `AQUIFER_VERSION`.
int aquifer_version(void);

// Status of the last call of this thread that failed.
int aquifer_last_status(void);

// Text of the last call of this thread that failed; for `AQUIFER_OUT_OF_MEMORY`, the report. It is valid until the next failure of this
// thread. Empty if no call failed.
const char *aquifer_last_error(void);

// Allocates memory that is ready for work of `stream`. Returns NULL for `size` 0, and after an error.
//
// `stream` is a live `cudaStream_t` or `CUstream` of the device's primary context; 0 and 1 are the legacy default stream, 2 is that of the
// calling thread. Before its owner destroys it, call `aquifer_forget_stream`.
//
// While `stream` captures, its memory must come from a pool: call `aquifer_graph_begin` before, or
// `aquifer_pool_malloc`. A request that cached memory serves does not ask the driver whether the stream
// captures, and others would get the graph's memory.
//
// This function, `aquifer_free` and `aquifer_record_stream` have the signatures that `torch.cuda.memory.CUDAPluggableAllocator` takes.
void *aquifer_malloc(size_t size,
                     int device,
                     void *stream);

// Allocates memory that work of every stream may use, as `cudaMalloc` does. The host waits only before memory would run out. Returns NULL for
// `size` 0, and after an error.
//
// Before `aquifer_free`, wait for all work that uses the memory, as `cudaFree` does. `aquifer_free_on` frees in the order of a stream.
void *aquifer_malloc_ready(size_t size, int device);

// Frees memory from this library. It may be called while work that uses the memory is enqueued: the memory is reused after that work. Work on
// other streams than that of the allocation counts if `aquifer_record_stream` was called.
//
// `size` and `stream` are not used: PyTorch passes the stream of the allocation, which may have been destroyed. `aquifer_free_on` frees in the
// order of another stream. NULL is ignored. With `device` -1, the device is found by the pointer. Errors go to stderr.
void aquifer_free(void *ptr,
                  size_t size,
                  int device,
                  void *stream);

// As `aquifer_free`, in the order of a live stream, as `cudaFreeAsync` does: work enqueued on `stream` until now also counts. `stream` need not
// be that of the allocation. The device is found by the pointer.
void aquifer_free_on(void *ptr,
                     void *stream);

// Notes that `stream` uses memory from another stream. Call it after that use was enqueued and before `aquifer_free`. The device is found by
// the pointer. Errors go to stderr.
void aquifer_record_stream(void *ptr,
                           void *stream);

// Lets a stream go. Call it before the stream is destroyed; no other thread may use the stream with this library meanwhile.
int aquifer_forget_stream(int device,
                          void *stream);

// Gives unused memory back to the device, or with `device` -1 to all that are open. Pools keep what a
// graph may use.
int aquifer_empty_cache(int device);

// As `aquifer_empty_cache`, but only until at most `bytes` are held from the device.
int aquifer_trim_to(int device, uint64_t bytes);

// Limits the bytes held from the device. `UINT64_MAX` removes the limit.
int aquifer_set_limit(int device, uint64_t bytes);

// Limits the bytes held to a share of the device's memory, from 0 to 1. 1 removes the limit.
int aquifer_set_memory_fraction(int device, double fraction);

// The share of the device's memory to which the options limit the bytes held; 1 if they do not, 0 after an error.
double aquifer_memory_fraction(int device);

// Checks the options in the environment, before any device is opened.
int aquifer_check_options(void);

// Names what the calling thread allocates from now on, in snapshots and reports. NULL or an empty name ends that.
//
// # Safety
// `name` must be NULL or a string in UTF-8 with a closing NUL.
int aquifer_set_tag(const char *name);

// Bytes in live allocations, rounded up as they are; 0 after an error.
uint64_t aquifer_memory_allocated(int device);

// Bytes of a live allocation of this library, rounded up as they are, and the ordinal of its device unless `device` is NULL; 0 after an
// error.
//
// # Safety
// `device` must be NULL or writable.
uint64_t aquifer_allocation_size(void *ptr,
                                 int *device);

// Bytes held from the device; 0 after an error.
uint64_t aquifer_memory_reserved(int device);

// Bytes that can still be allocated, in all, once a graph keeps `graph_bytes`; 0 after an error. For engines that size a cache by what is left,
// as `cudaMemGetInfo` leaves out the unused memory held here. 0 for `graph_bytes` gives what can be allocated now.
//
// What a capture will keep is known from a pass of its work outside of the capture: call `aquifer_reset_peak` and `aquifer_memory_allocated`
// before, `aquifer_max_memory_allocated` afterwards, and subtract. Call `aquifer_empty_cache` before the capture, during which cached memory
// does not move.
uint64_t aquifer_available_after(int device, uint64_t graph_bytes);

// Peak of `aquifer_memory_allocated` since the start, or the last `aquifer_reset_peak`; 0 after an error.
uint64_t aquifer_max_memory_allocated(int device);

// Peak of `aquifer_memory_reserved` since the start, or the last `aquifer_reset_peak`; 0 after an error.
uint64_t aquifer_max_memory_reserved(int device);

// Makes peaks start from now.
int aquifer_reset_peak(int device);

// Makes counts of what happened start from 0.
int aquifer_reset_accumulated(int device);

// Writes the statistics as a JSON object, under the names of PyTorch's `memory_stats()`.
//
// As much as fits goes into `buffer`, with a closing NUL. Returns the length of the whole text without it, or 0 after an error: a result of
// at least `capacity` means that the text was cut. `buffer` must be writable for `capacity` bytes; it may be NULL if that is 0.
//
// # Safety
// As above.
size_t aquifer_stats_json(int device,
                          char *buffer,
                          size_t capacity);

// Writes a snapshot of all blocks as JSON, in the form of PyTorch's `memory_snapshot()`, as `aquifer_stats_json` does.
//
// # Safety
// As `aquifer_stats_json`.
size_t aquifer_snapshot_json(int device,
                             char *buffer,
                             size_t capacity);

// Saves a snapshot for PyTorch's memory viewer as a file whose name, in UTF-8, ends in .pickle, .pkl or .json.
//
// # Safety
// `path` must be a string with a closing NUL.
int aquifer_save_snapshot(int device,
                          const char *path);

// Registers a function that is called with the report before an allocation fails for lack of memory, on its thread. It may free memory. It
// replaces the one before; NULL removes it.
//
// # Safety
// Any thread may call it with `data`, until another one is registered and the calls under way have returned.
void aquifer_on_oom(aquifer_oom_callback callback,
                    void *data);

// Lets another device access the memory of this one, now and later.
int aquifer_enable_peer_access(int device, int peer);

// Gives all memory of a device back to it until `aquifer_wake`, with `AQUIFER_SLEEP_DISCARD`,
// `AQUIFER_SLEEP_SAVE` or `AQUIFER_SLEEP_ZERO`. Live allocations keep their addresses, and may be freed. Waits for
// the device. Until they wake up, no work may use them, and allocations fail with `AQUIFER_INVALID`. It needs mapped
// memory, and fails at once while an access guard or a transfer uses some.
int aquifer_sleep(int device, int contents);

// Ends `aquifer_sleep`, and `aquifer_pool_sleep` of all pools of the device. If the device lacks memory, everything
// sleeps on, and this can be tried again.
int aquifer_wake(int device);

// As `aquifer_sleep`, for the allocations that a pool has now and for what its graphs use. All other memory can be
// used meanwhile.
int aquifer_pool_sleep(uint64_t pool, int contents);

// Ends `aquifer_pool_sleep`. After `aquifer_sleep`, the pool and later allocations can be used, and the rest sleeps on.
int aquifer_pool_wake(uint64_t pool);

// Creates a pool of memory that is kept apart, with `AQUIFER_POOL_USE_ON_OOM`, `AQUIFER_POOL_NO_SPLIT`, both or 0 as options. Returns its
// number, or 0 after an error.
uint64_t aquifer_pool_create(int device,
                             int options);

// As `aquifer_malloc`, from a pool. The stream may be capturing: the memory is then the graph's, and stays in the pool until that is released.
// Free it with `aquifer_free`.
void *aquifer_pool_malloc(uint64_t pool,
                          size_t size,
                          void *stream);

// Sends the calling thread's allocations on the pool's device to the pool while a graph is captured:
// call it after the program began to capture `stream`, and `aquifer_graph_end` on the same thread
// once it has ended that. No request outside of captures gets memory of the graph until the pool is
// released. What the capture frees serves its later allocations, and other captures of the pool. So
// the program must launch graphs that share a pool one after the other, and allocate what lives on,
// such as outputs, before.
//
// Another thread that allocates for the same capture calls it, too. Captures of several streams may
// go on at a time: the thread's allocations come from the pool of the last one that it began.
//
// Fails with `AQUIFER_INVALID` if there is no such pool, or if this thread began a graph on the
// stream and did not end it; with `AQUIFER_DEVICE_ERROR` if the stream does not capture, as the
// default stream 0 never does, if an earlier call broke the capture, or if the stream is not of the
// pool's device. Allocations are then as before.
int aquifer_graph_begin(uint64_t pool,
                        void *stream);

// Ends `aquifer_graph_begin` for the stream, whether or not the capture succeeded. Fails with
// `AQUIFER_INVALID` if this thread began no graph on the stream.
int aquifer_graph_end(void *stream);

// Notes that captures that allocated from a pool have ended: those whose streams capture no more.
int aquifer_pool_end_captures(uint64_t pool);

// Releases a pool. Its live allocations stay valid. Graphs that use its memory must not be launched any more.
int aquifer_pool_release(uint64_t pool);

// Sets the device and the stream of the three functions below, for the process: those of ONNX Runtime's CUDA provider have neither. Sessions
// that use them must compute on this stream (`user_compute_stream`).
int aquifer_ort_bind(int device,
                     void *stream);

// For the option `gpu_external_alloc`. NULL after an error.
void *aquifer_ort_alloc(size_t size);

// For the option `gpu_external_free`. Errors go to stderr.
void aquifer_ort_free(void *ptr);

// For the option `gpu_external_empty_cache`. Errors go to stderr.
void aquifer_ort_empty_cache(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* AQUIFER_H */

//! What programs ask of cudarc's allocation, as allocators of a context.
#![cfg(target_os = "linux")]

mod support;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use aquifer_standin::StandinDevice;
use cudarc::driver::sys::{
    CUdeviceptr, CUmemPool_attribute as Attribute, CUmemoryPool, CUstreamCaptureStatus, cudaError_enum,
};
use cudarc::driver::{CudaContext, CudaStream, DeviceAllocator, DriverError, result};
use support::{FLAGS, RELAXED, address, fill, value_of};

const N: usize = 1 << 16;

/// A device whose context allocates from what `make` makes.
fn with_allocator<A: DeviceAllocator + 'static>(
    make: impl FnOnce(&Arc<CudaContext>) -> A,
) -> (Arc<CudaContext>, Arc<A>, StandinDevice) {
    let standin = aquifer_standin::load().unwrap().add_device("256MiB,seed=3").unwrap();
    let context = CudaContext::new(standin.ordinal() as usize).unwrap();
    let allocator = Arc::new(make(&context));
    // SAFETY: each of these allocators hands each part of its memory out once.
    assert!(unsafe { context.set_allocator(allocator.clone()) });
    // SAFETY: one stream uses the memory.
    unsafe { context.disable_event_tracking() };
    (context, allocator, standin)
}

/// An arena for the captures of a stream, whose graphs run one after the other: they have no nodes
/// that allocate (<https://github.com/chelsea0x3b/cudarc/pull/594>).
struct GraphArena {
    memory: Range<CUdeviceptr>,
    used: AtomicUsize,
}

impl DeviceAllocator for GraphArena {
    fn alloc(&self, stream: &Arc<CudaStream>, len: usize) -> Result<CUdeviceptr, DriverError> {
        if stream.capture_status()? != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE {
            // SAFETY: the stream lives.
            return unsafe { result::malloc_async(stream.cu_stream(), len) };
        }
        let ptr = self.memory.start + self.used.fetch_add(len.next_multiple_of(256), Ordering::Relaxed) as u64;
        let fits = ptr + len as u64 <= self.memory.end;
        if fits { Ok(ptr) } else { Err(DriverError(cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY)) }
    }

    fn free(&self, _: &Arc<CudaStream>, ptr: CUdeviceptr) -> Result<bool, DriverError> {
        Ok(self.memory.contains(&ptr))
    }

    fn begin_capture(
        &self,
        _: &Arc<CudaStream>,
        begin: &mut dyn FnMut() -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        self.used.store(0, Ordering::Relaxed);
        begin()
    }
}

#[test]
fn an_arena_serves_captures() {
    let (context, arena, standin) = with_allocator(|_| {
        // SAFETY: the context is current.
        let start = unsafe { result::malloc_sync(8 * N) }.unwrap();
        GraphArena { memory: start..start + 8 * N as u64, used: AtomicUsize::new(0) }
    });
    let stream = context.new_stream().unwrap();
    let mut output = stream.alloc_zeros::<u8>(N).unwrap();
    let calls = standin.calls("cuMemAllocAsync").unwrap();
    let mut graphs = Vec::new();
    for value in [3, 5] {
        stream.begin_capture(RELAXED).unwrap();
        let mut temporary = stream.alloc_zeros::<u8>(N - 1).unwrap();
        let mut other = stream.alloc_zeros::<u8>(N).unwrap();
        fill(&stream, &mut temporary, value);
        fill(&stream, &mut other, value);
        assert_eq!(address(&temporary), arena.memory.start);
        stream.memcpy_dtod(&other, &mut output).unwrap();
        drop((temporary, other));
        assert_eq!(stream.alloc_zeros::<u8>(8 * N).unwrap_err().0, cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY);
        graphs.push((stream.end_capture(FLAGS).unwrap().unwrap(), value));
    }
    for (graph, value) in graphs.iter().chain(&graphs) {
        graph.launch().unwrap();
        assert_eq!(value_of(&output), *value);
    }
    assert_eq!(standin.calls("cuMemAllocAsync").unwrap(), calls);
    assert_eq!(standin.violations(), Vec::<String>::new());
}

/// A pool of the driver's, which the program sets up and trims
/// (<https://github.com/chelsea0x3b/cudarc/issues/536>).
struct Pool(CUmemoryPool);

// SAFETY: any thread may use the driver's pools.
unsafe impl Send for Pool {}
// SAFETY: as above, and several at once.
unsafe impl Sync for Pool {}

impl Pool {
    fn attribute(&self, attribute: Attribute) -> Result<usize, DriverError> {
        let mut bytes = 0_u64;
        // SAFETY: the pool lives, and the attribute is a number of 64 bits.
        unsafe { result::mem_pool::get_attribute(self.0, attribute, (&raw mut bytes).cast()) }?;
        Ok(bytes as usize)
    }
}

impl DeviceAllocator for Pool {
    fn alloc(&self, stream: &Arc<CudaStream>, len: usize) -> Result<CUdeviceptr, DriverError> {
        // SAFETY: pool and stream live.
        unsafe { result::mem_pool::alloc_async(self.0, len, stream.cu_stream()) }
    }

    fn free(&self, _: &Arc<CudaStream>, _: CUdeviceptr) -> Result<bool, DriverError> {
        Ok(false) // `cuMemFreeAsync` knows the pool
    }

    fn trim(&self, _: &CudaContext) -> Result<(), DriverError> {
        // SAFETY: the pool lives.
        unsafe { result::mem_pool::trim_to(self.0, 0) }
    }

    fn mem_info(&self, _: &CudaContext) -> Result<(usize, usize), DriverError> {
        let held = self.attribute(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        let unused = held - self.attribute(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        result::mem_get_info().map(|(free, total)| (free + unused, total))
    }
}

/// The stand-in has one pool a device, and creates none.
#[test]
fn a_pool_serves_a_context() {
    let (context, _, standin) = with_allocator(|context| {
        // SAFETY: it is the device of a context.
        Pool(unsafe { result::device::get_default_mem_pool(context.cu_device()) }.unwrap())
    });
    let stream = context.new_stream().unwrap();
    let (free, total) = context.mem_get_info().unwrap();
    let mut slice = stream.alloc_zeros::<u8>(N).unwrap();
    fill(&stream, &mut slice, 3);
    assert_eq!((value_of(&slice), context.mem_get_info().unwrap().1), (3, total));
    drop(slice);
    stream.synchronize().unwrap();
    let trims = standin.calls("cuMemPoolTrimTo").unwrap();
    context.trim().unwrap();
    assert_eq!(standin.calls("cuMemPoolTrimTo").unwrap(), trims + 1);
    assert_eq!(context.mem_get_info().unwrap(), (free, total));
    assert_eq!(standin.violations(), Vec::<String>::new());
}

/// Slices in memory that the program manages: dropping one frees nothing
/// (<https://github.com/chelsea0x3b/cudarc/issues/519>).
#[derive(Default)]
struct External(Mutex<Vec<Range<CUdeviceptr>>>);

impl DeviceAllocator for External {
    fn alloc(&self, stream: &Arc<CudaStream>, len: usize) -> Result<CUdeviceptr, DriverError> {
        // SAFETY: the stream lives.
        unsafe { result::malloc_async(stream.cu_stream(), len) }
    }

    fn free(&self, _: &Arc<CudaStream>, ptr: CUdeviceptr) -> Result<bool, DriverError> {
        Ok(self.0.lock().unwrap().iter().any(|managed| managed.contains(&ptr)))
    }
}

#[test]
fn slices_in_memory_that_the_program_manages_are_not_freed() {
    let (context, external, standin) = with_allocator(|_| External::default());
    let stream = context.new_stream().unwrap();
    // SAFETY: the context is current.
    let ptr = unsafe { result::malloc_sync(2 * N) }.unwrap();
    external.0.lock().unwrap().push(ptr..ptr + 2 * N as u64);
    for value in [3, 5] {
        // SAFETY: as many bytes are there, and nothing else uses them.
        let mut slice = unsafe { stream.upgrade_device_ptr::<u8>(ptr + N as u64, N) };
        if value == 5 {
            assert_eq!(value_of(&slice), 3, "it is as the slice before left it");
        }
        fill(&stream, &mut slice, value);
    }
    assert_eq!(standin.calls("cuMemFreeAsync").unwrap(), 0);
    drop(stream.alloc_zeros::<u8>(N).unwrap());
    assert_eq!(standin.calls("cuMemFreeAsync").unwrap(), 1);
    stream.synchronize().unwrap();
    // SAFETY: no slice is left.
    unsafe { result::free_sync(ptr) }.unwrap();
    context.check_err().unwrap();
    assert_eq!(standin.violations(), Vec::<String>::new());
}

#[test]
fn a_context_keeps_the_first_allocator() {
    let (context, ..) = with_allocator(|_| External::default());
    let other = Arc::new(External::default());
    // SAFETY: it is not used.
    assert!(!unsafe { context.set_allocator(other.clone()) });
    assert_eq!(Arc::strong_count(&other), 1);
    assert!(context.allocator().is_some_and(|allocator| allocator.last_error().is_none()));
}

#[test]
fn a_context_without_an_allocator_does_what_the_driver_does() {
    let standin = aquifer_standin::load().unwrap().add_device("256MiB,seed=3").unwrap();
    let context = CudaContext::new(standin.ordinal() as usize).unwrap();
    assert!(context.allocator().is_none());
    assert_eq!(context.mem_get_info().unwrap(), result::mem_get_info().unwrap());
    let trims = standin.calls("cuMemPoolTrimTo").unwrap();
    context.trim().unwrap();
    assert_eq!(standin.calls("cuMemPoolTrimTo").unwrap(), trims + 1);
    // SAFETY: these defaults are used alone.
    assert!(unsafe { context.set_allocator(Arc::new(External::default())) });
    assert_eq!(context.mem_get_info().unwrap(), result::mem_get_info().unwrap());
    context.trim().unwrap();
    assert_eq!(standin.calls("cuMemPoolTrimTo").unwrap(), trims + 2);
}

//! Every call has the effect that the trait documents.

use aquifer_device::{
    Attribute, CaptureStatus, Code, Copy2d, CopyEnd, CopyPart, Driver, HandleKind, HostPtr, PhysicalOptions, PoolUsage,
    RawStream, StreamFlags,
};
use aquifer_standin::Number;
use cudarc::driver::CudaContext;
use cudarc::driver::result::malloc_async;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use crate::bench::{Bench, MIB, PTX, code, fill, standin};

#[test]
fn facts_of_the_device_come_from_the_driver() {
    let bench = Bench::new();
    let info = bench.driver.info();
    assert_eq!((info.kind, info.ordinal), ("cuda", bench.device.ordinal()));
    assert!(info.name.to_lowercase().contains("simulated"), "{}", info.name);
    assert_eq!((info.total_bytes, info.granularity_bytes), (1 << 30, Some(2 * MIB)));
    assert_eq!((info.priorities, info.driver_version), ((0, -5), Some((13, 0))));
    let attribute = |attribute| bench.driver.attribute(attribute).unwrap();
    let (major, minor) = info.compute_capability;
    assert_eq!(attribute(Attribute::ComputeCapabilityMajor), u64::from(major));
    assert_eq!(attribute(Attribute::ComputeCapabilityMinor), u64::from(minor));
    assert!(major >= 7 && attribute(Attribute::MultiprocessorCount) > 1 && attribute(Attribute::AsyncEngineCount) > 0);
    let capabilities = [
        Attribute::VirtualMemoryManagement,
        Attribute::MemoryPools,
        Attribute::GpuDirectRdmaWithVmm,
        Attribute::PosixFdHandles,
        Attribute::BatchedCopies,
    ];
    assert!(capabilities.into_iter().all(|capability| attribute(capability) == 1));
    assert_eq!(bench.driver.memory_info().unwrap().total, 1 << 30);
    assert!(format!("{:?}", bench.driver).contains("CudaDriver"));
}

#[test]
fn device_memory_comes_and_goes() {
    let bench = Bench::new();
    let ptr = bench.driver.alloc(5 * MIB).unwrap();
    assert!(ptr.0.is_multiple_of(512) && bench.used() >= 5 * MIB);
    bench.driver.free(ptr).unwrap();
    assert_eq!(bench.used(), 0);

    let stream = bench.stream();
    let ptr = bench.driver.alloc_async(3 * MIB, stream).unwrap();
    let usage = bench.driver.pool_usage().unwrap();
    assert!(usage.used >= 3 * MIB && usage.reserved >= usage.used && usage.used_peak >= usage.used, "{usage:?}");
    bench.driver.memset(ptr, 1, 3 * MIB, stream).unwrap();
    bench.driver.free_async(ptr, stream).unwrap();
    bench.driver.synchronize_stream(stream).unwrap();
    bench.driver.trim_pool(0).unwrap();
    bench.driver.trim_graph_memory().unwrap();
    assert!(matches!(bench.driver.pool_usage().unwrap(), PoolUsage { used: 0, used_peak, .. } if used_peak >= 3 * MIB));
    assert_eq!(bench.used(), 0);
    bench.assert_no_violation();
}

#[test]
fn memory_of_allocations_within_graphs_is_told() {
    // Older drivers do not tell.
    for (bench, told) in [(Bench::new(), 3 * MIB), (Bench::without(&["cuDeviceGetGraphMemAttribute"]), 0)] {
        let driver = &*bench.driver;
        // Only other libraries allocate within graphs.
        let theirs = CudaContext::new(bench.device.ordinal() as usize).unwrap().new_stream().unwrap();
        theirs.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        // SAFETY: nothing uses the memory.
        unsafe { malloc_async(theirs.cu_stream(), 3 << 20) }.unwrap();
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = theirs.end_capture(flags).unwrap().unwrap();
        assert_eq!(driver.pool_usage().unwrap().graphs, told);
        drop(graph);
        driver.trim_graph_memory().unwrap();
        assert_eq!(driver.pool_usage().unwrap().graphs, 0);
        bench.assert_no_violation();
    }
}

#[test]
fn physical_memory_is_mapped_at_reserved_addresses() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let stream = bench.stream();
    let start = driver.reserve(8 * MIB, 0).unwrap();
    let options = PhysicalOptions::default().rdma(true).exportable(HandleKind::PosixFd);
    let one = driver.create_physical(2 * MIB, options).unwrap();
    let two = driver.create_physical(4 * MIB, PhysicalOptions::default()).unwrap();
    driver.map(start, 2 * MIB, one).unwrap();
    driver.map(start.offset(2 * MIB), 4 * MIB, two).unwrap();
    driver.set_access(start, 6 * MIB, &[driver.info().ordinal]).unwrap();
    let mapped = bench.device.mapping_at(start.0).unwrap();
    assert!((mapped.rdma, mapped.exportable, mapped.bytes) == (true, true, 2 * MIB));
    driver.memset(start.offset(MIB), 7, 5 * MIB, stream).unwrap();
    assert_eq!(bench.download(start.offset(6 * MIB - 4), 4, stream).unwrap(), [7; 4]);
    driver.release_physical(one).unwrap();
    driver.unmap(start, 6 * MIB).unwrap();
    driver.release_physical(two).unwrap();
    driver.unreserve(start, 8 * MIB).unwrap();
    assert_eq!(bench.used(), 0);
    bench.assert_no_violation();
}

#[test]
fn the_driver_reports_peers_which_may_be_given_access() {
    let (bench, other) = (Bench::new(), Bench::new());
    let driver = &*bench.driver;
    assert!(driver.can_access_peer(other.device.ordinal()).unwrap());
    assert!(!driver.can_access_peer(bench.device.ordinal()).unwrap());
    let start = driver.reserve(2 * MIB, 0).unwrap();
    let memory = driver.create_physical(2 * MIB, PhysicalOptions::default()).unwrap();
    driver.map(start, 2 * MIB, memory).unwrap();
    driver.set_access(start, 2 * MIB, &[]).unwrap();
    driver.set_access(start, 2 * MIB, &[bench.device.ordinal(), other.device.ordinal()]).unwrap();
    let mask = bench.device.mapping_at(start.0).unwrap().devices;
    assert_eq!(mask, 1 << bench.device.ordinal() | 1 << other.device.ordinal());
}

#[test]
fn copies_move_bytes_between_all_kinds_of_memory() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let (one, two) = (driver.alloc(4096).unwrap(), driver.alloc(4096).unwrap());
    // Pageable memory: the call waits.
    let bytes: Vec<u8> = (0..=255).collect();
    bench.upload(one, &bytes, stream).unwrap();
    driver.copy_on_device(two, one, 256, stream).unwrap();
    assert_eq!(bench.download(two, 256, stream).unwrap(), bytes);
    // Pinned memory: the caller waits.
    let pinned = driver.host_alloc(4096).unwrap();
    driver.host_access(pinned, 4096, aquifer_device::AccessKind::Read).unwrap();
    assert_eq!(pinned.0 % 4096, 0);
    // SAFETY: the memory is pinned and not touched until the stream was waited for.
    unsafe { driver.copy_to_host(pinned.as_ptr(), two, 256, stream) }.unwrap();
    driver.synchronize_stream(stream).unwrap();
    // SAFETY: freshly allocated memory of 4096 bytes, the first 256 just written and no work
    // pending.
    assert_eq!(unsafe { std::slice::from_raw_parts(pinned.as_ptr(), 256) }, bytes);
    // SAFETY: as above.
    unsafe { driver.copy_to_device(one.offset(1024), pinned.as_ptr(), 256, stream) }.unwrap();
    driver.synchronize().unwrap();
    assert_eq!(bench.download(one.offset(1024), 256, stream).unwrap(), bytes);
    // Nothing is nothing.
    bench.upload(one, &[], stream).unwrap();
    driver.copy_on_device(one, two, 0, stream).unwrap();
    driver.memset(one, 0, 0, stream).unwrap();
    assert!(bench.download(one, 0, stream).unwrap().is_empty());
    // SAFETY: nothing uses the memory any more.
    unsafe { driver.host_free(pinned) }.unwrap();
    bench.assert_no_violation();
}

#[test]
fn rows_are_copied_to_their_pitch() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let (device, pinned) = (driver.alloc(4096).unwrap(), driver.host_alloc(4096).unwrap());
    driver.memset(device, 0, 4096, stream).unwrap();
    driver.synchronize().unwrap();
    // SAFETY: freshly allocated memory of 4096 bytes that no work uses.
    unsafe { std::slice::from_raw_parts_mut(pinned.as_ptr(), 12) }.copy_from_slice(b"aaaabbbbcccc");
    let (dst, src) = (CopyEnd::Device(device), CopyEnd::Host(pinned));
    let rows = Copy2d { dst, dst_pitch: 16, src, src_pitch: 4, width: 4, height: 3 };
    // SAFETY: the pinned memory is not touched until the stream was waited for.
    unsafe { driver.copy_2d(&rows, stream) }.unwrap();
    let found = bench.download(device, 36, stream).unwrap();
    assert_eq!((&found[..4], &found[16..20], &found[32..36]), (&b"aaaa"[..], &b"bbbb"[..], &b"cccc"[..]));
    assert_eq!(found[4..16], [0; 12]);
    let back = Copy2d { dst: CopyEnd::Host(pinned), dst_pitch: 8, src: dst, src_pitch: 16, width: 4, height: 3 };
    // SAFETY: as above.
    unsafe { driver.copy_2d(&back, stream) }.unwrap();
    driver.synchronize_stream(stream).unwrap();
    // SAFETY: no work uses the memory.
    assert_eq!(unsafe { std::slice::from_raw_parts(pinned.as_ptr().wrapping_add(16), 4) }, b"cccc");
    // SAFETY: nothing is copied.
    unsafe { driver.copy_2d(&Copy2d { height: 0, ..rows }, stream) }.unwrap();
    // SAFETY: nothing uses the memory any more.
    unsafe { driver.host_free(pinned) }.unwrap();
    bench.assert_no_violation();
}

#[test]
fn many_copies_are_one_call() {
    // The first has the function as CUDA 13 has it, if the stand-in does; the other that of 12.8.
    for missing in [&[][..], &["cuMemcpyBatchAsync_v2"]] {
        let bench = Bench::without(missing);
        let (driver, stream) = (&*bench.driver, bench.stream());
        let (device, pinned) = (driver.alloc(4096).unwrap(), driver.host_alloc(64).unwrap());
        bench.upload(device, &[5; 32], stream).unwrap();
        let copies = [
            CopyPart { dst: CopyEnd::Device(device.offset(1024)), src: CopyEnd::Device(device), bytes: 16 },
            CopyPart { dst: CopyEnd::Host(pinned), src: CopyEnd::Device(device.offset(16)), bytes: 16 },
            CopyPart { dst: CopyEnd::Device(device), src: CopyEnd::Device(device), bytes: 0 },
        ];
        // SAFETY: the pinned memory is not touched until the stream was waited for.
        unsafe { driver.copy_batch(&copies, stream) }.unwrap();
        // SAFETY: nothing is copied.
        unsafe { driver.copy_batch(&copies[2..], stream) }.unwrap();
        driver.synchronize_stream(stream).unwrap();
        // SAFETY: no work uses the memory.
        assert_eq!(unsafe { std::slice::from_raw_parts(pinned.as_ptr(), 16) }, [5; 16]);
        assert_eq!(bench.download(device.offset(1024), 16, stream).unwrap(), [5; 16]);
        // SAFETY: nothing uses the memory any more.
        unsafe { driver.host_free(pinned) }.unwrap();
        bench.assert_no_violation();
    }
}

#[test]
fn memory_of_the_callers_is_page_locked_while_it_is_registered() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let device = driver.alloc(4096).unwrap();
    let mut memory = vec![9_u8; 8192];
    // SAFETY: the memory outlives the registration.
    let host = unsafe { driver.host_register(memory.as_mut_ptr(), memory.len()) }.unwrap();
    assert_eq!(host, HostPtr(memory.as_ptr() as usize));
    let copies = [CopyPart { dst: CopyEnd::Device(device), src: CopyEnd::Host(host), bytes: 4096 }];
    // SAFETY: the memory is not touched until it is unregistered, which waits.
    let batched = unsafe { driver.copy_batch(&copies, stream) };
    assert_eq!(code(batched), Code::NOT_SUPPORTED, "the stand-in's devices have an address of their own for it");
    // SAFETY: as above.
    unsafe { driver.copy_to_device(device, memory.as_ptr(), 4096, stream) }.unwrap();
    driver.synchronize().unwrap();
    // SAFETY: it was registered above, and the copy is done.
    unsafe { driver.host_unregister(host) }.unwrap();
    assert_eq!(bench.download(device, 4096, stream).unwrap(), memory[..4096]);
    bench.assert_no_violation();
}

#[test]
fn events_order_streams_and_measure_time() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let (one, two) = (bench.stream(), driver.create_stream(StreamFlags { non_blocking: true, priority: -5 }).unwrap());
    let memory = driver.alloc(64 * MIB).unwrap();
    let (start, end) = (driver.create_event(true).unwrap(), driver.create_event(true).unwrap());
    assert!(driver.query_event(start).unwrap(), "never recorded");
    driver.record(start, one).unwrap();
    driver.memset(memory, 1, 64 * MIB, one).unwrap();
    driver.record(end, one).unwrap();
    assert!(!driver.query_event(end).unwrap() && !driver.query_stream(one).unwrap());
    driver.wait(two, end).unwrap();
    driver.memset(memory, 2, 64 * MIB, two).unwrap();
    driver.synchronize_event(end).unwrap();
    assert!(driver.query_event(end).unwrap() && driver.elapsed_ms(start, end).unwrap() > 0.0);
    driver.synchronize_stream(two).unwrap();
    assert!(driver.query_stream(two).unwrap());
    for event in [start, end] {
        driver.destroy_event(event).unwrap();
    }
    for stream in [one, two] {
        driver.destroy_stream(stream).unwrap();
    }
    bench.assert_no_violation();
}

#[test]
fn default_streams_need_no_creation() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let memory = driver.alloc(4096).unwrap();
    for stream in [RawStream(0), RawStream::LEGACY, RawStream::PER_THREAD] {
        driver.memset(memory, 3, 4096, stream).unwrap();
        driver.synchronize_stream(stream).unwrap();
        assert_eq!(bench.download(memory, 4, stream).unwrap(), [3; 4]);
        assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::None);
        assert!(driver.query_stream(stream).unwrap());
    }
    let (one, two) = (bench.stream(), bench.stream());
    let id = |stream| driver.stream_id(stream).unwrap().unwrap();
    assert!(id(one) != id(two) && id(one) == id(one));
    bench.assert_no_violation();
}

#[test]
fn kernels_are_launched_from_modules() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let (memory, module) = (driver.alloc(4096).unwrap(), driver.load_module(PTX).unwrap());
    for (pattern, shared_bytes) in [(0x0101_0101_0101_0101, 0), (0x0202_0202_0202_0202, 100 << 10), (0, 100 << 10)] {
        let mut launch = fill(Some(module), memory, 4096, pattern);
        launch.shared_bytes = shared_bytes;
        // SAFETY: the kernel fills the range that its launch declares.
        unsafe { driver.launch(&launch, stream) }.unwrap();
        let found = bench.download(memory, 4096, stream).unwrap();
        assert!(found.chunks(8).all(|word| word == pattern.to_le_bytes()));
    }
    driver.unload_module(module).unwrap();
    bench.assert_no_violation();
}

#[test]
fn objects_left_at_the_end_are_given_back() {
    let device = standin().add_device("1GiB").unwrap();
    let watch = aquifer_cuda::CudaDriver::open(device.ordinal()).unwrap();
    let driver = aquifer_cuda::CudaDriver::open(device.ordinal()).unwrap();
    let stream = driver.create_stream(StreamFlags::default()).unwrap();
    let (memory, event) = (driver.alloc(MIB).unwrap(), driver.create_event(false).unwrap());
    driver.alloc_async(MIB, stream).unwrap();
    driver.memset(memory, 1, MIB, stream).unwrap();
    driver.record(event, stream).unwrap();
    let start = driver.reserve(4 * MIB, 0).unwrap();
    let physical = driver.create_physical(2 * MIB, PhysicalOptions::default()).unwrap();
    driver.map(start, 2 * MIB, physical).unwrap();
    driver.host_alloc(4096).unwrap();
    let mut registered = vec![0_u8; 4096];
    // SAFETY: the memory outlives the driver.
    unsafe { driver.host_register(registered.as_mut_ptr(), registered.len()) }.unwrap();
    driver.load_module(PTX).unwrap();
    driver.begin_capture(stream).unwrap();
    driver.end_capture(stream).unwrap();
    let info = watch.memory_info().unwrap();
    assert!(info.total - info.free >= 4 * MIB);
    drop(driver);
    let info = watch.memory_info().unwrap();
    assert_eq!(info.total, info.free);
    assert_eq!(device.violations(), Vec::<String>::new());
}

#[test]
fn host_memory_may_be_page_locked_in_parts() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let device = driver.alloc(16 << 10).unwrap();
    let mut memory: Vec<u8> = (0..16 << 10).map(|at| u8::try_from(at % 251).unwrap()).collect();
    // Two pieces side by side, and pageable memory around them.
    let pieces = [4 << 10, 8 << 10].map(|at| memory[at..][..4 << 10].as_mut_ptr());
    // SAFETY: the memory outlives its registration.
    let hosts = pieces.map(|piece| unsafe { driver.host_register(piece, 4 << 10) }.unwrap());
    bench.upload(device, &memory, stream).unwrap();
    assert_eq!(bench.download(device, memory.len(), stream).unwrap(), memory);
    let (start, bytes) = (HostPtr(hosts[0].0 + 100), 8 << 10 >> 1);
    let rows = Copy2d {
        dst: CopyEnd::Device(device),
        dst_pitch: bytes,
        src: CopyEnd::Host(start),
        src_pitch: bytes,
        width: bytes,
        height: 1,
    };
    // SAFETY: refused before anything is copied.
    let refused = unsafe { driver.copy_2d(&rows, stream) }.unwrap_err();
    assert!(refused.code == Code::INVALID_VALUE && refused.to_string().contains("several pieces"), "{refused}");
    driver.memset(device, 0, 16 << 10, stream).unwrap();
    // SAFETY: the memory is not touched until the device was waited for.
    unsafe { driver.copy_to_device(device, start.as_ptr(), 4 << 10, stream) }.unwrap();
    driver.synchronize().unwrap();
    assert_eq!(bench.download(device, 4 << 10, stream).unwrap(), memory[(4 << 10) + 100..][..4 << 10]);
    // SAFETY: registered above, and the copies are done.
    hosts.into_iter().for_each(|host| unsafe { driver.host_unregister(host) }.unwrap());
    bench.assert_no_violation();
}

#[test]
fn page_locked_memory_starts_at_a_page_wherever_the_driver_puts_it() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let device = driver.alloc(64 << 10).unwrap();
    let sizes = [1, 100, 4095, 4096, 5000, 60_000];
    let hosts = sizes.map(|bytes| driver.host_alloc(bytes).unwrap());
    assert!(hosts.iter().all(|host| host.0.is_multiple_of(4096)), "{hosts:?}");
    for (host, bytes) in hosts.into_iter().zip(sizes) {
        driver.memset(device, u8::try_from(bytes % 251).unwrap(), bytes as u64, stream).unwrap();
        // SAFETY: the memory is pinned and not touched until the stream was waited for.
        unsafe { driver.copy_to_host(host.as_ptr(), device, bytes, stream) }.unwrap();
        driver.synchronize_stream(stream).unwrap();
    }
    for (host, bytes) in hosts.into_iter().zip(sizes) {
        // SAFETY: memory of this length that was just written, and no work pending.
        let found = unsafe { std::slice::from_raw_parts(host.as_ptr(), bytes) };
        assert!(found.iter().all(|&byte| usize::from(byte) == bytes % 251));
        // SAFETY: nothing uses the memory any more.
        unsafe { driver.host_free(host) }.unwrap();
    }
    // What the caller did not free goes with the driver. A piece that could not be freed when it
    // should be is freed at the second attempt.
    driver.host_alloc(10).unwrap();
    bench.device.inject("fault=cuMemFreeHost#1:unknown").unwrap();
    driver.host_alloc(10).unwrap();
    assert_eq!(bench.device.number(Number::PinnedBytes), 2 * (10 + 4096));
    let Bench { driver, device } = bench;
    drop(driver);
    assert_eq!(device.number(Number::PinnedBytes), 0);
    assert_eq!(device.violations(), Vec::<String>::new());
}

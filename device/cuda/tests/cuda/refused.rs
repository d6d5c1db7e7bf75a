//! What is not alive, or wrong, is an error that says so, and changes nothing.

use std::fmt::Debug;

use aquifer_device::{
    Code, Copy2d, CopyEnd, CopyPart, DevicePtr, Driver, ErrorKind, HandleKind, HostPtr, PhysicalOptions, RawEvent,
    RawGraph, RawModule, RawPhysical, RawStream, Result,
};

use crate::bench::{Bench, MIB, PTX, code, fill, kind, standin};

#[test]
fn handles_that_are_not_live_are_refused_by_every_call() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let (stream, event, memory) = (bench.stream(), driver.create_event(true).unwrap(), driver.alloc(4096).unwrap());
    let (dead, gone) = (RawStream(0xdead_0000), RawEvent(0xdead_0000));
    let destroyed = bench.stream();
    driver.destroy_stream(destroyed).unwrap();
    for dead in [dead, destroyed] {
        let dead_handle = |result: Result<()>| assert_eq!(code(result), Code::INVALID_HANDLE);
        dead_handle(driver.destroy_stream(dead));
        dead_handle(driver.synchronize_stream(dead));
        dead_handle(driver.query_stream(dead).map(drop));
        dead_handle(driver.stream_id(dead).map(drop));
        dead_handle(driver.capture_status(dead).map(drop));
        dead_handle(driver.begin_capture(dead));
        dead_handle(driver.end_capture(dead).map(drop));
        dead_handle(driver.record(event, dead));
        dead_handle(driver.wait(dead, event));
        dead_handle(driver.alloc_async(4096, dead).map(drop));
        dead_handle(driver.memset(memory, 0, 4096, dead));
        dead_handle(driver.copy_on_device(memory, memory.offset(1024), 1024, dead));
        dead_handle(bench.upload(memory, &[0; 16], dead));
        dead_handle(bench.download(memory, 16, dead).map(drop));
    }
    assert_eq!(code(driver.record(gone, stream)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.wait(stream, gone)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.query_event(gone)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.synchronize_event(gone)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.elapsed_ms(gone, event)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.elapsed_ms(event, gone)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.destroy_event(gone)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.launch_graph(RawGraph(5), stream)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.destroy_graph(RawGraph(5))), Code::INVALID_HANDLE);
    assert_eq!(code(driver.unload_module(RawModule(5))), Code::INVALID_HANDLE);
    assert_eq!(code(driver.release_physical(RawPhysical(5))), Code::INVALID_HANDLE);
    // SAFETY: the module does not exist, so nothing is launched.
    let launched = unsafe { driver.launch(&fill(Some(RawModule(5)), memory, 8, 0), stream) };
    assert_eq!(code(launched), Code::INVALID_HANDLE);
    for default in [RawStream(0), RawStream::LEGACY, RawStream::PER_THREAD] {
        assert_eq!(code(driver.destroy_stream(default)), Code::INVALID_HANDLE);
    }
    // Once is enough.
    driver.destroy_event(event).unwrap();
    assert_eq!(code(driver.destroy_event(event)), Code::INVALID_HANDLE);
    bench.assert_no_violation();
}

#[test]
fn ranges_that_are_not_device_memory_are_refused() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let memory = driver.alloc(4096).unwrap();
    let host = vec![0_u8; 4096];
    let bad = |result: Result<()>| assert_eq!(code(result), Code::INVALID_VALUE);
    let wild =
        [DevicePtr(0), DevicePtr(0x1234), memory.offset(1), DevicePtr(host.as_ptr() as u64), DevicePtr(u64::MAX)];
    for ptr in wild {
        bad(driver.memset(ptr, 1, 4096, stream));
        bad(driver.copy_on_device(ptr, memory, 4096, stream));
        bad(driver.copy_on_device(memory, ptr, 4096, stream));
        bad(bench.upload(ptr, &host, stream));
        bad(bench.download(ptr, 4096, stream).map(drop));
        bad(driver.free(ptr));
        bad(driver.free_async(ptr, stream));
    }
    bad(driver.copy_on_device(memory, memory.offset(100), 200, stream));
    bad(driver.free_async(memory, stream));
    // SAFETY: null is refused before anything is copied.
    bad(unsafe { driver.copy_to_device(memory, std::ptr::null(), 8, stream) });
    // SAFETY: as above.
    bad(unsafe { driver.copy_to_host(std::ptr::null_mut(), memory, 8, stream) });
    driver.free(memory).unwrap();
    bad(driver.free(memory));
    bad(driver.memset(memory, 1, 4096, stream));
    assert_eq!(host, vec![0; 4096]);
    assert_eq!(kind(driver.alloc(1 << 40)), ErrorKind::OutOfMemory);
    assert_eq!(kind(driver.alloc_async(1 << 40, stream)), ErrorKind::OutOfMemory);
    bad(driver.alloc(0).map(drop));
    assert_eq!(bench.used(), 0);
}

#[test]
fn memory_of_another_owner_is_known_by_the_driver() {
    let bench = Bench::new();
    // Another driver of the same device, as another library in the process would be.
    let other = aquifer_cuda::CudaDriver::open(bench.device.ordinal()).unwrap();
    let theirs = other.alloc(4096).unwrap();
    let stream = bench.stream();
    bench.driver.memset(theirs, 6, 4096, stream).unwrap();
    assert_eq!(bench.download(theirs.offset(4092), 4, stream).unwrap(), [6; 4]);
    assert_eq!(code(bench.driver.memset(theirs, 6, 4097, stream)), Code::INVALID_VALUE);
    assert_eq!(code(bench.driver.free(theirs)), Code::INVALID_VALUE, "only its owner frees it");
    let pinned = other.host_alloc(4096).unwrap();
    let on_host = DevicePtr(pinned.0 as u64);
    assert_eq!(code(bench.driver.memset(on_host, 6, 4096, stream)), Code::INVALID_VALUE, "that is the host's memory");
    other.free(theirs).unwrap();
}

/// The driver takes all of a reservation for one piece of device memory, and knows the memory of
/// every device.
#[test]
fn reserved_addresses_and_memory_of_other_devices_are_no_memory_of_this_one() {
    let (bench, elsewhere) = (Bench::new(), Bench::new());
    let (driver, stream) = (&*bench.driver, bench.stream());
    let bad = |ptr, bytes| assert_eq!(code(driver.memset(ptr, 1, bytes, stream)), Code::INVALID_VALUE, "{ptr} {bytes}");
    bad(elsewhere.driver.alloc(4096).unwrap(), 4096);
    // What another library maps: two pieces of four.
    let other = aquifer_cuda::CudaDriver::open(bench.device.ordinal()).unwrap();
    let theirs = other.reserve(8 * MIB, 0).unwrap();
    for at in [0, 2 * MIB] {
        let memory = other.create_physical(2 * MIB, PhysicalOptions::default()).unwrap();
        other.map(theirs.offset(at), 2 * MIB, memory).unwrap();
        other.set_access(theirs.offset(at), 2 * MIB, &[bench.device.ordinal()]).unwrap();
    }
    driver.memset(theirs.offset(MIB), 1, 2 * MIB, stream).unwrap();
    driver.memset(theirs, 1, 4 * MIB, stream).unwrap();
    bad(theirs, 4 * MIB + 1);
    bad(theirs.offset(5 * MIB), 8);
    bad(theirs.offset(u64::MAX - theirs.0), 8);
    // And addresses that are reserved here.
    bad(driver.reserve(2 * MIB, 0).unwrap(), 8);
    driver.synchronize().unwrap();
    bench.assert_no_violation();
}

#[test]
fn mappings_follow_the_rules() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let stream = bench.stream();
    let bad = |result: Result<()>| assert_eq!(code(result), Code::INVALID_VALUE);
    let (start, memory) =
        (driver.reserve(8 * MIB, 0).unwrap(), driver.create_physical(2 * MIB, PhysicalOptions::default()).unwrap());
    bad(driver.map(start, 4 * MIB, memory));
    bad(driver.map(start.offset(7 * MIB), 2 * MIB, memory));
    bad(driver.map(DevicePtr(2 * MIB), 2 * MIB, memory));
    assert_eq!(code(driver.map(start, 2 * MIB, RawPhysical(77))), Code::INVALID_HANDLE);
    bad(driver.set_access(start, 2 * MIB, &[0]));
    bad(driver.unmap(start, 2 * MIB));
    bad(driver.memset(start, 0, 8, stream));
    driver.map(start, 2 * MIB, memory).unwrap();
    bad(driver.unmap(start, MIB));
    bad(driver.unmap(start, 0));
    bad(driver.unreserve(start, 8 * MIB));
    bad(driver.memset(start, 0, 2 * MIB + 1, stream));
    assert_eq!(kind(driver.set_access(start, 2 * MIB, &[4_000_000_000])), ErrorKind::InvalidUse);
    assert!(driver.can_access_peer(4_000_000_000).is_err());
    driver.unmap(start, 2 * MIB).unwrap();
    bad(driver.unreserve(start, 4 * MIB));
    bad(driver.unreserve(start.offset(2 * MIB), 6 * MIB));
    driver.unreserve(start, 8 * MIB).unwrap();
    bad(driver.unreserve(start, 8 * MIB));
    assert_eq!(kind(driver.reserve(1 << 46, 0)), ErrorKind::OutOfAddresses);
    assert_eq!(kind(driver.create_physical(1 << 40, PhysicalOptions::default())), ErrorKind::OutOfMemory);
    driver.release_physical(memory).unwrap();
    assert_eq!(bench.used(), 0);
}

#[test]
fn a_device_that_cannot_map_refuses_mapping_calls() {
    let device = standin().add_device("1GiB,vmm=off").unwrap();
    let driver = aquifer_cuda::CudaDriver::open(device.ordinal()).unwrap();
    assert_eq!(driver.info().granularity_bytes, None);
    assert_eq!(driver.attribute(aquifer_device::Attribute::VirtualMemoryManagement).unwrap(), 0);
    let unsupported = |result: Result<()>| assert_eq!(kind(result), ErrorKind::Unsupported);
    let ptr = DevicePtr(2 * MIB);
    unsupported(driver.reserve(2 * MIB, 0).map(drop));
    unsupported(driver.unreserve(ptr, 2 * MIB));
    unsupported(driver.create_physical(2 * MIB, PhysicalOptions::default()).map(drop));
    unsupported(driver.release_physical(RawPhysical(1)));
    unsupported(driver.map(ptr, 2 * MIB, RawPhysical(1)));
    unsupported(driver.unmap(ptr, 2 * MIB));
    unsupported(driver.set_access(ptr, 2 * MIB, &[0]));
}

#[test]
fn properties_that_the_device_lacks_are_refused() {
    let device = standin().add_device("1GiB,export=off").unwrap();
    let driver = aquifer_cuda::CudaDriver::open(device.ordinal()).unwrap();
    let exportable = PhysicalOptions::default().exportable(HandleKind::PosixFd);
    assert_eq!(kind(driver.create_physical(2 * MIB, exportable)), ErrorKind::Unsupported);
    let device = standin().add_device("1GiB,preset=rtx4090").or_else(|_| standin().add_device("rtx4090")).unwrap();
    let driver = aquifer_cuda::CudaDriver::open(device.ordinal()).unwrap();
    if driver.attribute(aquifer_device::Attribute::GpuDirectRdmaWithVmm).unwrap() == 0 {
        let rdma = PhysicalOptions::default().rdma(true);
        assert_eq!(kind(driver.create_physical(2 * MIB, rdma)), ErrorKind::Unsupported);
    }
}

/// The error of a copy that must not be made.
fn refused<T: Debug>(result: Result<T>) -> Code {
    code(result)
}

#[test]
fn copies_of_rows_and_batches_are_checked_before_they_are_made() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let (memory, pinned) = (driver.alloc(4096).unwrap(), driver.host_alloc(4096).unwrap());
    let (device, host) = (CopyEnd::Device(memory), CopyEnd::Host(pinned));
    let pageable = [0_u8; 64];
    let wild = CopyEnd::Host(HostPtr(pageable.as_ptr() as usize));
    let rows = Copy2d { dst: device, dst_pitch: 64, src: host, src_pitch: 64, width: 64, height: 8 };
    let wrong = [
        Copy2d { dst_pitch: 63, ..rows },
        Copy2d { src_pitch: 8, ..rows },
        Copy2d { dst: host, ..rows },
        Copy2d { src: wild, ..rows },
        Copy2d { height: 65, ..rows },
        Copy2d { height: u64::MAX, ..rows },
        Copy2d { src: CopyEnd::Device(memory.offset(32)), ..rows },
    ];
    for copy in wrong {
        // SAFETY: refused before anything is copied.
        assert_eq!(refused(unsafe { driver.copy_2d(&copy, stream) }), Code::INVALID_VALUE, "{copy:?}");
    }
    let part = CopyPart { dst: device, src: host, bytes: 64 };
    let wrong = [
        CopyPart { dst: host, ..part },
        CopyPart { src: wild, ..part },
        CopyPart { bytes: 4097, ..part },
        CopyPart { src: CopyEnd::Device(memory.offset(32)), ..part },
    ];
    for copy in wrong {
        // SAFETY: refused before anything is copied.
        assert_eq!(refused(unsafe { driver.copy_batch(&[copy], stream) }), Code::INVALID_VALUE, "{copy:?}");
    }
    // SAFETY: refused before anything is copied.
    let legacy = unsafe { driver.copy_batch(&[part], RawStream::LEGACY) };
    assert_eq!(refused(legacy), Code::NOT_SUPPORTED);
    // SAFETY: nothing uses the memory any more.
    unsafe { driver.host_free(pinned) }.unwrap();
    // SAFETY: refused: it is gone.
    assert_eq!(code(unsafe { driver.host_free(pinned) }), Code::INVALID_VALUE);
    // SAFETY: refused: it was never registered.
    assert_eq!(code(unsafe { driver.host_unregister(pinned) }), Code(713));
    bench.assert_no_violation();
}

#[test]
fn registered_memory_is_not_freed_and_allocated_memory_not_unregistered() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let (mut memory, pinned) = (vec![0_u8; 4096], driver.host_alloc(4096).unwrap());
    // SAFETY: the memory outlives its registration.
    let registered = unsafe { driver.host_register(memory.as_mut_ptr(), 4096) }.unwrap();
    // SAFETY: refused, because it is registered.
    let twice = unsafe { driver.host_register(memory.as_mut_ptr(), 4096) };
    assert_eq!(code(twice), Code(712));
    // SAFETY: refused: it is registered.
    assert_eq!(code(unsafe { driver.host_free(registered) }), Code::INVALID_VALUE);
    // SAFETY: refused: it is not registered.
    assert_eq!(code(unsafe { driver.host_unregister(pinned) }), Code(713));
    // SAFETY: it was registered above, and nothing uses it.
    unsafe { driver.host_unregister(registered) }.unwrap();
    // SAFETY: nothing uses the memory any more.
    unsafe { driver.host_free(pinned) }.unwrap();
}

#[test]
fn impossible_modules_and_launches_are_refused() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let memory = driver.alloc(4096).unwrap();
    let text = |ptx: &str| driver.load_module(ptx).unwrap_err();
    assert_eq!(text("no PTX").code, Code(218));
    assert_eq!(text(".version 7.0\0").code, Code(218));
    let newer = text(&PTX.replace("7.0", "99.0"));
    assert!(newer.code == Code(222) && newer.to_string().contains("supports CUDA 13.0"), "{newer}");
    let newer = text(&PTX.replace("sm_75", "sm_299"));
    assert!(newer.code == Code(209) && newer.to_string().contains("newer GPUs"), "{newer}");
    let module = driver.load_module(PTX).unwrap();
    let good = fill(Some(module), memory, 4096, 1);
    let launch = |launch: &aquifer_device::Launch| {
        // SAFETY: refused before anything runs.
        code(unsafe { driver.launch(launch, stream) })
    };
    assert_eq!(launch(&aquifer_device::Launch { module: None, ..good.clone() }), Code::NOT_SUPPORTED);
    assert_eq!(launch(&aquifer_device::Launch { name: "absent", ..good.clone() }), Code(500));
    assert_eq!(launch(&aquifer_device::Launch { name: "a\0b", ..good.clone() }), Code(500));
    assert_eq!(launch(&aquifer_device::Launch { name: "unknown", ..good.clone() }), Code::NOT_SUPPORTED);
    assert_eq!(launch(&aquifer_device::Launch { block: [2048, 1, 1], ..good.clone() }), Code::INVALID_VALUE);
    assert_eq!(launch(&aquifer_device::Launch { shared_bytes: 1 << 20, ..good.clone() }), Code::INVALID_VALUE);
    assert_eq!(launch(&aquifer_device::Launch { shared_bytes: u32::MAX, ..good.clone() }), Code::INVALID_VALUE);
    let many = vec![aquifer_device::KernelArg::U32(0); 65];
    assert_eq!(launch(&aquifer_device::Launch { args: many, ..good.clone() }), Code::INVALID_VALUE);
    // SAFETY: the kernel fills the range that its launch declares.
    unsafe { driver.launch(&good, stream) }.unwrap();
    driver.synchronize().unwrap();
    driver.unload_module(module).unwrap();
    assert_eq!(launch(&good), Code::INVALID_HANDLE);
    bench.assert_no_violation();
}

#[test]
fn a_missing_gpu_cannot_be_opened() {
    standin();
    for ordinal in [100_000, u32::MAX] {
        let error = aquifer_cuda::CudaDriver::open(ordinal).unwrap_err();
        assert_eq!(error.code, Code::INVALID_DEVICE);
        assert!(error.to_string().contains("there is no GPU"), "{error}");
    }
}

//! Every call of the driver's functions fails once: no panic, nothing leaked, and all is usable
//! after it.

use aquifer_cuda::CudaDriver;
use aquifer_device::{
    Attribute, Code, Copy2d, CopyEnd, CopyPart, DevicePtr, Driver, ErrorKind, PhysicalOptions, RawStream, Result,
    StreamFlags,
};

use crate::bench::{MIB, PTX, fill, standin};

/// A program that makes every call of the trait, and gives back as much as it can after any error.
fn program(driver: &CudaDriver) -> Result<()> {
    let flags = StreamFlags { non_blocking: true, priority: 0 };
    let stream = driver.create_stream(flags)?;
    let outcome = on_stream(driver, stream);
    // An order strikes once, so a second attempt succeeds.
    let gone = driver.destroy_stream(stream).or_else(|_| driver.destroy_stream(stream));
    outcome.and(gone)
}

fn on_stream(driver: &CudaDriver, stream: RawStream) -> Result<()> {
    asked(driver, stream)?;
    let memory = driver.alloc(MIB)?;
    let outcome = with_memory(driver, stream, memory);
    outcome.and(driver.free(memory).or_else(|_| driver.free(memory)))
}

/// A part of the program, for itself.
type Part = fn(&CudaDriver, RawStream, DevicePtr) -> Result<()>;

/// The parts of the program that work with memory, by name.
pub(crate) const PARTS: [(&str, Part); 6] = [
    ("pooled", |driver, stream, _| pooled(driver, stream)),
    ("mapped", |driver, _, _| mapped(driver)),
    ("copied", copied),
    ("ordered", |driver, stream, _| ordered(driver, stream)),
    ("launched", launched),
    ("captured", captured),
];

fn with_memory(driver: &CudaDriver, stream: RawStream, memory: DevicePtr) -> Result<()> {
    PARTS.iter().try_for_each(|(_, part)| part(driver, stream, memory))?;
    driver.synchronize()
}

pub(crate) fn asked(driver: &CudaDriver, stream: RawStream) -> Result<()> {
    driver.memory_info()?;
    driver.attribute(Attribute::MultiprocessorCount)?;
    driver.attribute(Attribute::MemoryPools)?;
    driver.stream_id(stream)?;
    driver.can_access_peer(driver.info().ordinal).map(drop)
}

fn pooled(driver: &CudaDriver, stream: RawStream) -> Result<()> {
    let pool = driver.alloc_async(MIB, stream)?;
    driver.free_async(pool, stream).or_else(|error| driver.free_async(pool, stream).and(Err(error)))?;
    driver.pool_usage()?;
    driver.trim_pool(0)
}

fn mapped(driver: &CudaDriver) -> Result<()> {
    let start = driver.reserve(4 * MIB, 0)?;
    let physical = driver.create_physical(2 * MIB, PhysicalOptions::default().rdma(true));
    let outcome = physical.and_then(|physical| {
        let mapped = driver.map(start, 2 * MIB, physical).and_then(|()| {
            let outcome = driver.set_access(start, 2 * MIB, &[driver.info().ordinal]);
            outcome.and(driver.unmap(start, 2 * MIB).or_else(|_| driver.unmap(start, 2 * MIB)))
        });
        mapped.and(driver.release_physical(physical).or_else(|_| driver.release_physical(physical)))
    });
    outcome.and(driver.unreserve(start, 4 * MIB).or_else(|_| driver.unreserve(start, 4 * MIB)))
}

fn copied(driver: &CudaDriver, stream: RawStream, memory: DevicePtr) -> Result<()> {
    let mut bytes = [1_u8; 64];
    driver.memset(memory, 0, MIB, stream)?;
    // SAFETY: pageable memory, of which nothing is used after the call.
    unsafe { driver.copy_to_device(memory, bytes.as_ptr(), 64, stream) }?;
    driver.copy_on_device(memory.offset(1024), memory, 64, stream)?;
    // SAFETY: as above.
    unsafe { driver.copy_to_host(bytes.as_mut_ptr(), memory, 64, stream) }?;
    let pinned = driver.host_alloc(4096)?;
    let (device, host) = (CopyEnd::Device(memory), CopyEnd::Host(pinned));
    let rows = Copy2d { dst: device, dst_pitch: 128, src: host, src_pitch: 64, width: 64, height: 4 };
    let part = CopyPart { dst: device, src: host, bytes: 64 };
    // SAFETY: nothing touches the pinned memory, which the device is waited for before it is
    // freed.
    let outcome = unsafe { driver.copy_2d(&rows, stream) };
    // SAFETY: as above.
    let outcome = outcome.and_then(|()| unsafe { driver.copy_batch(&[part], stream) });
    let waited = driver.synchronize().or_else(|_| driver.synchronize());
    // SAFETY: nothing uses the memory any more; memory that could not be freed is still there.
    let free = || unsafe { driver.host_free(pinned) };
    let outcome = outcome.and(waited).and(free().or_else(|_| free()));
    let mut registered = vec![0_u8; 4096];
    // SAFETY: unregistered below, at the second attempt at the latest.
    let host = outcome.and_then(|()| unsafe { driver.host_register(registered.as_mut_ptr(), 4096) })?;
    // SAFETY: it was registered above, and nothing uses it.
    let unregister = || unsafe { driver.host_unregister(host) };
    unregister().or_else(|error| unregister().and(Err(error)))
}

fn ordered(driver: &CudaDriver, stream: RawStream) -> Result<()> {
    let start = driver.create_event(true)?;
    let end = driver.create_event(true);
    let outcome = end.and_then(|end| {
        let uses = || {
            driver.record(start, stream)?;
            driver.record(end, stream)?;
            driver.wait(stream, end)?;
            driver.query_event(end)?;
            driver.synchronize_event(end)?;
            driver.elapsed_ms(start, end)?;
            driver.query_stream(stream)?;
            driver.synchronize_stream(stream)
        };
        let outcome = uses();
        outcome.and(driver.destroy_event(end).or_else(|_| driver.destroy_event(end)))
    });
    outcome.and(driver.destroy_event(start).or_else(|_| driver.destroy_event(start)))
}

fn launched(driver: &CudaDriver, stream: RawStream, memory: DevicePtr) -> Result<()> {
    let module = driver.load_module(PTX)?;
    let launch = aquifer_device::Launch { shared_bytes: 64 << 10, ..fill(Some(module), memory, 4096, 7) };
    // SAFETY: the kernel fills the range that its launch declares.
    let outcome = unsafe { driver.launch(&launch, stream) };
    let outcome = outcome.and(driver.synchronize().or_else(|_| driver.synchronize()));
    outcome.and(driver.unload_module(module).or_else(|_| driver.unload_module(module)))
}

fn captured(driver: &CudaDriver, stream: RawStream, memory: DevicePtr) -> Result<()> {
    driver.begin_capture(stream)?;
    let outcome = driver.memset(memory, 1, 4096, stream).and(driver.capture_status(stream).map(drop));
    let graph = driver.end_capture(stream).or_else(|error| {
        // It ended, or its error was not reported.
        driver.end_capture(stream).map_or(Ok(()), |graph| driver.destroy_graph(graph))?;
        Err(error)
    })?;
    let outcome = outcome.and(driver.launch_graph(graph, stream));
    outcome.and(driver.destroy_graph(graph).or_else(|_| driver.destroy_graph(graph)))
}

#[test]
fn every_call_of_the_driver_fails_once() {
    let standin = standin();
    let device = standin.add_device("1GiB").unwrap();
    let watch = CudaDriver::open(device.ordinal()).unwrap();
    let mut struck = 0;
    for nth in 1.. {
        standin.fail("any", nth, Code(999)).unwrap();
        let outcome = CudaDriver::open(device.ordinal()).and_then(|driver| {
            let outcome = program(&driver);
            if standin.orders_left() == 0 {
                // It struck, perhaps where only the log hears of it: all is as usable as before.
                program(&driver).unwrap_or_else(|error| panic!("after a failure of call {nth}: {error}"));
            }
            outcome
        });
        let left = standin.clear_orders();
        if let Err(error) = &outcome {
            assert!(left == 0, "call {nth}: {error}");
            assert!(error.kind == ErrorKind::Other || error.kind == ErrorKind::Unavailable, "call {nth}: {error}");
        }
        let info = watch.memory_info().unwrap();
        assert_eq!(info.free, info.total, "memory leaked after a failure of call {nth}: {outcome:?}");
        if left > 0 {
            break;
        }
        struck = nth;
    }
    assert!(struck > 150, "the program makes {struck} calls");
    assert_eq!(device.violations(), Vec::<String>::new());
}

#[test]
fn a_lost_device_fails_every_later_call() {
    let standin = standin();
    let device = standin.add_device("1GiB").unwrap();
    let driver = CudaDriver::open(device.ordinal()).unwrap();
    let flags = StreamFlags { non_blocking: true, priority: 0 };
    let stream = driver.create_stream(flags).unwrap();
    let (event, memory) = (driver.create_event(false).unwrap(), driver.alloc(MIB).unwrap());
    device.inject("lost_at=1").unwrap();
    let lost = |result: Result<()>| {
        let error = result.unwrap_err();
        assert!(error.is_device_lost(), "{error}");
    };
    lost(driver.synchronize());
    lost(driver.alloc(MIB).map(drop));
    lost(driver.free(memory));
    lost(driver.record(event, stream));
    lost(driver.query_event(event).map(drop));
    lost(driver.synchronize_stream(stream));
    lost(driver.memset(memory, 0, 8, stream));
    lost(driver.destroy_event(event));
    lost(driver.destroy_stream(stream));
    lost(driver.create_stream(flags).map(drop));
    drop(driver);
}

#[test]
fn codes_that_no_binding_knows_are_kept() {
    let standin = standin();
    let device = standin.add_device("1GiB").unwrap();
    let driver = CudaDriver::open(device.ordinal()).unwrap();
    standin.fail("cuMemAlloc_v2", 1, Code(46)).unwrap();
    let error = driver.alloc(MIB).unwrap_err();
    assert_eq!((error.code, error.kind), (Code(46), ErrorKind::Unavailable));
    driver.alloc(MIB).unwrap();
}

#[test]
fn codes_that_other_code_causes_are_explained() {
    let standin = standin();
    let device = standin.add_device("1GiB").unwrap();
    let driver = CudaDriver::open(device.ordinal()).unwrap();
    // A forked child; a device that another process has; a context that other code
    // destroyed.
    for (code, words) in [(3, "forked"), (46, "another process"), (709, "destroyed or reset")] {
        standin.fail("cuMemAlloc_v2", 1, Code(code)).unwrap();
        let told = driver.alloc(MIB).unwrap_err().to_string();
        assert!(told.contains(words) && told.contains("1048576 bytes asked for"), "{told}");
    }
}

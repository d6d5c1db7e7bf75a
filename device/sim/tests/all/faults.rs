//! Faults on order, and that a call which fails by one has no effect.

use std::time::Duration;

use aquifer_device::{
    Attribute, Code, Copy2d, CopyEnd, CopyPart, Device, DevicePtr, Driver, ErrorKind, HostPtr, Operation,
    PhysicalOptions, RawEvent, RawGraph, RawModule, RawPhysical, RawStream, Result,
};
use aquifer_sim::{Fault, SimConfig, SimDriver};

use crate::common::{GRANULE, MIB, Short, code, device};

/// A program that uses most calls and undoes all it did.
fn program(driver: &SimDriver) -> Result<()> {
    let (stream, other) = (driver.create_stream(Default::default())?, driver.create_stream(Default::default())?);
    let (event, memory) = (driver.create_event(true)?, driver.alloc(MIB)?);
    driver.memset(memory, 1, MIB, stream)?;
    driver.record(event, stream)?;
    driver.wait(other, event)?;
    driver.kernel("sum", &[(memory, MIB, aquifer_device::AccessKind::Read)], None, other)?;
    driver.get(memory, 8, other)?;
    driver.put(memory, &[1; 8], other)?;
    let (address, physical) =
        (driver.reserve(GRANULE, 0)?, driver.create_physical(GRANULE, PhysicalOptions::default())?);
    driver.map(address, GRANULE, physical)?;
    driver.set_access(address, GRANULE, &[0])?;
    driver.copy_on_device(address, memory, MIB, other)?;
    let pool = driver.alloc_async(MIB, other)?;
    driver.free_async(pool, other)?;
    driver.query_event(event)?;
    driver.query_stream(other)?;
    driver.synchronize_stream(other)?;
    driver.elapsed_ms(event, event)?;
    driver.unmap(address, GRANULE)?;
    driver.release_physical(physical)?;
    driver.unreserve(address, GRANULE)?;
    let host = driver.host_alloc(64)?;
    // SAFETY: nothing uses the memory.
    unsafe { driver.host_free(host) }?;
    driver.free(memory)?;
    driver.synchronize_event(event)?;
    driver.destroy_event(event)?;
    driver.synchronize()?;
    driver.destroy_stream(stream)?;
    driver.destroy_stream(other)
}

#[test]
fn every_call_of_a_program_can_be_made_to_fail() {
    let driver = device(0);
    program(&driver).unwrap();
    let calls = driver.calls_made();
    assert!(calls > 30);
    for nth in 1..=calls {
        let driver =
            SimDriver::new(SimConfig::new(1 << 30).fault(Fault::Nth { operation: None, nth, code: Code(999) }));
        let error = program(&driver).unwrap_err();
        assert_eq!((error.code, driver.calls_made()), (Code(999), nth));
        assert_eq!(driver.violations(), []);

        let driver = SimDriver::new(SimConfig::new(1 << 30).fault(Fault::LostAt { nth }));
        assert!(program(&driver).unwrap_err().is_device_lost());
        assert!(program(&driver).unwrap_err().is_device_lost());
        assert!(driver.memory_info().unwrap_err().is_device_lost());
    }
}

/// Makes the driver call of an operation. A fault strikes before it does anything, so handles need
/// not be live.
fn call(driver: &SimDriver, operation: Operation) -> Result<()> {
    let (ptr, stream, event, host) = (DevicePtr(GRANULE), RawStream::LEGACY, RawEvent(1), HostPtr(4096));
    let mut byte = [0_u8];
    let (place, part) =
        (byte.as_mut_ptr(), CopyPart { dst: CopyEnd::Device(ptr), src: CopyEnd::Device(ptr), bytes: 1 });
    let CopyPart { dst, src, .. } = part;
    let rows = Copy2d { dst, dst_pitch: 1, src, src_pitch: 1, width: 1, height: 1 };
    match operation {
        Operation::MemoryInfo => driver.memory_info().map(drop),
        Operation::Alloc => driver.alloc(1).map(drop),
        Operation::Free => driver.free(ptr),
        Operation::AllocAsync => driver.alloc_async(1, stream).map(drop),
        Operation::FreeAsync => driver.free_async(ptr, stream),
        Operation::Reserve => driver.reserve(GRANULE, 0).map(drop),
        Operation::Unreserve => driver.unreserve(ptr, GRANULE),
        Operation::CreatePhysical => driver.create_physical(GRANULE, PhysicalOptions::default()).map(drop),
        Operation::ReleasePhysical => driver.release_physical(RawPhysical(1)),
        Operation::Map => driver.map(ptr, GRANULE, RawPhysical(1)),
        Operation::Unmap => driver.unmap(ptr, GRANULE),
        Operation::SetAccess => driver.set_access(ptr, GRANULE, &[0]),
        Operation::HostAlloc => driver.host_alloc(1).map(drop),
        // SAFETY: no memory is there, and nothing is done, as with all that follow.
        Operation::HostFree => unsafe { driver.host_free(host) },
        Operation::CreateStream => driver.create_stream(Default::default()).map(drop),
        Operation::DestroyStream => driver.destroy_stream(stream),
        Operation::SynchronizeStream => driver.synchronize_stream(stream),
        Operation::QueryStream => driver.query_stream(stream).map(drop),
        Operation::CreateEvent => driver.create_event(false).map(drop),
        Operation::DestroyEvent => driver.destroy_event(event),
        Operation::Record => driver.record(event, stream),
        Operation::Wait => driver.wait(stream, event),
        Operation::QueryEvent => driver.query_event(event).map(drop),
        Operation::SynchronizeEvent => driver.synchronize_event(event),
        Operation::ElapsedTime => driver.elapsed_ms(event, event).map(drop),
        Operation::Synchronize => driver.synchronize(),
        // SAFETY: as above, and the byte can be read.
        Operation::CopyToDevice => unsafe { driver.copy_to_device(ptr, place, 1, stream) },
        // SAFETY: as above, and the byte can be written.
        Operation::CopyToHost => unsafe { driver.copy_to_host(place, ptr, 1, stream) },
        Operation::CopyOnDevice => driver.copy_on_device(ptr, ptr, 1, stream),
        Operation::CopyPeer => driver.copy_peer(ptr, &*device(0), ptr, 1, stream),
        Operation::Memset => driver.memset(ptr, 0, 1, stream),
        Operation::Launch => driver.kernel("nothing", &[], None, stream),
        Operation::BeginCapture => driver.begin_capture(stream),
        Operation::EndCapture => driver.end_capture(stream).map(drop),
        Operation::LaunchGraph => driver.launch_graph(RawGraph(1), stream),
        Operation::DestroyGraph => driver.destroy_graph(RawGraph(1)),
        Operation::Attribute => driver.attribute(Attribute::MemoryPools).map(drop),
        Operation::LoadModule => driver.load_module("").map(drop),
        Operation::UnloadModule => driver.unload_module(RawModule(1)),
        // SAFETY: as above.
        Operation::HostRegister => unsafe { driver.host_register(place, 1) }.map(drop),
        // SAFETY: as above.
        Operation::HostUnregister => unsafe { driver.host_unregister(host) },
        // SAFETY: no host memory is named.
        Operation::Copy2d => unsafe { driver.copy_2d(&rows, stream) },
        // SAFETY: as above.
        Operation::CopyBatch => unsafe { driver.copy_batch(&[part], stream) },
        Operation::CaptureStatus => driver.capture_status(stream).map(drop),
        Operation::StreamId => driver.stream_id(stream).map(drop),
        Operation::PoolUsage => driver.pool_usage().map(drop),
        Operation::TrimPool => driver.trim_pool(0),
        Operation::TrimGraphMemory => driver.trim_graph_memory(),
        Operation::CanAccessPeer => driver.can_access_peer(0).map(drop),
        other => panic!("{other} is not called here"),
    }
}

/// By its name in device strings, and with any code.
#[test]
fn every_operation_can_be_made_to_fail_with_any_code() {
    for &operation in Operation::ALL {
        let text = format!("1GiB,fault={operation}#1:717");
        if operation == Operation::Init {
            // A simulated device is there when it is opened: the fault would never strike.
            assert!(SimConfig::parse(&text).unwrap_err().to_string().contains("`cuInit` at byte 11"));
            continue;
        }
        let driver = SimDriver::new(SimConfig::parse(&text).unwrap());
        let error = call(&driver, operation).unwrap_err();
        assert_eq!((error.operation, error.code), (operation, Code(717)), "{operation}");
        assert!(error.to_string().contains("injected fault"), "{error}");
        assert_eq!(driver.violations(), []);
    }
}

#[test]
fn a_call_that_fails_by_a_fault_has_no_effect() {
    let driver = device(0);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    let (mapped, physical) = driver.mapped();
    let free = driver.memory_info().unwrap().free;
    let fail_next = |operation| driver.inject(Fault::Nth { operation: Some(operation), nth: 1, code: Code(999) });
    fail_next(Operation::Alloc);
    assert_eq!(code(driver.alloc(MIB)), Code(999));
    fail_next(Operation::Free);
    assert_eq!(code(driver.free(memory)), Code(999));
    fail_next(Operation::Memset);
    assert_eq!(code(driver.memset(memory, 1, MIB, stream)), Code(999));
    fail_next(Operation::Unmap);
    assert_eq!(code(driver.unmap(mapped, GRANULE)), Code(999));
    fail_next(Operation::ReleasePhysical);
    assert_eq!(code(driver.release_physical(physical)), Code(999));
    fail_next(Operation::Record);
    let event = driver.event();
    assert_eq!(code(driver.record(event, stream)), Code(999));
    assert_eq!(driver.memory_info().unwrap().free, free);
    assert_eq!(driver.get(memory, 1, stream).unwrap(), [0xCD]);
    driver.unmap(mapped, GRANULE).unwrap();
    driver.release_physical(physical).unwrap();
    driver.free(memory).unwrap();
    assert_eq!(driver.memory_info().unwrap().free, 1 << 30);
}

#[test]
fn a_blocking_copy_returns_where_every_call_fails() {
    let sim = SimDriver::new(SimConfig::new(1 << 30));
    let device = Device::new(sim.clone());
    let (stream, ptr) = (device.stream().unwrap(), device.alloc(MIB).unwrap());
    for operation in [None, Some(Operation::Synchronize)] {
        sim.inject(Fault::Rate { operation, rate: 1.0, code: Code(999) });
        if operation.is_some() {
            sim.inject(Fault::Rate { operation: Some(Operation::SynchronizeStream), rate: 1.0, code: Code(999) });
        }
        let error = stream.upload_blocking(ptr, &[1; 64]).unwrap_err();
        assert_eq!(error.code, Code(999), "{error}");
        sim.clear_faults();
        stream.upload_blocking(ptr, &[2; 64]).unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(sim.violations(), []);
}

#[test]
fn memory_runs_out_at_the_byte_that_was_asked_for() {
    let driver = SimDriver::new(SimConfig::parse("1GiB,oom_at=8MiB").unwrap());
    let stream = driver.stream();
    driver.alloc(2 * MIB).unwrap();
    driver.create_physical(2 * MIB, PhysicalOptions::default()).unwrap();
    driver.alloc_async(4 * MIB - 512, stream).unwrap();
    assert!(driver.alloc(513).unwrap_err().is_out_of_memory());
    assert!(driver.create_physical(2 * MIB, PhysicalOptions::default()).unwrap_err().is_out_of_memory());
    driver.alloc(512).unwrap();
    driver.clear_faults();
    driver.alloc(MIB).unwrap();
}

#[test]
fn random_faults_repeat_with_the_seed() {
    let failures = |seed: u64| {
        let driver = SimDriver::new(SimConfig::parse(&format!("1GiB,seed={seed},fault_rate=cuMemAlloc:0.3")).unwrap());
        (0..100).map(|_| driver.alloc(1).map_err(|error| error.kind).err()).collect::<Vec<_>>()
    };
    assert_eq!(failures(1), failures(1));
    assert_ne!(failures(1), failures(2));
    let failed = failures(1).into_iter().flatten().collect::<Vec<_>>();
    assert!((15..45).contains(&failed.len()) && failed.iter().all(|&kind| kind == ErrorKind::OutOfMemory));
}

#[test]
fn spikes_take_virtual_time() {
    let driver = device(0);
    driver.inject(Fault::Spike { rate: 1.0, duration: Duration::from_millis(5) });
    let before = driver.now_ns();
    driver.event();
    assert!(driver.now_ns() - before >= 5_000_000);
}

#[test]
fn the_host_may_touch_its_memory_once_the_device_is_lost() {
    let driver = device(0);
    let (stream, memory, host) = (driver.stream(), driver.alloc(MIB).unwrap(), driver.host_alloc(64).unwrap());
    driver.download(host, memory, 64, stream);
    driver.inject(Fault::LostAt { nth: 1 });
    assert!(driver.synchronize().unwrap_err().is_device_lost());
    driver.host_access(host, 64, aquifer_device::AccessKind::Write).unwrap();
    assert_eq!(driver.violations(), []);
}

#[test]
fn refused_requests_take_little_time() {
    let driver = device(0);
    assert!(driver.alloc(u64::MAX).unwrap_err().is_out_of_memory());
    assert!(driver.now_ns() < 1_000_000);
}

#[test]
fn codes_that_mean_a_lost_device_lose_it() {
    let driver = device(0);
    driver.inject(Fault::Nth { operation: Some(Operation::Record), nth: 1, code: Code::ILLEGAL_ADDRESS });
    let (stream, event) = (driver.stream(), driver.event());
    assert_eq!(code(driver.record(event, stream)), Code::ILLEGAL_ADDRESS);
    driver.clear_faults();
    assert_eq!(code(driver.query_event(event)), Code::ILLEGAL_ADDRESS);
}

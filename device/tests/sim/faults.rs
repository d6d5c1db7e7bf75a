//! Faults on order, and that a call which fails by one has no effect.

use std::time::Duration;

use aquifer_device::sim::{Fault, SimConfig, SimDriver};
use aquifer_device::{Code, Device, Driver, ErrorKind, Operation, PhysicalOptions, Result};

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
    // SAFETY: nobody uses the memory.
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
    let (stream, ptr) = (device.create_stream().unwrap(), device.alloc(MIB).unwrap());
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
fn refused_requests_take_no_time_to_speak_of() {
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

#[test]
#[should_panic(expected = "two unordered writes: 'memset #1' on stream 1")]
fn violations_panic_where_asked() {
    let driver = SimDriver::new(SimConfig::new(1 << 30).panic_on_violation(true));
    let (one, two, memory) = (driver.stream(), driver.stream(), driver.alloc(MIB).unwrap());
    driver.memset(memory, 1, MIB, one).unwrap();
    let _ = driver.memset(memory, 1, MIB, two);
}

//! Plain memory, pinned memory and the driver's pool: addresses, capacity, content, and
//! their costs on the host.

use std::collections::BTreeMap;
use std::process::Command;

use aquifer_device::AccessKind::{Read, Write};
use aquifer_device::{Code, DevicePtr, Driver, ErrorKind, HostPtr, RawStream};
use aquifer_sim::{SimConfig, SimDriver, ViolationKind};
use proptest::prelude::*;

use crate::common::{MIB, Short, code, device, unchecked};

const ALIGNMENT: u64 = 2 << 20;

#[test]
fn all_of_the_capacity_can_be_allocated_at_the_lowest_addresses() {
    let driver = unchecked();
    let first = driver.alloc(1).unwrap();
    let second = driver.alloc(3 * MIB).unwrap();
    let third = driver.alloc((1 << 30) - 3 * MIB - 512).unwrap();
    assert_eq!(first, DevicePtr(0x7000_0000_0000));
    assert_eq!((second.0 - first.0, third.0 - second.0), (ALIGNMENT, 2 * ALIGNMENT));
    assert_eq!(driver.memory_info().unwrap().free, 0);
    let error = driver.alloc(1).unwrap_err();
    assert!(error.is_out_of_memory() && error.to_string().contains("512 bytes asked for, 0 of"), "{error}");
    driver.free(second).unwrap();
    assert_eq!(driver.alloc(MIB).unwrap(), second);
}

#[test]
fn without_reuse_addresses_are_new_until_none_is_left() {
    let driver = SimDriver::new(SimConfig::parse("64TiB,reuse=off").unwrap());
    let first = driver.alloc(MIB).unwrap();
    driver.free(first).unwrap();
    let mut last = first;
    // The zone has 512 TiB, and 2 MiB of them are no longer new.
    for _ in 0..16 {
        let next = driver.alloc(32 << 40).unwrap();
        assert!(next > last || next == first, "{next} after {last}");
        driver.free(next).unwrap();
        last = next;
    }
    assert_eq!(last, first);
}

#[test]
fn bad_frees_are_refused_with_a_reason() {
    let driver = device(0);
    let memory = driver.alloc(MIB).unwrap();
    let detail = |ptr| driver.free(ptr).unwrap_err().to_string();
    assert!(detail(memory.offset(512)).contains("inside the allocation"));
    assert!(detail(DevicePtr(4096)).contains("not an allocation"));
    driver.free(memory).unwrap();
    assert!(detail(memory).contains("already freed by 'cuMemFree"));
    assert_eq!(code(driver.alloc(0)), Code::INVALID_VALUE);
    assert_eq!(code(driver.alloc(u64::MAX)), Code::OUT_OF_MEMORY);
}

#[test]
fn other_processes_take_from_the_free_memory() {
    let driver = SimDriver::new(SimConfig::new(1 << 30).other_process_bytes(1 << 29));
    let info = driver.memory_info().unwrap();
    assert_eq!((info.free, info.total), (1 << 29, 1 << 30));
    assert!(driver.alloc((1 << 29) + 1).unwrap_err().is_out_of_memory());
    driver.set_other_process_bytes(0);
    driver.alloc(1 << 30).unwrap();
    driver.set_other_process_bytes(u64::MAX);
    assert_eq!(driver.memory_info().unwrap().free, 0);
}

#[test]
fn content_is_real_and_starts_as_poison() {
    let driver = device(3);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    assert_eq!(driver.get(memory, 3, stream).unwrap(), [0xCD; 3]);
    driver.put(memory.offset(10), b"water", stream).unwrap();
    driver.memset(memory.offset(12), b'v', 1, stream).unwrap();
    driver.copy_on_device(memory.offset(100), memory.offset(10), 5, stream).unwrap();
    let add = std::sync::Arc::new(move |memory: &mut dyn aquifer_device::KernelMemory, _: &[_]| {
        let mut bytes = [0; 5];
        memory.read(DevicePtr(0x7000_0000_0000 + 100), &mut bytes)?;
        memory.write(DevicePtr(0x7000_0000_0000 + 100), &bytes.map(|byte: u8| byte.to_ascii_uppercase()))
    });
    driver.kernel("upper", &[(memory.offset(100), 5, Write)], Some(add), stream).unwrap();
    assert_eq!(driver.get(memory.offset(100), 6, stream).unwrap(), b"WAVER\xCD");
    assert_eq!(driver.violations(), []);
}

#[test]
fn kernels_that_touch_undeclared_memory_lose_the_device() {
    for (kind, write) in [(Read, true), (Write, false)] {
        let driver = device(0);
        let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
        driver.memset(memory, 0, MIB, stream).unwrap();
        let touch = std::sync::Arc::new(move |view: &mut dyn aquifer_device::KernelMemory, _: &[_]| {
            // The kernel ignores the error, as hardware would not.
            let _ = if write { view.write(memory, &[1]) } else { view.read(memory.offset(8), &mut [0]) };
            Ok(())
        });
        driver.kernel("stray", &[(memory, 8, kind)], Some(touch), stream).unwrap();
        assert_eq!(code(driver.synchronize()), Code::ILLEGAL_ADDRESS);
        let found = driver.take_violation().unwrap();
        assert!(found.contains("undeclared access") && found.contains("kernel stray"), "{found}");
        assert_eq!(driver.create_event(false).unwrap_err().kind, ErrorKind::DeviceLost);
    }
}

#[test]
fn a_kernel_that_panics_leaves_the_device_usable() {
    let driver = device(0);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    let host = std::sync::Arc::new(|_: &mut dyn aquifer_device::KernelMemory, _: &[_]| panic!("a kernel's mistake"));
    driver.kernel("panics", &[(memory, 8, Write)], Some(host), stream).unwrap();
    let waits = std::panic::AssertUnwindSafe(|| driver.synchronize());
    assert!(std::panic::catch_unwind(waits).is_err());
    driver.put(memory, &[1], stream).unwrap();
    assert_eq!(driver.get(memory, 1, stream).unwrap(), [1]);
}

#[test]
fn kernels_that_fail_lose_the_device() {
    let driver = device(0);
    let stream = driver.stream();
    let host = std::sync::Arc::new(|_: &mut dyn aquifer_device::KernelMemory, _: &[_]| {
        Err(aquifer_device::DeviceError::new(aquifer_device::Operation::Launch, Code::INVALID_VALUE))
    });
    driver.kernel("fails", &[], Some(host), stream).unwrap();
    assert_eq!(code(driver.synchronize_stream(stream)), Code::LAUNCH_FAILED);
    assert_eq!(driver.violations(), []);
}

#[test]
fn touching_missing_memory_is_found_and_loses_the_device() {
    let check = |program: &dyn Fn(&SimDriver, RawStream), kind| {
        let driver = device(0);
        let stream = driver.stream();
        program(&driver, stream);
        assert_eq!(code(driver.synchronize_stream(stream)), Code::ILLEGAL_ADDRESS);
        assert_eq!(driver.violations().iter().map(|violation| violation.kind).collect::<Vec<_>>(), [kind]);
        assert_eq!(code(driver.alloc(1)), Code::ILLEGAL_ADDRESS);
    };
    check(&|driver, stream| driver.memset(DevicePtr(64), 0, 8, stream).unwrap(), ViolationKind::NotAllocated);
    check(
        &|driver, stream| {
            let memory = driver.alloc(1000).unwrap();
            driver.memset(memory, 0, 1001, stream).unwrap();
        },
        ViolationKind::NotAllocated,
    );
    check(
        &|driver, stream| {
            let memory = driver.alloc(MIB).unwrap();
            driver.free(memory).unwrap();
            driver.memset(memory, 0, 8, stream).unwrap();
        },
        ViolationKind::UseAfterFree,
    );
    check(
        &|driver, stream| {
            let memory = driver.alloc_async(MIB, stream).unwrap();
            driver.free_async(memory, stream).unwrap();
            driver.memset(memory, 0, 8, stream).unwrap();
        },
        ViolationKind::UseAfterFree,
    );
}

#[test]
fn pool_memory_comes_back_once_the_stream_gets_there() {
    let driver = device(0);
    let stream = driver.stream();
    let memory = driver.alloc_async(1 << 30, stream).unwrap();
    driver.memset(memory, 1, 1 << 30, stream).unwrap();
    driver.stall(stream, std::time::Duration::from_millis(1)).unwrap();
    driver.free_async(memory, stream).unwrap();
    assert_eq!(driver.memory_info().unwrap().free, 0);
    assert!(driver.free(memory).unwrap_err().to_string().contains("already freed by 'pool free"));
    let before = driver.now_ns();
    let plain = driver.alloc(1 << 30).unwrap();
    assert!(driver.now_ns() - before > 1_000_000, "the allocation waited for the free");
    assert_eq!(code(driver.free_async(plain, stream)), Code::INVALID_VALUE);
    driver.free(plain).unwrap();
    assert_eq!(driver.memory_info().unwrap().free, 1 << 30);
    assert_eq!(driver.violations(), []);
}

#[test]
fn page_locked_copies_take_effect_when_they_run() {
    let driver = device(0);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    let host = driver.host_alloc(8192).unwrap();
    assert!(host.0.is_multiple_of(4096));
    driver.memset(memory, 7, MIB, stream).unwrap();
    driver.stall(stream, std::time::Duration::from_millis(1)).unwrap();
    driver.download(host, memory, 4096, stream);
    // SAFETY: pinned memory is initialised, and nothing else touches it while the lock-step
    // program is here.
    let byte = || unsafe { host.as_ptr().read() };
    assert_eq!(byte(), 0, "the copy has not run yet");
    driver.synchronize_stream(stream).unwrap();
    assert_eq!(byte(), 7);
    // SAFETY: nothing uses the memory any more.
    unsafe { driver.host_free(host) }.unwrap();
    // SAFETY: refused: it is gone.
    assert_eq!(code(unsafe { driver.host_free(host) }), Code::INVALID_VALUE);
    // SAFETY: refused: no memory starts there.
    assert_eq!(code(unsafe { driver.host_free(HostPtr(1)) }), Code::INVALID_VALUE);
    assert_eq!(code(driver.host_alloc(0)), Code::INVALID_VALUE);
    assert_eq!(code(driver.host_alloc(usize::MAX)), Code::OUT_OF_MEMORY);
}

#[test]
fn memory_starts_clean_after_it_was_freed() {
    let driver = unchecked();
    let (one, two) = (driver.stream(), driver.stream());
    let memory = driver.alloc(MIB).unwrap();
    driver.memset(memory, 1, MIB, one).unwrap();
    driver.free(memory).unwrap();
    assert_eq!(driver.alloc(MIB).unwrap(), memory);
    driver.memset(memory, 2, MIB, two).unwrap();
    assert_eq!(driver.violations(), []);
    assert_eq!(driver.get(memory, 1, two).unwrap(), [2]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Against the simplest model: take the first gap that is wide enough.
    #[test]
    fn plain_addresses_are_first_fit(
        steps in prop::collection::vec((any::<bool>(), 1u64..20 * MIB, any::<prop::sample::Index>()), 1..60),
    ) {
        let driver = unchecked();
        let mut live: BTreeMap<u64, u64> = BTreeMap::new();
        for (allocates, bytes, which) in steps {
            let used: u64 = live.values().map(|bytes| bytes.next_multiple_of(512)).sum();
            prop_assert_eq!(driver.memory_info().unwrap().free, (1 << 30) - used);
            if allocates {
                let mut expected = 0x7000_0000_0000;
                for (&start, &held) in &live {
                    if start - expected >= bytes.next_multiple_of(ALIGNMENT) { break; }
                    expected = start + held.next_multiple_of(ALIGNMENT);
                }
                match driver.alloc(bytes) {
                    Ok(ptr) => {
                        prop_assert_eq!(ptr.0, expected);
                        live.insert(ptr.0, bytes);
                    }
                    Err(error) => {
                        prop_assert!(error.is_out_of_memory() && used + bytes.next_multiple_of(512) > 1 << 30);
                    }
                }
            } else if !live.is_empty() {
                let (&ptr, _) = live.iter().nth(which.index(live.len())).unwrap();
                live.remove(&ptr);
                driver.free(DevicePtr(ptr)).unwrap();
            }
        }
    }
}

/// Runs in a process of its own: resident memory is that of the whole process.
#[test]
#[ignore = "run by `large_devices_cost_little_host_memory`"]
fn sixty_gib_in_its_own_process() {
    let pages = || -> u64 {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse().unwrap()
    };
    let before = pages();
    let driver = SimDriver::new(SimConfig::parse("80GiB").unwrap());
    let stream = driver.stream();
    let memory = driver.alloc(60 << 30).unwrap();
    driver.memset(memory, 9, 60 << 30, stream).unwrap();
    let chunk = vec![1; 1 << 20];
    for index in 0..100 {
        driver.put(memory.offset(index * 600 * MIB), &chunk, stream).unwrap();
    }
    driver.synchronize().unwrap();
    for index in [0, 57, 99] {
        let place = memory.offset(index * 600 * MIB);
        assert_eq!(driver.get(place.offset(MIB - 1), 2, stream).unwrap(), [1, 9]);
    }
    let grown = (pages() - before) * 4096;
    assert!(grown < 200 << 20, "resident memory grew by {grown} bytes");
    println!("grown by {grown}");
}

#[test]
fn large_devices_cost_little_host_memory() {
    let test = std::env::current_exe().unwrap();
    let script =
        r#"ulimit -v "$1" || exit 77; exec "$2" --exact memory::sixty_gib_in_its_own_process --ignored --nocapture"#;
    for limit in ["unlimited", "4194304"] {
        let Ok(run) = Command::new("bash").args(["-c", script, "bash", limit]).arg(&test).output() else {
            eprintln!("SKIPPED: there is no bash to limit the address space with");
            return;
        };
        let output = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success() && output.contains("grown by"), "limit {limit}: {output}{run:?}");
    }
}

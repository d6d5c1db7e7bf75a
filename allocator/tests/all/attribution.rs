//! The holders of a device's memory, and the suggested headroom.

use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_allocator::{AllocError, Allocator, Config, OomReport};
use aquifer_device::Device;
use aquifer_sim::{SimConfig, SimDriver};

const MIB: u64 = 1 << 20;

fn open(device: &str, config: &str) -> (Device, Allocator) {
    let device = aquifer_sim::open(device).unwrap();
    let allocator = Allocator::new(&device, config).unwrap();
    (device, allocator)
}

fn refused(allocator: &Allocator, bytes: u64) -> OomReport {
    match allocator.alloc_bytes(bytes, allocator.device().default_stream()) {
        Err(AllocError::OutOfMemory(report)) => *report,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_parts_are_all_of_the_device() {
    let (device, allocator) = open("1GiB,other=100MiB", "");
    let second = Allocator::new(&device, Config::default()).unwrap();
    let stream = device.default_stream();
    let _held = [allocator.alloc_bytes(30 * MIB, stream).unwrap(), second.alloc_bytes(20 * MIB, stream).unwrap()];
    device.alloc(10 * MIB).unwrap();
    let memory = allocator.attribution().unwrap();
    assert_eq!((memory.total, memory.free), (1024 * MIB, 864 * MIB));
    assert_eq!((memory.reserved, memory.other_allocators), (30 * MIB, 20 * MIB));
    assert_eq!((memory.rest_of_process, memory.unattributed), (Some(10 * MIB), 0));
    assert_eq!((memory.other_processes.len(), memory.other_processes[0].bytes), (1, 100 * MIB));
    assert_eq!((memory.held_by_others(), memory.driver), (130 * MIB, Some(0)));
    drop(second);
}

/// Neither memory of allocators nor that of another process.
#[test]
fn the_most_that_libraries_took_since_opening_is_the_suggested_headroom() {
    let device = aquifer_sim::open("1GiB").unwrap();
    device.alloc(50 * MIB).unwrap();
    let allocator = Allocator::new(&device, "").unwrap();
    let suggested = || allocator.attribution().unwrap().suggested_headroom;
    let _held = allocator.alloc_bytes(300 * MIB, device.default_stream()).unwrap();
    assert_eq!((suggested(), allocator.attribution().unwrap().outside_at_open), (0, 50 * MIB));
    let workspace = device.alloc(70 * MIB).unwrap();
    assert_eq!(suggested(), 70 * MIB);
    device.free(workspace).unwrap();
    assert_eq!(suggested(), 70 * MIB, "it may come again");
}

#[test]
fn memory_of_others_suggests_no_headroom() {
    let driver = SimDriver::new(SimConfig::new(1 << 30));
    let device = Device::new(driver.clone());
    let library = device.alloc(50 * MIB).unwrap();
    let closed = Allocator::new(&device, "").unwrap();
    let buffer = closed.alloc_bytes(40 * MIB, device.default_stream()).unwrap();
    let allocator = Allocator::new(&device, "").unwrap();
    driver.set_other_process_bytes(300 << 20);
    drop(closed);
    let memory = allocator.attribution().unwrap();
    assert_eq!((memory.suggested_headroom, memory.rest_of_process), (0, Some(50 * MIB)));
    assert_eq!(memory.other_allocators, 40 * MIB, "of a buffer that outlived its allocator");
    drop(buffer);
    device.free(library).unwrap();
}

#[test]
fn allocators_that_grow_and_shrink_suggest_no_headroom() {
    let device = aquifer_sim::open("1GiB").unwrap();
    let [watching, working] = [(); 2].map(|()| Allocator::new(&device, "").unwrap());
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                assert_eq!(watching.attribution().unwrap().suggested_headroom, 0);
            }
        });
        for round in 0..40_u64 {
            let block = working.alloc_bytes((round % 7 + 1) * 20 * MIB, device.default_stream()).unwrap();
            drop(block);
            working.empty_cache().unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
    });
    assert_eq!(watching.attribution().unwrap().rest_of_process, Some(0));
}

#[test]
fn a_refusal_says_who_holds_memory() {
    let (device, allocator) = open("100MiB,other=20MiB", "");
    device.alloc(10 * MIB).unwrap();
    let _held = allocator.alloc_bytes(30 * MIB, device.default_stream()).unwrap();
    let text = refused(&allocator, 60 * MIB).to_string();
    let who = "10.00 MiB is held by the rest of this process (context, modules, libraries), 20.00 MiB by another \
               process. 30.00 MiB is allocated";
    assert!(text.contains(who), "{text}");
    allocator.set_limit(Some(40 * MIB));
    let text = refused(&allocator, 60 * MIB).to_string();
    assert!(text.contains("30.00 MiB is held by others than this allocator."), "{text}");
    let (_, allocator) = open("100MiB", "");
    let text = refused(&allocator, 101 * MIB).to_string();
    assert!(!text.contains("is held by"), "{text}");
}

#[test]
fn the_summary_ends_with_who_holds_the_device() {
    let (device, allocator) = open("1GiB,other=100MiB", "");
    let _held = allocator.alloc_bytes(30 * MIB, device.default_stream()).unwrap();
    device.alloc(2 * MIB).unwrap();
    let text = allocator.summary();
    let expected = "\
|===========================================================================|
| Device memory                                                |   1024 MiB |
|       free                                                   |    892 MiB |
|       this allocator                                         |     30 MiB |
|       the rest of this process (context, modules, libraries) |      2 MiB |
|       another process                                        |    100 MiB |
|       suggested headroom (headroom_mb:2)                     |      2 MiB |
|===========================================================================|
";
    assert!(text.ends_with(expected), "{text}");
    assert!(text.lines().all(|line| line.len() == 77), "{text}");
}

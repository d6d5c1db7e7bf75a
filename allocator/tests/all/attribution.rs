//! Who holds the device's memory, and how much to leave free for libraries.

use aquifer_allocator::{AllocError, Allocator, Config, OomReport};
use aquifer_device::Device;

const MIB: u64 = 1 << 20;

fn open(device: &str, config: &str) -> (Device, Allocator) {
    let device = Device::open(device).unwrap();
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
    let (device, allocator) = open("sim:1GiB,other=100MiB", "");
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
    let device = Device::open("sim:1GiB").unwrap();
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
fn a_refusal_says_who_holds_memory_and_what_to_leave_free() {
    let (device, allocator) = open("sim:100MiB,other=20MiB", "");
    device.alloc(10 * MIB).unwrap();
    let _held = allocator.alloc_bytes(30 * MIB, device.default_stream()).unwrap();
    let text = refused(&allocator, 60 * MIB).to_string();
    let who = "10.00 MiB is held by the rest of this process (context, modules, libraries), 20.00 MiB by another \
               process. 30.00 MiB is allocated";
    assert!(text.contains(who), "{text}");
    let grown = "\n  taken by libraries since the allocator opened: 10.00 MiB, for which headroom_mb:10 leaves room\n";
    assert!(text.contains(grown), "{text}");
    let (_, allocator) = open("sim:100MiB", "");
    let text = refused(&allocator, 101 * MIB).to_string();
    assert!(!text.contains("is held by") && !text.contains("taken by libraries"), "{text}");
}

#[test]
fn the_summary_ends_with_who_holds_the_device() {
    let (device, allocator) = open("sim:1GiB,other=100MiB", "");
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

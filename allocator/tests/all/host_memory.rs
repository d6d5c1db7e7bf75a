//! Devices that share the host's memory: what stays free there, and what reports say of it.

use aquifer_allocator::{Allocation, Allocator, Contents, OomReport, Refusal, WhySegments};
use aquifer_device::DevicePtr;

use crate::reserve::open;

const GIB: u64 = 1 << 30;

/// Takes blocks of `gib` GiB until one is refused.
fn fill(allocator: &Allocator, gib: u64) -> (Vec<Allocation>, OomReport) {
    let mut blocks = Vec::new();
    loop {
        match allocator.alloc_bytes(gib * GIB, allocator.device().default_stream()) {
            Ok(block) => blocks.push(block),
            Err(error) => return (blocks, error.report().unwrap_or_else(|| panic!("{error}")).clone()),
        }
    }
}

#[test]
fn a_sixteenth_of_memory_shared_with_the_host_stays_free() {
    for options in ["", "backing:segments"] {
        let (sim, allocator) = open("gb10", options);
        let allocator = allocator.unwrap();
        sim.set_other_process_bytes(4 * GIB); // the host's programs
        let (blocks, report) = fill(&allocator, 1);
        assert_eq!((blocks.len(), report.headroom, report.refusal), (116, 8 * GIB, Some(Refusal::Headroom)));
        let (report, memory) = (report.to_string(), allocator.attribution().unwrap().to_string());
        assert!(report.contains("capacity of 128.00 GiB, shared with the host, of which 8.00 GiB is free"), "{report}");
        assert!(memory.starts_with("128.00 GiB in total, shared with the host, "), "{memory}");
        assert!(allocator.summary().contains("| Device memory, shared with the host "));
    }
}

#[test]
fn without_a_headroom_a_program_that_takes_too_much_is_ended() {
    for options in ["headroom_mb:0", "headroom_mb:0,backing:segments"] {
        let allocator = open("gb10", options).1.unwrap();
        let _block = allocator.alloc_bytes(127 * GIB, allocator.device().default_stream()).unwrap();
        let error = allocator.alloc_bytes(2 * GIB, allocator.device().default_stream()).unwrap_err();
        assert!(error.is_device_lost() && error.to_string().contains("the host ran out of memory"), "{error}");
    }
}

#[test]
fn where_few_addresses_can_be_reserved_memory_is_mapped_first_and_then_comes_in_segments() {
    let (sim, allocator) = open("orin", "");
    let allocator = allocator.unwrap();
    let (blocks, report) = fill(&allocator, 4);
    assert_eq!((blocks.len(), report.lacking_on_device, report.headroom), (15, 4 * GIB, 4 * GIB), "{report}");
    assert!(matches!(allocator.why_segments(), Some(WhySegments::NoAddresses(_))));
    let mapped = blocks.iter().filter(|block| sim.mapping_at(DevicePtr(block.ptr().0)).is_some()).count();
    assert!((5..=7).contains(&mapped), "{mapped} of 15 blocks are mapped at 31 GiB of addresses");
}

#[test]
fn memory_wakes_up_only_where_the_host_has_it_beside_the_headroom() {
    let (sim, allocator) = open("gb10", "");
    let allocator = allocator.unwrap();
    let block = allocator.alloc_bytes(100 * GIB, allocator.device().default_stream()).unwrap();
    allocator.sleep(Contents::Discard).unwrap();
    sim.set_other_process_bytes(40 * GIB);
    let error = allocator.wake().unwrap_err();
    assert!(!error.is_device_lost() && error.to_string().contains("the memory still sleeps"), "{error}");
    sim.set_other_process_bytes(20 * GIB);
    allocator.wake().unwrap();
    drop(block);
}

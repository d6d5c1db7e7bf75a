//! Devices that share the host's memory: what stays free there, and what reports say of it.

use std::sync::Arc;

use aquifer_allocator::{Allocation, Allocator, OomReport, Refusal, WhySegments, config::Backing};
use aquifer_device::Device;
use aquifer_sim::{SimConfig, SimDriver};

const GIB: u64 = 1 << 30;

fn opened(device: &str, options: &str) -> (Arc<SimDriver>, Allocator) {
    let sim = SimDriver::new(SimConfig::parse(device).unwrap());
    let allocator = Allocator::new(&Device::new(sim.clone()), options).unwrap();
    (sim, allocator)
}

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
        let (sim, allocator) = opened("gb10", options);
        let (blocks, report) = fill(&allocator, 1);
        assert_eq!((blocks.len(), report.headroom, report.refusal), (120, 8 * GIB, Some(Refusal::Headroom)));
        let text = report.to_string();
        assert!(
            text.contains("total capacity of 128.00 GiB, shared with the host, of which 8.00 GiB is free"),
            "{text}"
        );
        // The host's programs take more, and give it back.
        sim.set_other_process_bytes(4 * GIB);
        drop(blocks);
        allocator.empty_cache().unwrap();
        assert_eq!(fill(&allocator, 1).0.len(), 116);
        let memory = allocator.attribution().unwrap();
        assert!(memory.to_string().starts_with("128.00 GiB in total, shared with the host, "), "{memory}");
        assert!(allocator.summary().contains("| Device memory, shared with the host "));
        assert_eq!(allocator.device().lost(), None);
    }
}

/// The model of what the headroom is for.
#[test]
fn without_a_headroom_a_program_that_takes_too_much_is_ended() {
    for options in ["headroom_mb:0", "headroom_mb:0,backing:segments"] {
        let (_, allocator) = opened("gb10", options);
        let stream = allocator.device().default_stream();
        let _block = allocator.alloc_bytes(127 * GIB, stream).unwrap();
        let error = allocator.alloc_bytes(2 * GIB, stream).unwrap_err();
        assert!(error.is_device_lost() && error.to_string().contains("the host ran out of memory"), "{error}");
    }
}

#[test]
fn where_few_addresses_can_be_reserved_memory_is_mapped_first_and_then_comes_in_segments() {
    let (sim, allocator) = opened("orin", "");
    let (blocks, report) = fill(&allocator, 4);
    assert_eq!((blocks.len(), report.lacking_on_device, report.headroom), (15, 4 * GIB, 4 * GIB), "{report}");
    assert!(matches!(allocator.why_segments(), Some(WhySegments::NoAddresses(_))));
    assert_eq!(allocator.backing(), Backing::Paged);
    let is_mapped = |address: u64| sim.mapping_at(aquifer_device::DevicePtr(address)).is_some();
    let mapped = blocks.iter().filter(|block| is_mapped(block.ptr().0)).count();
    assert!((5..=7).contains(&mapped), "{mapped} of 15 blocks are mapped at 31 GiB of addresses");
    drop(blocks);
    allocator.empty_cache().unwrap();
    assert_eq!((allocator.memory_reserved(), sim.held_bytes()), (0, 0));
}

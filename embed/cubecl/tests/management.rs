//! CubeCL's memory management runs on Aquifer's memory.

use std::sync::Arc;

use aquifer::device::DevicePtr;
use aquifer::prelude::*;
use aquifer_cubecl::AquiferStorage;
use cubecl_ir::MemoryDeviceProperties;
use cubecl_server::logging::ServerLogger;
use cubecl_server::memory_management::{
    Cleanup, ErrorGraph, MemoryAllocationMode, MemoryConfiguration, MemoryManagement, MemoryManagementOptions, PageUpdate,
};
use cubecl_server::storage::ComputeStorage as _;

const MIB: u64 = 1 << 20;

/// Numbers from 0 up to `end`, the same in each run.
fn draws(mut seed: u64) -> impl FnMut(u64) -> u64 {
    move |end| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % end
    }
}

/// Peaks of 5000 random requests: requested, and held from the device.
fn peaks(name: &str, config: MemoryConfiguration, dedicated: bool) -> (u64, u64) {
    let device = aquifer::open("sim:8GiB,violations=panic").unwrap();
    let memory = Allocator::of(&device).unwrap();
    let stream = device.stream().unwrap();
    let mut managed = MemoryManagement::from_configuration(
        AquiferStorage::new(&memory, &stream),
        &MemoryDeviceProperties::new(2 << 30, 512),
        config,
        Arc::new(ServerLogger::default()),
        MemoryManagementOptions::new(name),
    );
    if dedicated {
        managed.mode(MemoryAllocationMode::Dedicated);
    }
    let (mut failures, mut draw, mut held, mut live, mut requested) =
        (ErrorGraph::default(), draws(1), Vec::new(), 0, 0);
    for step in 0..5000_u64 {
        let size = if draw(4) == 0 { 1 + draw(64 * MIB) } else { 1 + draw(MIB) };
        let handle = managed.reserve(size, PageUpdate::Allow, &mut failures).unwrap();
        let resource = managed.get_resource(handle.clone().binding(), None, None).unwrap();
        assert!(resource.size >= size);
        stream.fill(DevicePtr(resource.ptr), step as u8, size).unwrap();
        held.push((handle, size));
        live += size;
        requested = requested.max(live);
        if held.len() > 40 {
            live -= held.swap_remove(draw(40) as usize).1;
        }
    }
    let peak = memory.stats().reserved_bytes.all.peak;
    held.clear();
    managed.cleanup(Cleanup::Explicit, &mut failures);
    managed.storage().flush();
    assert_eq!(memory.memory_allocated(), 0, "{name}: everything went back");
    println!("{name}: {} MiB requested, {} MiB held", requested / MIB, peak / MIB);
    (requested, peak)
}

#[test]
fn random_requests_are_served_in_every_mode_and_dedicated_holds_the_least() {
    let adaptive = peaks("adaptive", MemoryConfiguration::Adaptive, false);
    let exclusive = peaks("exclusive", MemoryConfiguration::ExclusivePages, false);
    let dedicated = peaks("dedicated", MemoryConfiguration::Adaptive, true);
    assert_eq!(adaptive.0, dedicated.0);
    assert!(dedicated.1 <= adaptive.1.min(exclusive.1), "{dedicated:?} {adaptive:?} {exclusive:?}");
}

#[test]
fn memory_that_runs_out_is_cubecls_error_and_the_report_stays() {
    let device = aquifer::open("sim:64MiB").unwrap();
    let (memory, stream) = (Allocator::of(&device).unwrap(), device.stream().unwrap());
    let mut storage = AquiferStorage::new(&memory, &stream);
    let held = storage.alloc(40 * MIB).unwrap();
    let refused = storage.alloc(40 * MIB).unwrap_err();
    assert!(refused.to_string().contains("out of device memory"), "{refused}");
    assert!(storage.last_error().unwrap().report().is_some());
    storage.dealloc(held.id);
    assert_eq!(storage.bytes_allocated(), 40 * MIB);
    storage.flush();
    assert!(storage.alloc(40 * MIB).is_ok());
    assert!(storage.get(&held).is_err());
}

//! Where memory cannot be mapped it comes in segments, and one warning says so and why.

use aquifer::device::sim::{Fault, SimConfig};
use aquifer::memory::{AllocError, Config, Contents};
use aquifer::{Allocator, Device};
use aquifer_allocator::config::Backing;
use aquifer_device::{Code, Operation};
use aquifer_tests::Subject;
use tracing::Level;

use crate::allocator::events::Events;

/// What is logged while an allocator is made on a device, and used a little, and where its memory
/// came from.
fn warnings(device: &Device, options: &str) -> (Vec<String>, bool) {
    let warnings = Events::up_to(Level::WARN);
    let is_mapped = tracing::subscriber::with_default(warnings.clone(), || {
        let allocator = Allocator::new(device, Config::parse(options).unwrap()).unwrap();
        let stream = device.stream().unwrap();
        let blocks = [1000, 3 << 20, 30 << 20].map(|bytes| allocator.alloc_bytes(bytes, &stream).unwrap());
        let is_mapped = allocator.snapshot().segments.iter().any(|segment| segment.is_expandable);
        drop(blocks);
        allocator.empty_cache().unwrap();
        is_mapped
    });
    (warnings.take(), is_mapped)
}

#[test]
fn falling_back_to_segments_is_told_once_and_why() {
    let device = |config: SimConfig| Subject::open(&config).device();
    let failing = |operation| {
        let driver = Subject::new(1 << 30);
        let device = driver.device();
        // With RDMA and without.
        for nth in [1, 2] {
            driver.inject(Fault::Nth { operation: Some(operation), nth, code: Code::INVALID_VALUE });
        }
        device
    };
    for (device, options, why) in [
        (device(SimConfig::new(1 << 30).vmm(false)), "", "cannot map memory"),
        (failing(Operation::Map), "", "cuMemMap"),
        (failing(Operation::SetAccess), "", "cuMemSetAccess"),
        (device(SimConfig::new(1 << 30)), "granule_mb:2048", "less than one granule"),
    ] {
        let (found, is_mapped) = warnings(&device, options);
        assert!(!is_mapped);
        assert!(found.len() == 1 && found[0].contains(why) && found[0].contains("segments"), "{why}: {found:?}");
    }
}

#[test]
fn nothing_is_told_where_memory_is_mapped_or_segments_were_asked_for() {
    for (options, expected) in [("", true), ("backing:segments", false)] {
        let device = Subject::new(1 << 30).device();
        assert_eq!(warnings(&device, options), (Vec::new(), expected), "{options:?}");
    }
}

#[test]
fn errors_say_why_memory_is_not_mapped() {
    let device = |config: SimConfig| Subject::open(&config).device();
    let failing = || {
        let driver = Subject::new(1 << 30);
        let device = driver.device();
        for nth in [1, 2] {
            driver.inject(Fault::Nth { operation: Some(Operation::Map), nth, code: Code::INVALID_VALUE });
        }
        device
    };
    for (device, options, why) in [
        (device(SimConfig::new(1 << 30).vmm(false)), "", "the device cannot map memory"),
        (failing(), "", "cuMemMap"),
        (device(SimConfig::new(1 << 30)), "granule_mb:2048", "less than one granule of 2.00 GiB"),
        (device(SimConfig::new(1 << 30)), "backing:segments", "`backing:paged` maps memory"),
        (device(SimConfig::new(1 << 30)), "no_cache:True", "`no_cache:True`"),
    ] {
        let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
        assert_eq!(allocator.backing(), Backing::Segments);
        assert!(allocator.why_segments().unwrap().to_string().contains(why), "{:?}", allocator.why_segments());
        let refused = [
            allocator.sleep(Contents::Discard).unwrap_err(),
            allocator.growable(1 << 20, device.default_stream()).unwrap_err(),
            allocator.enable_peer_access(1).unwrap_err(),
        ];
        for error in refused {
            assert!(matches!(error, AllocError::NotMapped { .. }) && error.to_string().contains(why), "{error}");
        }
    }
    let allocator = Allocator::new(&device(SimConfig::new(1 << 30)), Config::default()).unwrap();
    assert_eq!((allocator.backing(), allocator.why_segments()), (Backing::Paged, None));
}

//! Where memory cannot be mapped it comes in segments, and one warning says so and why.

use aquifer_tests::prelude::*;
use tracing::Level;

use crate::allocator::events::logged;

const MAPPING: [Operation; 5] =
    [Operation::CreatePhysical, Operation::Reserve, Operation::Map, Operation::SetAccess, Operation::Unmap];

/// A device on which the first calls of an operation fail.
fn failing(operation: Operation, code: Code) -> Device {
    let driver = Subject::new(GIB);
    // Twice: where memory for RDMA is refused, memory without is tried.
    for nth in [1, 2] {
        driver.inject(Fault::Nth { operation: Some(operation), nth, code });
    }
    driver.device()
}

/// Makes and uses an allocator on a device. Returns it with the warnings that were logged.
fn opened(device: &Device, options: &str) -> (Allocator, Vec<String>) {
    logged(
        |metadata| *metadata.level() <= Level::WARN,
        || {
            let allocator = Allocator::new(device, Config::parse(options).unwrap()).unwrap();
            let stream = device.stream().unwrap();
            let blocks = [1000, 3 << 20, 30 << 20].map(|bytes| {
                let block = allocator.alloc_bytes(bytes, &stream).unwrap();
                write_on(&stream, block.ptr(), bytes);
                block
            });
            let is_mapped = allocator.snapshot().segments.iter().any(|segment| segment.is_expandable);
            assert_eq!(is_mapped, allocator.backing() == Backing::Paged);
            drop(blocks);
            allocator.empty_cache().unwrap();
            allocator
        },
    )
}

#[test]
fn a_fallback_to_segments_is_logged_once_and_errors_say_why() {
    let device = |config: SimConfig| Subject::open(&config).device();
    let without_addresses = failing(Operation::Reserve, Code::OUT_OF_MEMORY);
    let failing = MAPPING.map(|operation| (failing(operation, Code::INVALID_VALUE), "", operation.name(), true));
    let others = [
        (without_addresses, "", "cuMemAddressReserve", true),
        (device(SimConfig::parse("1GiB,vmm=off").unwrap()), "", "cannot map memory", true),
        (device(SimConfig::new(GIB)), "granule_mb:2048", "less than one granule", true),
        (device(SimConfig::new(GIB)), "backing:segments", "`backing:paged` maps memory", false),
        (device(SimConfig::new(GIB)), "no_cache:True", "`no_cache:True`", false),
    ];
    for (device, options, why, is_fallback) in failing.into_iter().chain(others) {
        let (allocator, found) = opened(&device, options);
        assert_eq!(
            (allocator.backing(), found.len()),
            (Backing::Segments, usize::from(is_fallback)),
            "{why}: {found:?}"
        );
        assert!(found.iter().all(|text| text.contains(why) && text.contains("segments")), "{why}: {found:?}");
        assert!(allocator.why_segments().unwrap().to_string().contains(why), "{:?}", allocator.why_segments());
        let refused = [
            allocator.sleep(Contents::Discard).unwrap_err(),
            allocator.growable(1 << 20, device.default_stream()).unwrap_err(),
            allocator.enable_peer_access(1).unwrap_err(),
        ];
        for error in refused {
            assert!(matches!(error, AllocError::NotMapped { .. }) && error.to_string().contains(why), "{error}");
        }
        allocator.wake().unwrap();
        assert!(!allocator.is_asleep());
    }
}

#[test]
fn nothing_is_logged_where_memory_is_mapped() {
    let (allocator, found) = opened(&Subject::new(GIB).device(), "");
    assert_eq!((allocator.backing(), allocator.why_segments(), found), (Backing::Paged, None, vec![]));
}

#[test]
fn a_device_that_is_lost_when_mapping_is_tried_is_an_error() {
    for operation in MAPPING {
        Allocator::new(&failing(operation, Code(214)), Config::default()).unwrap_err();
    }
}

//! Memory that an allocator takes when it opens, and keeps (`reserve_mb`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_allocator::{AllocError, Allocator, Contents, PoolOptions, Refusal};
use aquifer_device::{Device, HandleKind};
use aquifer_sim::{SimConfig, SimDriver};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

pub(crate) fn open(device: &str, options: &str) -> (Arc<SimDriver>, Result<Allocator, AllocError>) {
    let sim = SimDriver::new(SimConfig::parse(device).unwrap());
    let allocator = Allocator::new(&Device::new(sim.clone()), options);
    (sim, allocator)
}

/// The example that openvm publishes of its memory manager: +10, +1, -10, +4, +11 GiB of 16.
#[test]
fn all_of_a_reserve_serves_requests_of_any_size() {
    for reserve in [0, 16 * GIB] {
        let (sim, allocator) = open("16GiB", &format!("reserve_mb:{}", reserve / MIB));
        let allocator = allocator.unwrap();
        assert_eq!((allocator.memory_reserved(), sim.held_bytes()), (reserve, reserve));
        let [one, two] = [0; 2].map(|_| allocator.device().stream().unwrap());
        let ten = allocator.alloc_bytes(10 * GIB, &one).unwrap();
        let mut held = vec![allocator.alloc_bytes(GIB, &two).unwrap()];
        drop(ten);
        held.push(allocator.alloc_bytes(4 * GIB, &one).unwrap());
        held.push(allocator.alloc_bytes(11 * GIB, &two).unwrap());
        assert_eq!((allocator.memory_allocated(), sim.held_bytes()), (16 * GIB, 16 * GIB));
        drop(held);
        assert_eq!(allocator.empty_cache().unwrap(), 16 * GIB - reserve);
        assert_eq!(sim.held_bytes(), reserve);
        drop(allocator);
        assert_eq!(sim.held_bytes(), 0, "it goes back with the allocator");
    }
}

#[test]
fn a_reserve_that_is_not_there_is_an_error_that_says_what_refused_it() {
    let refused = |device: &str, options: &str| {
        let (sim, allocator) = open(device, &format!("reserve_mb:13000{options}"));
        let error = allocator.unwrap_err();
        let report = error.report().unwrap_or_else(|| panic!("{error}"));
        assert!(error.to_string().contains("for: the reserve (reserve_mb)"), "{error}");
        assert_eq!((sim.held_bytes(), report.is_reserve, report.requested), (0, true, 13000 * MIB));
        report.refusal.unwrap()
    };
    assert_eq!([refused("16GiB,other=4GiB", ""), refused("8GiB", "")], [Refusal::Device; 2]);
    assert_eq!(refused("16GiB", ",limit_mb:7000"), Refusal::Limit);
    assert_eq!(refused("16GiB", ",headroom_mb:9000"), Refusal::Headroom);
    let error = open("16GiB", "reserve_mb:8000,backing:segments").1.unwrap_err();
    assert!(error.to_string().starts_with("a reserve (`reserve_mb`) needs mapped memory"), "{error}");
}

#[test]
fn nothing_gives_the_reserve_back() {
    let (sim, allocator) = open("1GiB", "reserve_mb:512");
    let allocator = allocator.unwrap();
    let stream = allocator.device().stream().unwrap();
    let exportable = allocator.alloc_exportable(100 * MIB, HandleKind::PosixFd, &stream).unwrap();
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    let blocks = [pool.alloc_bytes(300 * MIB, &stream), allocator.alloc_bytes(400 * MIB, &stream)];
    assert!(sim.held_bytes() >= 800 * MIB && blocks.iter().all(Result::is_ok));
    drop((blocks, exportable));
    allocator.trim_to(100 * MIB).unwrap();
    assert_eq!((allocator.memory_reserved(), sim.held_bytes()), (512 * MIB, 512 * MIB));
    sim.set_other_process_bytes(512 * MIB);
    let other = Allocator::new(allocator.device(), "").unwrap();
    assert!(other.alloc_bytes(100 * MIB, &stream).is_err(), "another allocator gets none of it");
    drop(pool.alloc_bytes(400 * MIB, &stream).unwrap());
    // What the private pool keeps serves a request, before caches have to give way.
    let asked = Arc::new(AtomicU64::new(0));
    let counted = asked.clone();
    let _cache = allocator.register_reclaimer(0, "cache", move |_| {
        counted.fetch_add(1, Relaxed);
        0
    });
    let _whole = allocator.alloc_bytes(512 * MIB, &stream).unwrap();
    assert_eq!((sim.held_bytes(), asked.load(Relaxed)), (512 * MIB, 0));
}

#[test]
fn the_reserve_stays_while_memory_sleeps() {
    let (sim, allocator) = open("150MiB", "reserve_mb:100");
    let allocator = allocator.unwrap();
    let stream = allocator.device().stream().unwrap();
    let block = allocator.alloc_bytes(120 * MIB, &stream).unwrap();
    stream.fill(block.ptr(), 7, block.bytes()).unwrap();
    assert_eq!((allocator.sleep(Contents::SaveToHost).unwrap(), sim.held_bytes()), (20 * MIB, 100 * MIB));
    sim.set_other_process_bytes(31 * MIB);
    allocator.wake().unwrap_err();
    assert_eq!(sim.held_bytes(), 100 * MIB);
    sim.set_other_process_bytes(0);
    allocator.wake().unwrap();
    let mut byte = [0];
    stream.download_blocking(&mut byte, block.ptr()).unwrap();
    assert_eq!((byte, allocator.memory_reserved()), ([7], 120 * MIB));
}

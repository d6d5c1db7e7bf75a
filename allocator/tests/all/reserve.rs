//! Memory that an allocator takes when it opens, and keeps (`reserve_mb`).

use std::sync::Arc;

use aquifer_allocator::{AllocError, Allocator, Contents, Part, PoolOptions, Refusal, SleepOptions, TagScope};
use aquifer_device::{Device, HandleKind};
use aquifer_sim::{SimConfig, SimDriver};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn open(device: &str, options: &str) -> (Arc<SimDriver>, Result<Allocator, AllocError>) {
    let sim = SimDriver::new(SimConfig::parse(device).unwrap());
    let allocator = Allocator::new(&Device::new(sim.clone()), options);
    (sim, allocator)
}

/// The example of openvm's report on its memory manager: +10, +1, -10, +4, +11 GiB of 16.
#[test]
fn all_of_a_reserve_serves_requests_of_any_size() {
    for options in ["", "reserve_mb:16384"] {
        let (sim, allocator) = open("16GiB", options);
        let allocator = allocator.unwrap();
        let [one, two] = [0; 2].map(|_| allocator.device().stream().unwrap());
        let ten = allocator.alloc_bytes(10 * GIB, &one).unwrap();
        let mut held = vec![allocator.alloc_bytes(GIB, &two).unwrap()];
        drop(ten);
        held.push(allocator.alloc_bytes(4 * GIB, &one).unwrap());
        held.push(allocator.alloc_bytes(11 * GIB, &two).unwrap());
        assert_eq!((allocator.memory_allocated(), sim.held_bytes()), (16 * GIB, 16 * GIB));
        let refused = allocator.alloc_bytes(MIB, &one).unwrap_err();
        assert_eq!(refused.report().unwrap().refusal, Some(Refusal::Device));
        drop(held);
        let left = if options.is_empty() { 0 } else { 16 * GIB };
        assert_eq!(allocator.empty_cache().unwrap(), 16 * GIB - left);
        assert_eq!(sim.held_bytes(), left);
        drop(allocator);
        assert_eq!(sim.held_bytes(), 0, "it goes back with the allocator");
    }
}

#[test]
fn a_reserve_is_there_before_the_first_request_and_takes_few_calls() {
    let (sim, allocator) = open("24GiB", "reserve_mb:8192");
    let allocator = allocator.unwrap();
    assert_eq!((allocator.memory_reserved(), sim.held_bytes()), (8 * GIB, 8 * GIB));
    let created = || allocator.device().driver_calls().of(aquifer_device::Operation::CreatePhysical);
    let before = created();
    sim.set_other_process_bytes(16 * GIB);
    let stream = allocator.device().default_stream();
    let _blocks = [3 * GIB, 4 * GIB, 100 * MIB].map(|bytes| allocator.alloc_bytes(bytes, stream).unwrap());
    assert!(created() - before <= 40, "frames are broken for the ends of blocks alone: {}", created() - before);
    assert_eq!(sim.held_bytes(), 8 * GIB);
}

#[test]
fn a_reserve_that_is_not_there_is_an_error_that_says_what_refused_it() {
    let refused = |device: &str, options: &str| {
        let (sim, allocator) = open(device, options);
        let error = allocator.unwrap_err();
        assert_eq!(sim.held_bytes(), 0, "{error}");
        let report = error.report().unwrap_or_else(|| panic!("{error}")).clone();
        assert!(report.is_reserve && error.to_string().contains("for: the reserve (reserve_mb)"), "{error}");
        (report.refusal.unwrap(), report.requested)
    };
    assert_eq!(refused("16GiB,other=4GiB", "reserve_mb:13000"), (Refusal::Device, 13000 * MIB));
    assert_eq!(refused("16GiB", "reserve_mb:17000"), (Refusal::Device, 17000 * MIB));
    assert_eq!(refused("16GiB", "reserve_mb:8000,limit_mb:7000"), (Refusal::Limit, 8000 * MIB));
    assert_eq!(refused("16GiB", "reserve_mb:8000,headroom_mb:9000"), (Refusal::Headroom, 8000 * MIB));
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
    let block = pool.alloc_bytes(300 * MIB, &stream).unwrap();
    let large = allocator.alloc_bytes(400 * MIB, &stream).unwrap();
    assert!(sim.held_bytes() >= 800 * MIB);
    drop((block, large, exportable));
    pool.empty_cache().unwrap();
    allocator.trim_to(100 * MIB).unwrap();
    assert_eq!((allocator.memory_reserved(), sim.held_bytes()), (512 * MIB, 512 * MIB));
    // What the private pool had serves others.
    sim.set_other_process_bytes(512 * MIB);
    let whole = allocator.alloc_bytes(512 * MIB, &stream).unwrap();
    drop(whole);
    let other = Allocator::new(allocator.device(), "").unwrap();
    assert!(other.alloc_bytes(100 * MIB, &stream).is_err(), "another allocator gets none of it");
    assert_eq!(sim.held_bytes(), 512 * MIB);
}

/// The memory of a part that sleeps serves the rest, and waking up finds its memory.
#[test]
fn the_reserve_stays_while_memory_sleeps() {
    let (sim, allocator) = open("150MiB", "reserve_mb:150");
    let allocator = allocator.unwrap();
    let stream = allocator.device().stream().unwrap();
    let weights = allocator.alloc_bytes(37 * MIB, &stream).unwrap();
    let cache = {
        let _tag = TagScope::new("cache");
        allocator.alloc_bytes(75 * MIB, &stream).unwrap()
    };
    stream.fill(weights.ptr(), 7, weights.bytes()).unwrap();
    stream.fill(cache.ptr(), 8, cache.bytes()).unwrap();
    let holds = |bytes: u64, block: &aquifer_allocator::Allocation| {
        let mut byte = [0];
        stream.download_blocking(&mut byte, block.ptr()).unwrap();
        assert_eq!((sim.held_bytes(), u64::from(byte[0])), (150 * MIB, bytes));
    };
    assert_eq!(allocator.sleep(Contents::SaveToHost).unwrap(), 0);
    allocator.wake().unwrap();
    holds(7, &weights);
    assert_eq!(allocator.sleep(SleepOptions::part(Part::tag("cache"), Contents::SaveToHost)).unwrap(), 0);
    let training = allocator.alloc_bytes(100 * MIB, &stream).unwrap();
    assert_eq!(sim.held_bytes(), 150 * MIB);
    assert!(allocator.wake().is_err());
    drop(training);
    allocator.wake().unwrap();
    holds(8, &cache);
    assert_eq!(allocator.memory_reserved(), 150 * MIB);
}

//! Sleep saves and brings back live memory alone.

use std::thread;
use std::time::Duration;

use aquifer_device::{AccessKind, Device, HandleKind, Operation, Stream};
use aquifer_sim::{SimConfig, SimDriver};
use proptest::prelude::*;

use crate::{
    AllocError, Allocation, Allocator, Config, Contents, KeptBy, Part, PoolOptions, Reservation, SleepOptions, TagScope,
};

const MIB: u64 = 1 << 20;

struct Sieve {
    device: Device,
    allocator: Allocator,
    stream: Stream,
    live: Vec<Allocation>,
}

/// Blocks of 2 MiB in frames of several granules, of which one in eight stays alive.
fn sieve() -> Sieve {
    let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
    let allocator = Allocator::new(&device, Config { frame: Some(16 * MIB), ..Config::default() }).unwrap();
    let stream = device.stream().unwrap();
    drop(allocator.alloc_bytes(800 * MIB, &stream).unwrap());
    let blocks: Vec<_> = (0..400).map(|_| allocator.alloc_bytes(2 * MIB, &stream).unwrap()).collect();
    let live: Vec<_> = blocks.into_iter().step_by(8).collect();
    for (block, byte) in live.iter().zip(0..) {
        stream.fill(block.ptr(), byte, block.bytes()).unwrap();
    }
    Sieve { device, allocator, stream, live }
}

impl Sieve {
    fn assert_contents(&self) {
        for (block, byte) in self.live.iter().zip(0u8..) {
            let mut found = vec![0; 2 << 20];
            self.stream.download_blocking(&mut found, block.ptr()).unwrap();
            assert!(found.iter().all(|&found| found == byte), "block {byte}");
        }
        self.device.assert_no_violations();
    }
}

#[test]
fn free_memory_is_neither_saved_nor_brought_back() {
    let sieve = sieve();
    sieve.allocator.empty_cache().unwrap();
    assert!(sieve.allocator.memory_reserved() > 200 * MIB, "frames of several granules are partly used");
    sieve.allocator.sleep(Contents::SaveToHost).unwrap();
    let copied = sieve.device.driver_calls().of(Operation::CopyToHost);
    assert!(copied <= 50, "{copied} copies for 50 live blocks");
    sieve.allocator.wake().unwrap();
    assert_eq!(sieve.allocator.memory_reserved(), 100 * MIB);
    sieve.assert_contents();
    let large = sieve.allocator.alloc_bytes(800 * MIB, &sieve.stream).unwrap();
    sieve.stream.fill(large.ptr(), 1, large.bytes()).unwrap();
    sieve.assert_contents();
}

#[test]
fn waking_up_needs_no_memory_for_blocks_dropped_meanwhile() {
    let mut sieve = sieve();
    sieve.allocator.sleep(Contents::SaveToHost).unwrap();
    let elsewhere = Allocator::new(&sieve.device, Config::default()).unwrap();
    let most = elsewhere.alloc_bytes(940 * MIB, &sieve.stream).unwrap();
    let refused = sieve.allocator.wake().unwrap_err().to_string();
    assert!(refused.contains("needs 100.00 MiB") && refused.contains("has 84.00 MiB free"), "{refused}");
    sieve.live.truncate(40);
    sieve.allocator.wake().unwrap();
    assert_eq!(sieve.allocator.memory_reserved(), 80 * MIB);
    sieve.assert_contents();
    drop(most);
}

#[test]
fn memory_that_a_graph_may_use_is_brought_back() {
    let sieve = sieve();
    let pool = sieve.allocator.create_pool(PoolOptions::default()).unwrap();
    let input = pool.alloc_bytes(2 * MIB, &sieve.stream).unwrap();
    let graph = {
        let capture = sieve.stream.begin_capture().unwrap();
        let route = sieve.allocator.capture(&sieve.stream, &pool).unwrap();
        let scratch = sieve.allocator.alloc_bytes(6 * MIB, &sieve.stream).unwrap();
        sieve.stream.fill(scratch.ptr(), 5, 6 * MIB).unwrap();
        sieve.stream.copy(input.ptr(), scratch.ptr(), 2 * MIB).unwrap();
        drop((scratch, route));
        capture.end().unwrap()
    };
    sieve.allocator.sleep(Contents::SaveToHost).unwrap();
    sieve.allocator.wake().unwrap();
    graph.launch(&sieve.stream).unwrap();
    let mut found = vec![0; 2 << 20];
    sieve.stream.download_blocking(&mut found, input.ptr()).unwrap();
    assert!(found.iter().all(|&byte| byte == 5));
    sieve.assert_contents();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    /// Programs that allocate and drop, also while the allocator sleeps, keep their contents over
    /// any number of sleeps, and give everything back.
    #[test]
    fn contents_survive_any_number_of_sleeps(
        steps in prop::collection::vec((0..8u8, 1..5 * MIB, any::<prop::sample::Index>()), 1..120),
    ) {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let streams = [device.stream().unwrap(), device.stream().unwrap()];
        let mut live: Vec<(Allocation, u8)> = Vec::new();
        let mut next = 0;
        for (what, bytes, which) in steps {
            match what {
                0..=3 => {
                    let stream = &streams[which.index(2)];
                    let block = allocator.alloc_bytes(bytes, stream).unwrap();
                    stream.fill(block.ptr(), next, bytes).unwrap();
                    live.push((block, next));
                    next = next.wrapping_add(1);
                }
                4..=6 if !live.is_empty() => drop(live.swap_remove(which.index(live.len()))),
                7 => {
                    allocator.sleep(Contents::SaveToHost).unwrap();
                    prop_assert_eq!(allocator.memory_reserved(), 0);
                    (0..which.index(live.len() + 1)).for_each(|at| drop(live.swap_remove(at % live.len())));
                    allocator.wake().unwrap();
                }
                _ => {}
            }
        }
        device.synchronize().unwrap();
        for (block, byte) in &live {
            let mut found = vec![0; usize::try_from(block.bytes()).unwrap()];
            streams[0].download_blocking(&mut found, block.ptr()).unwrap();
            prop_assert!(found.iter().all(|found| found == byte));
        }
        drop(live);
        allocator.empty_cache().unwrap();
        prop_assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (0, 0));
        device.assert_no_violations();
    }
}

#[test]
fn what_stays_awake_is_named_before_the_sleep_and_after_it() {
    let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
    let allocator = Allocator::new(&device, Config { frame: Some(16 * MIB), ..Config::default() }).unwrap();
    let stream = device.stream().unwrap();
    let apart = allocator.create_pool(PoolOptions { no_split: true, ..PoolOptions::default() }).unwrap();
    let _scope = TagScope::new("weights");
    drop(allocator.alloc_bytes(400 * MIB, &stream).unwrap());
    // Its first frame is shared with an allocation of another tag, and its last one has a pin.
    let other = {
        let _scope = TagScope::new("cache");
        allocator.alloc_bytes(2 * MIB, &stream).unwrap()
    };
    let block = allocator.alloc_bytes(100 * MIB, &stream).unwrap();
    let pinned = allocator.alloc_bytes(2 * MIB, &stream).unwrap();
    let pin = allocator.pin_mapping(&pinned).unwrap();
    let segment = apart.alloc_bytes(20 * MIB, &stream).unwrap();
    let exported = allocator.alloc_exportable(4 * MIB, HandleKind::PosixFd, &stream).unwrap();
    let of_part = SleepOptions::part(Part::tag("weights"), Contents::Discard);
    let named = || {
        let all = allocator.staying_awake(of_part.clone());
        assert!(all.iter().all(|one| one.tag.as_deref() == Some("weights")), "{all:?}");
        let bytes = |why| all.iter().filter(|one| one.why == why).map(|one| one.range.end - one.range.start).sum();
        [KeptBy::Pin, KeptBy::Export, KeptBy::Segment, KeptBy::SharedFrame].map(|why| -> u64 { bytes(why) })
    };
    let [by_pin, by_export, by_segment, by_frame] = named();
    assert_eq!((by_export, by_segment), (4 * MIB, segment.bytes()));
    assert!(by_pin >= pinned.bytes() && by_frame > 0, "{by_pin}, {by_frame}");
    let slept = allocator.sleep(of_part.clone()).unwrap();
    assert!(slept > 0 && slept + by_pin + by_frame >= block.bytes() + pinned.bytes(), "{slept}");
    assert_eq!(named(), [by_pin, by_export, by_segment, by_frame]);
    allocator.wake().unwrap();
    // If all sleeps, no frame is shared with memory that does not.
    let all = allocator.staying_awake(Contents::Discard);
    assert!(!all.is_empty() && all.iter().all(|one| one.why != KeptBy::SharedFrame), "{all:?}");
    drop(pin);
    let text = allocator.staying_awake(Contents::Discard).iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!(text.len() == 2 && text.iter().all(|one| one.contains("tagged \"weights\": ")), "{text:?}");
    drop((other, exported));
}

#[test]
fn a_forgotten_guard_keeps_its_allocator_awake_and_no_later_one() {
    let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let stream = device.stream().unwrap();
    let storage = allocator.alloc_storage(MIB, 1, &stream).unwrap();
    let reservation = Reservation::acquire(&storage, AccessKind::Write).unwrap();
    std::mem::forget(reservation.access(&stream).unwrap());
    drop(reservation);
    let Err(AllocError::KeptAwake(by)) = allocator.sleep(Contents::Discard) else { panic!("it sleeps") };
    assert_eq!((by.access_guards, by.reservations, by.is_this_thread), (1, 0, true));
    drop((storage, allocator));
    for _ in 0..2 {
        Allocator::new(&device, Config::default()).unwrap().sleep(Contents::Discard).unwrap();
    }
}

#[test]
fn a_sleep_that_gives_up_ends_no_other_ones_wait() {
    let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let awake = allocator.keep_awake().unwrap();
    let patient = SleepOptions::all(Contents::Discard).waiting(Duration::from_secs(600));
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| allocator.sleep(patient));
        let refuses = || {
            while !allocator.is_asleep() {
                assert!(!sleeper.is_finished(), "newcomers are served while it waits");
                thread::yield_now();
            }
        };
        refuses();
        allocator.sleep(Contents::Discard).unwrap_err();
        refuses();
        drop(awake);
        sleeper.join().unwrap().unwrap();
    });
}

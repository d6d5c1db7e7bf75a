//! Parts sleep while the rest is in use.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_device::{AccessKind, Code, Device, Stream};
use aquifer_sim::{Fault, Preset, SimConfig, SimDriver};
use proptest::prelude::*;

use crate::{
    AccessGuard, AllocError, Allocation, Allocator, Contents, Part, PoolOptions, Reservation, SleepOptions, Storage,
    TagScope,
};

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 1 << 30;

struct Setup {
    sim: Arc<SimDriver>,
    device: Device,
    allocator: Allocator,
    stream: Stream,
}

fn setup_with(config: SimConfig, options: &str) -> Setup {
    let sim = SimDriver::new(config);
    let device = Device::new(sim.clone());
    let allocator = Allocator::new(&device, options).unwrap();
    let stream = device.stream().unwrap();
    Setup { sim, device, allocator, stream }
}

fn setup() -> Setup {
    setup_with(SimConfig::new(CAPACITY), "")
}

/// A number as a byte.
fn low(n: usize) -> u8 {
    u8::try_from(n % 251).unwrap()
}

/// A path at which there is no file.
fn path() -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("aquifer-sleep-{}-{number}", std::process::id()))
}

impl Setup {
    fn alloc(&self, tag: &str, bytes: u64, value: u8) -> Allocation {
        let _scope = TagScope::new(tag);
        let block = self.allocator.alloc_bytes(bytes, &self.stream).unwrap();
        self.stream.fill(block.ptr(), value, bytes).unwrap();
        block
    }

    fn bytes(&self, block: &Allocation) -> Vec<u8> {
        let mut found = vec![0; usize::try_from(block.bytes()).unwrap()];
        self.stream.download_blocking(&mut found, block.ptr()).unwrap();
        found
    }

    fn has(&self, block: &Allocation, value: u8) -> bool {
        self.bytes(block).iter().all(|&found| found == value)
    }

    fn sleeps(&self, block: &Allocation) -> bool {
        self.allocator.state().shared().sleeps(&block.range())
    }

    /// Asserts that nothing is left once all blocks are dropped.
    fn assert_returned(&self) {
        self.device.synchronize().unwrap();
        self.allocator.empty_cache().unwrap();
        assert_eq!((self.allocator.memory_allocated(), self.allocator.memory_reserved()), (0, 0));
        assert_eq!((self.sim.held_bytes(), self.allocator.sleeping_bytes()), (0, 0));
        assert!(self.allocator.state().shared().used_elsewhere() == 0);
        self.device.assert_no_violations();
    }
}

fn kv(contents: Contents) -> SleepOptions {
    SleepOptions::part(Part::tag("kv"), contents)
}

#[test]
fn a_tag_sleeps_while_the_rest_is_in_use() {
    let setup = setup();
    let Setup { allocator, stream, .. } = &setup;
    let weights = setup.alloc("weights", 100 * MIB, 1);
    let cache = setup.alloc("kv", 300 * MIB, 2);
    assert_eq!(allocator.sleep(kv(Contents::SaveToHost)).unwrap(), 300 * MIB);
    assert_eq!((allocator.memory_reserved(), setup.sim.held_bytes()), (100 * MIB, 100 * MIB));
    assert!(!allocator.is_asleep() && setup.sleeps(&cache) && !setup.sleeps(&weights));
    assert_eq!(allocator.sleep(kv(Contents::SaveToHost)).unwrap(), 0, "asleep already");
    // All memory that the device has left serves others, also of the same tag.
    let more = [setup.alloc("other", 500 * MIB, 3), setup.alloc("kv", 300 * MIB, 4)];
    assert!(setup.has(&more[0], 3) && setup.has(&more[1], 4) && setup.has(&weights, 1));
    let refused = allocator.wake_parts(&[Part::tag("kv")]).unwrap_err();
    assert!(refused.is_out_of_memory() && refused.to_string().contains("needs 300.00 MiB"), "{refused}");
    assert!(setup.has(&more[1], 4) && setup.sleeps(&cache));
    drop(more);
    allocator.wake_parts(&[Part::tag("weights")]).unwrap();
    assert!(setup.sleeps(&cache));
    allocator.empty_cache().unwrap();
    allocator.wake_parts(&[Part::tag("kv")]).unwrap();
    assert!(!setup.sleeps(&cache) && setup.has(&cache, 2) && setup.has(&weights, 1));
    stream.fill(cache.ptr(), 5, cache.bytes()).unwrap();
    drop((weights, cache));
    setup.assert_returned();
}

#[test]
fn access_to_a_part_that_sleeps_is_refused() {
    let setup = setup();
    let Setup { allocator, stream, .. } = &setup;
    let buffer = |tag| -> Arc<Storage> {
        let _scope = TagScope::new(tag);
        let buffer = allocator.alloc_storage(8 << 20, 1, stream).unwrap();
        stream.fill(buffer.ptr(), 1, 8 * MIB).unwrap();
        buffer
    };
    let (awake, asleep) = (buffer("weights"), buffer("kv"));
    let mut growable = {
        let _scope = TagScope::new("kv");
        allocator.growable(64 * MIB, stream).unwrap()
    };
    growable.grow_to(10 * MIB, stream).unwrap();
    let access = |buffer: &Arc<Storage>| AccessGuard::acquire(stream, &[(buffer, AccessKind::Read)]).map(drop);
    let both = || {
        let all = [(&awake, AccessKind::Read), (&asleep, AccessKind::Read)];
        AccessGuard::acquire(stream, &all).map(drop)
    };
    for buffer in [&awake, &asleep] {
        let _access = AccessGuard::acquire(stream, &[(buffer, AccessKind::Read)]).unwrap();
        let kept = allocator.sleep(kv(Contents::Discard)).unwrap_err();
        assert!(matches!(kept, AllocError::KeptAwake(_)), "{kept}");
    }
    assert_eq!(allocator.sleep(kv(Contents::SaveToHost)).unwrap(), 18 * MIB);
    for refused in [access(&asleep), both(), asleep.ready_on(stream), access(growable.storage())] {
        assert!(matches!(refused, Err(AllocError::Asleep)), "{refused:?}");
    }
    assert!(matches!(Reservation::acquire(&asleep, AccessKind::Read), Err(AllocError::Asleep)));
    for bytes in [5 * MIB, 20 * MIB] {
        assert!(matches!(growable.grow_to(bytes, stream), Err(AllocError::Asleep)));
    }
    access(&awake).unwrap();
    drop(allocator.keep_awake().unwrap());
    // A thread that keeps the allocator awake is refused there, too, and may wake it up.
    let held = AccessGuard::acquire(stream, &[(&awake, AccessKind::Write)]).unwrap();
    assert!(matches!(access(&asleep), Err(AllocError::Asleep)));
    allocator.wake_parts(&[Part::tag("kv")]).unwrap();
    access(&asleep).unwrap();
    drop(held);
    growable.grow_to(20 * MIB, stream).unwrap();
    both().unwrap();
    drop((awake, asleep, growable));
    setup.assert_returned();
}

#[test]
fn contents_have_a_fate_by_tag() {
    let setup = setup();
    let tags = ["host", "file", "zero", "lost"];
    let blocks: Vec<_> = tags.iter().zip(1..).map(|(tag, value)| setup.alloc(tag, 10 * MIB, value)).collect();
    let path = path();
    let options = SleepOptions::all(Contents::Discard)
        .with(Part::tag("host"), Contents::SaveToHost)
        .with(Part::tag("file"), Contents::SaveToFile(path.clone()))
        .with(Part::tag("zero"), Contents::Zero);
    setup.allocator.sleep(options.clone()).unwrap();
    assert_eq!((setup.allocator.memory_reserved(), std::fs::metadata(&path).unwrap().len()), (0, 10 * MIB));
    // What is awake then is as if the rest had been put to sleep alone.
    setup.allocator.wake_parts(&[Part::tag("host"), Part::tag("zero")]).unwrap();
    assert_eq!((setup.allocator.memory_reserved(), setup.allocator.is_asleep()), (20 * MIB, false));
    assert!(setup.has(&blocks[0], 1) && setup.has(&blocks[2], 0));
    assert!(setup.sleeps(&blocks[1]) && setup.sleeps(&blocks[3]));
    let more = setup.alloc("more", 50 * MIB, 9);
    assert!(setup.has(&more, 9));
    setup.allocator.wake().unwrap();
    assert!(setup.has(&blocks[1], 2) && !path.exists());
    drop((blocks, more));
    setup.assert_returned();
}

#[test]
fn a_file_that_cannot_be_written_leaves_everything_awake() {
    let setup = setup();
    let block = setup.alloc("kv", 30 * MIB, 1);
    let other = setup.alloc("", 3 * MIB, 2);
    let taken = path();
    std::fs::write(&taken, "of another program").unwrap();
    for path in [taken.clone(), taken.join("below a file")] {
        for options in [kv(Contents::SaveToFile(path.clone())), SleepOptions::all(Contents::SaveToFile(path.clone()))] {
            let refused = setup.allocator.sleep(options).unwrap_err();
            assert!(matches!(&refused, AllocError::SavedFile { path: of, .. } if *of == path), "{refused}");
            assert_eq!((setup.allocator.is_asleep(), setup.allocator.sleeping_bytes()), (false, 0));
            assert!(setup.has(&block, 1) && setup.has(&other, 2));
        }
    }
    assert_eq!(std::fs::read_to_string(&taken).unwrap(), "of another program");
    std::fs::remove_file(&taken).unwrap();
    // A file that lost its end is an error of waking up, and the memory sleeps on.
    let path = path();
    setup.allocator.sleep(kv(Contents::SaveToFile(path.clone()))).unwrap();
    let whole = std::fs::read(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
    for _ in 0..2 {
        assert!(matches!(setup.allocator.wake(), Err(AllocError::SavedFile { .. })));
        assert!(setup.sleeps(&block) && setup.has(&other, 2));
    }
    std::fs::write(&path, whole).unwrap();
    setup.allocator.wake().unwrap();
    assert!(setup.has(&block, 1) && !path.exists());
    setup.allocator.sleep(kv(Contents::SaveToFile(path.clone()))).unwrap();
    let Setup { device, allocator, stream, sim } = setup;
    drop((block, other, allocator, stream));
    crate::close_abandoned();
    assert!(!path.exists(), "it goes with the allocator");
    drop(device);
    assert_eq!(sim.held_bytes(), 0);
}

#[test]
fn blocks_that_share_a_granule_keep_it_in_place() {
    let setup = setup();
    let small: Vec<_> = (0..8).map(|n| setup.alloc(["weights", "kv"][n % 2], MIB / 4, low(n))).collect();
    let large = setup.alloc("kv", 6 * MIB, 9);
    assert_eq!(setup.allocator.sleep(kv(Contents::Discard)).unwrap(), 6 * MIB);
    assert!(small.iter().zip(0..).all(|(block, value)| !setup.sleeps(block) && setup.has(block, value)));
    setup.allocator.wake().unwrap();
    let all = kv(Contents::SaveToHost).with(Part::tag("weights"), Contents::SaveToHost);
    setup.allocator.sleep(all).unwrap();
    setup.allocator.wake_parts(&[Part::tag("weights")]).unwrap();
    assert!(small.iter().zip(0..).all(|(block, value)| !setup.sleeps(block) && setup.has(block, value)));
    assert!(setup.sleeps(&large));
    drop((small, large));
    assert_eq!(setup.allocator.memory_allocated(), 0);
    setup.allocator.wake().unwrap();
    setup.assert_returned();
}

#[test]
fn memory_beside_a_part_that_sleeps_is_not_handed_out() {
    let setup = setup();
    let small: Vec<_> = (0..400).map(|n| setup.alloc("kv", 9000, low(n))).collect();
    let (dropped, kept): (Vec<_>, Vec<_>) = small.into_iter().enumerate().partition(|(n, _)| n % 3 > 0);
    drop(dropped);
    setup.allocator.sleep(kv(Contents::SaveToHost)).unwrap();
    let others: Vec<_> = (0..400).map(|n| setup.alloc("other", 9000, low(n))).collect();
    assert!(others.iter().all(|block| !setup.sleeps(block)));
    // Blocks that are given back asleep are not handed out either, on any thread.
    let (dropped, kept): (Vec<_>, Vec<_>) = kept.into_iter().partition(|(n, _)| n % 2 > 0);
    let (here, there) = dropped.into_iter().partition::<Vec<_>, _>(|(n, _)| n % 4 > 1);
    drop(here);
    std::thread::spawn(move || drop(there)).join().unwrap();
    let more: Vec<_> = (0..400).map(|n| setup.alloc("kv", 9000, low(n))).collect();
    assert!(more.iter().all(|block| !setup.sleeps(block)));
    setup.allocator.wake().unwrap();
    assert!(kept.iter().all(|(n, block)| setup.has(block, low(*n))));
    assert!(others.iter().chain(&more).zip((0..400).chain(0..400)).all(|(block, n)| setup.has(block, low(n))));
    drop((kept, others, more));
    setup.assert_returned();
}

#[test]
fn a_pool_sleeps_with_what_its_graphs_use() {
    let setup = setup();
    let Setup { allocator, stream, .. } = &setup;
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    let input = pool.alloc_bytes(2 * MIB, stream).unwrap();
    let graph = {
        let capture = stream.begin_capture().unwrap();
        let route = allocator.capture(stream, &pool).unwrap();
        let scratch = allocator.alloc_bytes(6 * MIB, stream).unwrap();
        stream.fill(scratch.ptr(), 5, 6 * MIB).unwrap();
        stream.copy(input.ptr(), scratch.ptr(), 2 * MIB).unwrap();
        drop((scratch, route));
        capture.end().unwrap()
    };
    let outside = setup.alloc("", 20 * MIB, 1);
    let options = SleepOptions::part(Part::pool(&pool), Contents::SaveToHost);
    assert_eq!(allocator.sleep(options.clone()).unwrap(), 8 * MIB);
    // The pool goes on serving requests, from other memory.
    let more = pool.alloc_bytes(6 * MIB, stream).unwrap();
    stream.fill(more.ptr(), 7, 6 * MIB).unwrap();
    assert!(setup.has(&more, 7) && setup.has(&outside, 1) && !setup.sleeps(&more));
    allocator.wake_parts(&[Part::tag("none of these")]).unwrap();
    assert!(setup.sleeps(&input));
    for _ in 0..3 {
        allocator.wake_parts(&[Part::pool(&pool)]).unwrap();
        graph.launch(stream).unwrap();
        assert!(setup.has(&input, 5) && setup.has(&more, 7));
        allocator.sleep(options.clone()).unwrap();
    }
    drop(pool);
    allocator.wake().unwrap();
    graph.launch(stream).unwrap();
    assert!(setup.has(&input, 5));
    setup.device.synchronize().unwrap();
    drop((graph, input, more, outside));
    setup.device.synchronize().unwrap();
    setup.assert_returned();
}

#[test]
fn what_a_pool_lent_is_no_part_of_it() {
    for contents in [Contents::Discard, Contents::Zero, Contents::SaveToHost] {
        let setup = setup_with(SimConfig::new(64 * MIB), "frame_mb:2");
        let Setup { allocator, stream, .. } = &setup;
        let pool = allocator.create_pool(PoolOptions { use_on_oom: true, ..PoolOptions::default() }).unwrap();
        let own = pool.alloc_bytes(4 * MIB, stream).unwrap();
        drop(pool.alloc_bytes(26 * MIB, stream).unwrap());
        let rest = setup.alloc("", 30 * MIB, 1);
        let lent = setup.alloc("", 20 * MIB, 7);
        let options = SleepOptions::part(Part::pool(&pool), contents.clone());
        let kept = allocator.staying_awake(options.clone());
        assert!(kept.iter().all(|one| one.range.start < lent.ptr().0), "{contents:?}: {kept:?}");
        assert_eq!(allocator.sleep(options.clone()).unwrap(), 10 * MIB, "what is left of it, too: {contents:?}");
        assert!(setup.sleeps(&own) && !setup.sleeps(&lent) && setup.has(&lent, 7), "{contents:?}");
        allocator.wake_parts(&[Part::pool(&pool)]).unwrap();
        assert!(!setup.sleeps(&own) && setup.has(&lent, 7), "{contents:?}");
        // All of it sleeps, and the pool has another fate than the rest.
        let all = SleepOptions::all(Contents::SaveToHost).with(Part::pool(&pool), contents.clone());
        allocator.sleep(all).unwrap();
        allocator.wake().unwrap();
        assert!(setup.has(&lent, 7) && setup.has(&rest, 1), "{contents:?}");
        // Once it is given back it is the pool's again.
        drop((lent, rest));
        let again = pool.alloc_bytes(26 * MIB, stream).unwrap();
        allocator.sleep(options).unwrap();
        assert!(setup.sleeps(&again));
        allocator.wake().unwrap();
        drop((own, again, pool));
        setup.assert_returned();
    }
}

#[test]
fn what_was_freed_while_a_part_slept_is_not_brought_back() {
    for options in ["", "quarantine_mb:0"] {
        let setup = setup_with(SimConfig::new(CAPACITY), options);
        let [freed, kept] = [("kv", 1), ("kv", 2)].map(|(tag, value)| setup.alloc(tag, 8 * MIB, value));
        setup.allocator.sleep(kv(Contents::SaveToHost)).unwrap();
        drop(freed);
        setup.allocator.wake().unwrap();
        assert_eq!(setup.allocator.memory_reserved(), 8 * MIB, "{options}");
        assert!(setup.has(&kept, 2));
        drop(kept);
        setup.assert_returned();
    }
}

#[test]
fn a_thousand_cycles_leave_nothing_behind() {
    let setup = setup();
    let blocks: Vec<_> = (0..6).map(|n| setup.alloc(["weights", "kv"][n % 2], 2 * MIB, low(n))).collect();
    let keeps = |setup: &Setup| {
        let shared = setup.allocator.state().shared();
        let asleep = shared.paged().sleep.addresses().len();
        let lists = (asleep, shared.used_elsewhere(), shared.waiting().is_empty());
        drop(shared);
        let sim = &setup.sim;
        (setup.allocator.memory_reserved(), sim.held_bytes(), format!("{:?}", sim.live_objects()), lists)
    };
    let mut after_ten = None;
    for cycle in 1..=1000 {
        let options = if cycle % 3 == 0 { SleepOptions::all(Contents::Zero) } else { kv(Contents::Zero) };
        setup.allocator.sleep(options.with(Part::tag("weights"), Contents::SaveToHost)).unwrap();
        setup.allocator.wake_parts(&[Part::tag("weights")]).unwrap();
        drop(setup.alloc("", MIB, 0));
        setup.allocator.wake().unwrap();
        if cycle == 10 {
            after_ten = Some(keeps(&setup));
        }
    }
    assert_eq!(after_ten, Some(keeps(&setup)));
    assert!(blocks.iter().zip(0..).all(|(block, n)| setup.has(block, if n % 2 == 0 { n } else { 0 })));
    drop(blocks);
    setup.assert_returned();
}

#[test]
fn no_failing_call_loses_a_part() {
    let (mut undone, mut asleep, mut woken) = (0, 0, 0);
    for second in [None, Some(1), Some(4)] {
        for nth in 1.. {
            let setup = setup();
            let weights = setup.alloc("weights", 5 * MIB, 1);
            let cache: Vec<_> = (0..9).map(|n| setup.alloc("kv", 3 * MIB - n * 70_000, 2)).collect();
            let first = setup.sim.calls_made();
            for nth in [Some(nth), second.map(|after| nth + after)].into_iter().flatten() {
                setup.sim.inject(Fault::Nth { operation: None, nth, code: Code(999) });
            }
            let path = path();
            let contents = if nth % 2 == 0 { Contents::SaveToHost } else { Contents::SaveToFile(path.clone()) };
            let slept = setup.allocator.sleep(kv(contents));
            let sleeps = setup.allocator.sleeping_bytes() > 0;
            assert!(slept.is_err() || sleeps);
            (undone, asleep) = (undone + u64::from(!sleeps), asleep + u64::from(slept.is_err() && sleeps));
            woken += u64::from(setup.allocator.wake_parts(&[Part::tag("kv")]).is_err());
            let calls = setup.sim.calls_made() - first;
            setup.sim.clear_faults();
            assert!(setup.has(&weights, 1));
            assert!(setup.allocator.memory_reserved() >= setup.sim.held_bytes());
            let more = setup.alloc("kv", 2 * MIB, 3);
            setup.allocator.wake_parts(&[Part::tag("kv")]).unwrap();
            assert_eq!((setup.allocator.sleeping_bytes(), path.exists()), (0, false));
            assert!(cache.iter().all(|block| setup.has(block, 2)) && setup.has(&more, 3));
            drop((weights, cache, more));
            setup.assert_returned();
            if nth > calls {
                break;
            }
        }
    }
    assert!(undone > 10 && asleep > 0 && woken > 10, "{undone} {asleep} {woken}");
}

/// In virtual time, of which a copy engine is busy nearly all that sleep needs more to keep
/// contents.
#[test]
fn contents_move_as_fast_as_the_link() {
    let setup = setup_with(SimConfig::preset(Preset::H100), "");
    let block = setup.alloc("", 512 * MIB, 7);
    let timed = |contents: Contents| {
        setup.device.synchronize().unwrap();
        let (start, before) = (setup.sim.now_ns(), setup.sim.engines());
        setup.allocator.sleep(contents).unwrap();
        let slept = setup.sim.now_ns();
        setup.allocator.wake().unwrap();
        let (woken, after) = (setup.sim.now_ns(), setup.sim.engines());
        let busy = [after.to_host_busy_ns - before.to_host_busy_ns, after.to_device_busy_ns - before.to_device_busy_ns];
        ([slept - start, woken - slept], busy)
    };
    // The first sleep also gives unused memory back, and pins memory.
    timed(Contents::SaveToHost);
    let (took, busy) = timed(Contents::SaveToHost);
    assert!(setup.has(&block, 7));
    let (without, _) = timed(Contents::Discard);
    for at in 0..2 {
        let copying = took[at] - without[at];
        assert!(copying * 95 <= busy[at] * 100, "{copying} ns of {took:?}, and the link needs {busy:?}");
    }
    setup.allocator.empty_cache().unwrap();
    drop(block);
    setup.assert_returned();
    assert_eq!(setup.sim.live_objects().host, 0);
}

/// What a block may contain.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    Value(u8),
    /// The value, or zeros, byte by byte.
    OrZeros(u8),
    Anything,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    /// Programs of several tags of which parts and the whole sleep and wake up.
    #[test]
    fn parts_sleep_and_wake_in_any_order(
        options in prop::sample::select(vec!["", "quarantine_mb:0"]),
        steps in prop::collection::vec((0..14u8, 0..3usize, 1..40u64, any::<prop::sample::Index>()), 1..90),
    ) {
        const TAGS: [&str; 3] = ["a", "b", "c"];
        let setup = setup_with(SimConfig::new(CAPACITY), options);
        let side = setup.device.stream().unwrap();
        let mut live: Vec<(usize, Allocation, Expected)> = Vec::new();
        let mut next = 0_u8;
        for (what, tag, size, which) in steps {
            let part = Part::tag(TAGS[tag]);
            match what {
                0..=5 => {
                    // Small ones that share granules, and large ones.
                    let bytes = if what < 3 { size * 20_000 } else { size * 110_000 };
                    next = next.wrapping_add(1);
                    let _scope = TagScope::new(TAGS[tag]);
                    let stream = if what % 2 == 0 { &setup.stream } else { &side };
                    match setup.allocator.alloc_bytes(bytes, stream) {
                        Ok(block) => {
                            prop_assert!(!setup.sleeps(&block));
                            stream.fill(block.ptr(), next, bytes).unwrap();
                            live.push((tag, block, Expected::Value(next)));
                        }
                        Err(error) => prop_assert!(matches!(error, AllocError::Asleep) && setup.allocator.is_asleep()),
                    }
                }
                6..=8 if !live.is_empty() => {
                    let (_, block, _) = live.swap_remove(which.index(live.len()));
                    if what == 6 {
                        std::thread::scope(|scope| drop(scope.spawn(move || drop(block)).join()));
                    } else if what == 7 {
                        block.record_stream(&side).unwrap();
                    }
                }
                9 | 10 => {
                    let contents = match which.index(4) {
                        0 => Contents::Discard,
                        1 => Contents::Zero,
                        2 => Contents::SaveToHost,
                        _ => Contents::SaveToFile(path()),
                    };
                    let awake: Vec<bool> = live.iter().map(|(_, block, _)| !setup.sleeps(block)).collect();
                    let is_all = what == 10 && size % 2 == 0;
                    let options = if is_all {
                        SleepOptions::all(Contents::SaveToHost).with(part, contents.clone())
                    } else {
                        SleepOptions::part(part, contents.clone())
                    };
                    setup.allocator.sleep(options).unwrap();
                    for ((of, block, expected), was_awake) in live.iter_mut().zip(awake) {
                        if *of == tag && was_awake && setup.sleeps(block) {
                            *expected = match (&contents, *expected) {
                                (Contents::Discard, _) | (Contents::Zero, Expected::Anything) => Expected::Anything,
                                (Contents::Zero, Expected::Value(value)) => Expected::OrZeros(value),
                                (_, before) => before,
                            };
                        } else if !is_all && was_awake {
                            prop_assert!(*of == tag || !setup.sleeps(block), "another tag sleeps");
                        }
                    }
                }
                11 | 12 => {
                    setup.allocator.wake_parts(&[part]).unwrap();
                    prop_assert!(live.iter().all(|(of, block, _)| *of != tag || !setup.sleeps(block)));
                }
                13 => {
                    setup.allocator.wake().unwrap();
                    prop_assert_eq!(setup.allocator.sleeping_bytes(), 0);
                }
                _ => {}
            }
            prop_assert_eq!(setup.allocator.memory_reserved(), setup.sim.held_bytes());
            if which.index(4) == 0 {
                setup.device.synchronize().unwrap();
                for (_, block, expected) in live.iter().filter(|(_, block, _)| !setup.sleeps(block)) {
                    let fits = |&byte: &u8| match *expected {
                        Expected::Value(value) => byte == value,
                        Expected::OrZeros(value) => byte == value || byte == 0,
                        Expected::Anything => true,
                    };
                    let is_as_expected = *expected == Expected::Anything || setup.bytes(block).iter().all(fits);
                    prop_assert!(is_as_expected, "{:?}", expected);
                }
            }
        }
        setup.allocator.wake().unwrap();
        drop(live);
        setup.assert_returned();
    }
}

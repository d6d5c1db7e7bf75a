//! Programs whose iterations repeat stop changing mappings.

use std::path::{Path, PathBuf};

use aquifer_tests::prelude::*;
use aquifer_trace::input::{self, Event, Program};

/// Plays a program. Calls `iterates` where an iteration begins.
fn play(program: &Program, allocator: &Allocator, iterates: &mut impl FnMut()) {
    let streams: Vec<Stream> = program.streams.iter().map(|_| allocator.device().stream().unwrap()).collect();
    let mut slots: Vec<Option<Allocation>> = (0..program.slots).map(|_| None).collect();
    for event in &program.events {
        match *event {
            Event::Alloc { slot, bytes, stream } => {
                slots[slot as usize] = Some(allocator.alloc_bytes(bytes, &streams[usize::from(stream)]).unwrap());
            }
            Event::Free { slot } => slots[slot as usize] = None,
            Event::RecordStream { slot, stream } => {
                let block = slots[slot as usize].as_ref().unwrap();
                block.record_stream(&streams[usize::from(stream)]).unwrap();
            }
            Event::Iteration(_) => iterates(),
        }
    }
}

/// Plays a program once; returns the mapping calls of each iteration. The start counts as one.
fn mapping_calls(program: &Program) -> Vec<u64> {
    let driver = Subject::new(80 * GIB);
    let device = driver.device();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let calls = || {
        let calls = device.driver_calls();
        [Operation::CreatePhysical, Operation::Map, Operation::Unmap, Operation::SetAccess].map(|one| calls.of(one))
    };
    let (mut counts, mut before) = (Vec::new(), calls().iter().sum::<u64>());
    let mut count = || {
        let now = calls().iter().sum::<u64>();
        counts.push(now - std::mem::replace(&mut before, now));
    };
    play(program, &allocator, &mut count);
    count();
    driver.assert_no_violation();
    counts
}

/// Mapping calls by iteration.
fn calls_by_iteration(path: &Path) -> Vec<u64> {
    let programs = input::load(path).unwrap_or_else(|error| panic!("{error}"));
    let counts = mapping_calls(&programs[0]);
    println!("{}: mapping calls by iteration {counts:?}", programs[0].name);
    assert!(counts.len() > 4, "too few iterations: {counts:?}");
    counts
}

/// Mapping calls after the third iteration, for 1000 of those up to there.
fn calls_when_steady(path: &Path) -> u64 {
    let counts = calls_by_iteration(path);
    let (first, steady) = counts.split_at(4);
    (1000 * steady.iter().sum::<u64>()).div_ceil(first.iter().sum())
}

#[test]
fn a_program_that_repeats_hardly_maps() {
    for file in ["../stress/testdata/gpt2_fp32", "../stress/testdata/vit_l16", "testdata/llama1b_ckpt"] {
        let counts = calls_by_iteration(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("{file}.trace.gz")));
        // What comes before the first iteration counts as one. Two repeats follow the first
        // iteration.
        let first: u64 = counts[..4].iter().sum();
        assert!(counts[4..].iter().all(|&calls| calls < first / 100), "{file}: {counts:?}");
    }
}

/// It records few events, so the host seldom knows what is done.
#[test]
fn a_program_of_few_operations_buys_what_it_would_move_in_each_pass() {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/grow_22lines.trace");
    let mut program = input::load(&file).unwrap_or_else(|error| panic!("{error}")).remove(0);
    program.events = program.events.repeat(64);
    let driver = Subject::new(192 * GIB);
    let allocator = Allocator::new(&driver.device(), Config::default()).unwrap();
    play(&program, &allocator, &mut || ());
    let stats = allocator.stats();
    let (held, requested) = (stats.reserved_bytes.all.peak, stats.requested_bytes.all.peak);
    assert!(held <= requested + requested / 4, "{held} held for {requested}");
    let remaps = stats.remaps;
    play(&program, &allocator, &mut || ());
    let later = allocator.stats().remaps - remaps;
    assert!(later < 32, "{later} remaps in 64 passes more");
    driver.assert_no_violation();
}

/// Blocks of the program below.
const COUNT: u64 = 100;

/// A program whose blocks of random sizes are replaced one by one.
struct Unsettled<'a> {
    bench: &'a Bench,
    blocks: Vec<Allocation>,
    next: Box<dyn FnMut(u64) -> u64>,
}

impl Unsettled<'_> {
    fn new(bench: &Bench) -> Unsettled<'_> {
        let mut program = Unsettled { bench, blocks: Vec::new(), next: Box::new(random::draws(7)) };
        (0..COUNT).for_each(|_| program.grow());
        program
    }

    fn grow(&mut self) {
        let block = self.bench.alloc(MIB / 2 + (self.next)(512 * MIB));
        self.blocks.push(block);
    }

    /// Replaces so many blocks. Returns the remaps of that.
    fn replace(&mut self, count: usize) -> u64 {
        let before = self.bench.allocator.stats().remaps;
        for _ in 0..count {
            let replaced = usize::try_from((self.next)(COUNT)).unwrap();
            drop(self.blocks.swap_remove(replaced));
            self.grow();
        }
        self.bench.allocator.stats().remaps - before
    }
}

#[test]
fn a_program_that_never_settles_buys_what_it_would_move() {
    let bench = Bench::new(80 * GIB, "");
    let mut program = Unsettled::new(&bench);
    let remaps: Vec<u64> = (0..4).map(|_| program.replace(1000)).collect();
    println!("remaps {remaps:?}");
    assert!(remaps[0] > 20 && remaps[3] < remaps[0] / 2, "{remaps:?}");
    let stats = bench.allocator.stats();
    let (reserved, in_use) = (stats.reserved_bytes.all.peak, stats.allocated_bytes.all.peak);
    assert!(reserved > in_use + in_use / 24 && reserved < in_use + in_use / 3, "{reserved} for {in_use}");
    drop(program);
    bench.assert_returned();
}

#[test]
fn memory_that_goes_back_is_not_bought_again_at_once() {
    let ways: [fn(&Allocator); 3] = [
        |allocator| allocator.empty_cache().map(drop).unwrap(),
        |allocator| {
            allocator.sleep(SleepOptions::all(Contents::Discard)).unwrap();
            allocator.wake().unwrap();
            allocator.empty_cache().unwrap();
        },
        |allocator| {
            allocator.set_limit(Some(allocator.memory_reserved()));
            allocator.set_limit(None);
            allocator.empty_cache().unwrap();
        },
    ];
    for (way, clear) in ways.into_iter().enumerate() {
        let bench = Bench::new(80 * GIB, "");
        let mut program = Unsettled::new(&bench);
        program.replace(3000);
        let held = bench.allocator.memory_reserved();
        let settled = program.replace(1000);
        clear(&bench.allocator);
        let again = program.replace(1000);
        println!(
            "way {way}: {settled} remaps, then {again}; {held} bytes held, then {}",
            bench.allocator.memory_reserved()
        );
        assert!(again > settled.max(2), "way {way}: {settled} remaps, then {again}");
        assert!(bench.allocator.memory_reserved() < held, "way {way}");
        drop(program);
        bench.assert_returned();
    }
}

#[test]
fn programs_on_a_nearly_full_device_get_granules_until_there_is_room() {
    let bench = Bench::new(64 * GIB, "");
    bench.driver.set_other_process_bytes(63 * GIB);
    let created_for = |bytes: u64| {
        let before = bench.calls(Operation::CreatePhysical);
        (bench.alloc(bytes), bench.calls(Operation::CreatePhysical) - before)
    };
    let _most: Vec<_> = (0..8).map(|_| created_for(100 * MIB)).collect();
    let (_low, created) = created_for(60 * MIB);
    assert!(created >= 30, "{created} frames for 30 granules");
    bench.driver.set_other_process_bytes(0);
    let (_high, created) = created_for(60 * MIB);
    assert!(created <= 4, "{created} frames");
}

/// Mapping calls, and granules moved, in each epoch of a training program whose batches vary in
/// length, but are the same in every epoch.
fn calls_by_epoch(bench: &Bench, epochs: usize) -> Vec<(u64, u64)> {
    let mut next = random::draws(7);
    let lengths: Vec<u64> = (0..16).map(|_| 300 + next(212)).collect();
    let weights: Vec<Allocation> = (0..64).map(|_| bench.alloc(48 * MIB)).collect();
    let counts = (0..epochs).map(|_| {
        let so_far = || (mapping_calls_so_far(bench), bench.allocator.stats().granules_moved);
        let before = so_far();
        lengths.iter().for_each(|&length| train_batch(bench, length));
        (so_far().0 - before.0, so_far().1 - before.1)
    });
    let counts = counts.collect();
    drop(weights);
    counts
}

fn mapping_calls_so_far(bench: &Bench) -> u64 {
    let calls = bench.device.driver_calls();
    [Operation::CreatePhysical, Operation::Map, Operation::Unmap].map(|one| calls.of(one)).iter().sum()
}

/// Forward and backward pass of a language model. What its loss takes is larger than everything
/// else, and lives when most is in use.
fn train_batch(bench: &Bench, length: u64) {
    let alloc = |bytes: u64| bench.alloc(bytes * length);
    const LAYER: [u64; 7] = [80_000, 80_000, 80_000, 80_000, 320_000, 320_000, 80_000];
    const LOGITS: u64 = 2_400_000;
    let mut saved: Vec<Allocation> = (0..24).flat_map(|_| LAYER).map(alloc).collect();
    let (output, logits, wide) = (alloc(LOGITS), alloc(LOGITS), alloc(2 * LOGITS));
    drop(output);
    let gradient = alloc(2 * LOGITS);
    drop(wide);
    let narrow = alloc(LOGITS);
    drop(gradient);
    drop((alloc(LOGITS), narrow, logits));
    for _ in 0..24 {
        let mut before = None;
        for bytes in LAYER.into_iter().rev() {
            before = Some(alloc(bytes)).filter(|_| saved.pop().is_some());
        }
        drop(before);
    }
}

#[test]
fn a_program_that_moves_memory_in_each_repetition_does_not_move_ever_smaller_frames() {
    let bench = Bench::new(40 * GIB, "memory_first:on");
    let counts = calls_by_epoch(&bench, 16);
    bench.assert_returned();
    println!("mapping calls and granules moved, by epoch: {counts:?}");
    let (calls, moved) = counts[1..].iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    assert!(moved > 5000, "the program is such that memory moves");
    assert!(calls < moved / 4, "{calls} calls for {moved} granules");
}

#[test]
fn a_program_that_fits_on_a_nearly_full_device_fits_in_each_repetition() {
    let plenty = Bench::new(40 * GIB, "backing:paged");
    calls_by_epoch(&plenty, 1);
    let needed = plenty.allocator.stats().allocated_bytes.all.peak;
    // What others take shows only if the device is asked.
    for others in [0, 4 * GIB] {
        let bench = Bench::new((needed + needed / 96).next_multiple_of(2 * MIB) + others, "backing:paged");
        bench.driver.set_other_process_bytes(others);
        calls_by_epoch(&bench, 8);
        assert_eq!(bench.allocator.stats().num_ooms, 0);
        bench.driver.set_other_process_bytes(0);
        bench.assert_returned();
    }
}

#[test]
#[ignore = "for programs of your own: AQUIFER_TRACES=FILE:FILE"]
fn programs_of_your_own_hardly_map() {
    let paths = std::env::var("AQUIFER_TRACES").unwrap();
    let calls: Vec<u64> = std::env::split_paths(&paths).map(|path| calls_when_steady(&path)).collect();
    assert!(calls.iter().all(|&calls| calls <= 10), "of 1000 mapping calls: {calls:?}");
}

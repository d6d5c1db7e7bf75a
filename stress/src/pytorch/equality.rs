//! The model of PyTorch's default allocator gives what `backing:segments` of this project gives, byte
//! for byte.

use std::path::{Path, PathBuf};

use aquifer::device::DevicePtr;
use proptest::prelude::*;

use super::Native;
use crate::cli::{ConfigArg, Global};
use crate::input::{self, Event, Program};
use crate::session::Session;
use crate::subject::{Aquifer, Measured, Refused, Subject};

const OPTIONS: [&str; 9] = [
    "",
    "max_split_size_mb:128",
    "max_split_size_mb:20",
    "max_split_size_mb:200,max_non_split_rounding_mb:64",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[64:8,256:4,1024:2,>:1],max_split_size_mb:256",
    "large_segment_size_mb:64,max_split_size_mb:512",
    "per_process_memory_fraction:0.5,max_split_size_mb:64",
    "per_process_memory_fraction:0.97,throw_on_cudamalloc_oom:True",
];

/// What a comparison came across.
#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    events: u64,
    maps: u64,
    retries: u64,
    ooms: u64,
    released: u64,
}

/// Plays a program to both. Maps are compared after each `maps`th event.
fn compare(program: &Program, options: &str, device_bytes: u64, passes: u32, maps: u64) -> Seen {
    let device = Some(format!("sim:{},jitter=off", device_bytes).parse().unwrap());
    let session = Session::new(&Global { device, ..Global::default() }).unwrap().for_measuring();
    let config = |backing: &str| [backing, options].join(",").trim_end_matches(',').parse::<ConfigArg>().unwrap();
    let streams = program.streams.len();
    let mut model = Native::new(&session, &session.open().unwrap(), &config("backing:pytorch"), streams).unwrap();
    let library = config("backing:segments,cross_stream:off");
    let mut library = Aquifer::new(&session, &session.open().unwrap(), &library, streams).unwrap();
    let context = || format!("{} with {options:?} on {device_bytes}", program.name);
    let mut seen = Seen::default();
    let mut slots: Vec<_> = (0..program.slots).map(|_| None).collect();
    for pass in 0..passes {
        for (at, event) in program.events.iter().enumerate() {
            let at = || format!("{}, pass {pass}, event {at}: {event:?}", context());
            match *event {
                Event::Alloc { slot, bytes, stream } => {
                    match (model.alloc(bytes, stream), library.alloc(bytes, stream)) {
                        (Ok(ours), Ok(theirs)) => {
                            if bytes > 0 {
                                assert_eq!(model.place(&ours).0, library.place(&theirs).0, "{}", at());
                            }
                            slots[slot as usize] = Some((ours, theirs));
                        }
                        (Err(Refused::OutOfMemory(_)), Err(Refused::OutOfMemory(_))) => {}
                        (ours, theirs) => panic!("{}: {ours:?} {theirs:?}", at()),
                    }
                }
                Event::Free { slot } => {
                    if let Some((ours, theirs)) = slots[slot as usize].take() {
                        model.free(ours);
                        library.free(theirs);
                    }
                }
                Event::RecordStream { slot, stream } => {
                    if let Some((ours, theirs)) = &mut slots[slot as usize] {
                        model.record_stream(ours, stream).unwrap();
                        library.record_stream(theirs, stream).unwrap();
                    }
                }
                Event::Iteration(_) => continue,
            }
            seen.events += 1;
            assert_eq!(model.held(), library.held(), "{}", at());
            if seen.events.is_multiple_of(maps) {
                seen.maps += 1;
                assert_eq!(model.map().unwrap(), library.map().unwrap(), "{}", at());
                let (ours, theirs) = (model.stats(), library.stats());
                let counts = |stats: &aquifer::memory::MemoryStats| {
                    let allocs = (stats.num_device_alloc, stats.num_device_free, stats.segment.all.current);
                    (stats.num_alloc_retries, stats.num_ooms, allocs)
                };
                assert_eq!(counts(&ours), counts(&theirs), "{}", at());
            }
        }
        slots.iter_mut().filter_map(Option::take).for_each(|(ours, theirs)| {
            model.free(ours);
            library.free(theirs);
        });
    }
    assert_eq!(model.map().unwrap(), library.map().unwrap(), "{}", context());
    let (ours, theirs) = (model.stats(), library.stats());
    assert_eq!(ours.reserved_bytes.all.peak, theirs.reserved_bytes.all.peak);
    assert_eq!(ours.allocated_bytes.all.peak, theirs.allocated_bytes.all.peak);
    assert_eq!((ours.num_alloc_retries, ours.num_ooms), (theirs.num_alloc_retries, theirs.num_ooms), "{}", context());
    seen.retries = ours.num_alloc_retries;
    seen.ooms = ours.num_ooms;
    seen.released = ours.num_device_free;
    model.empty_cache().unwrap();
    library.empty_cache().unwrap();
    assert_eq!(model.held(), library.held());
    let _: DevicePtr = model.place(&None).0;
    seen
}

fn programs(folder: &Path) -> Vec<Program> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let traces = files.iter().filter(|file| file.to_string_lossy().contains(".trace"));
    traces.flat_map(|file| input::read(file, &std::fs::read(file).unwrap()[..]).unwrap()).collect()
}

/// With `AQUIFER_TRACES`, all recorded programs there, on many devices.
#[test]
fn recorded_programs() {
    let folder = std::env::var("AQUIFER_TRACES").ok();
    let all = programs(Path::new(folder.as_deref().unwrap_or(concat!(env!("CARGO_MANIFEST_DIR"), "/testdata"))));
    let mut sum = Seen::default();
    let mut runs = 0;
    for program in &all {
        let peak = program.peak_requested_bytes;
        let mut sizes = vec![peak.saturating_mul(12).clamp(1 << 30, 192 << 30), peak + peak / 8];
        if folder.is_some() {
            sizes.extend([peak + peak / 50, peak + peak / 20, peak + peak / 4, peak - peak / 10]);
        }
        let begun = std::time::Instant::now();
        for options in OPTIONS {
            for &size in &sizes {
                let seen = compare(program, options, size.next_multiple_of(2 << 20), 2, 997);
                runs += 1;
                sum.events += seen.events;
                sum.maps += seen.maps;
                sum.retries += seen.retries;
                sum.ooms += seen.ooms;
                sum.released += seen.released;
            }
        }
        println!("{} {:?}: so far {runs} runs {sum:?}", program.name, begun.elapsed());
    }
}

fn program() -> impl Strategy<Value = Program> {
    let size = prop_oneof![
        3 => 1..4096_u64,
        3 => 1..(1_u64 << 20),
        3 => (1_u64 << 20)..(10 << 20),
        3 => (10_u64 << 20)..(70 << 20),
        1 => (0..64_u64).prop_map(|mib| mib << 20),
    ];
    let step = (0..10_u8, size, 0..3_u16, any::<u32>());
    prop::collection::vec(step, 1..400).prop_map(|steps| {
        let (mut events, mut live, mut slots) = (Vec::new(), Vec::new(), 0_u32);
        for (what, bytes, stream, pick) in steps {
            match what {
                0..=4 => {
                    events.push(Event::Alloc { slot: slots, bytes, stream });
                    live.push(slots);
                    slots += 1;
                }
                5 if !live.is_empty() => {
                    events.push(Event::RecordStream { slot: live[pick as usize % live.len()], stream });
                }
                _ if !live.is_empty() => {
                    let slot = live.swap_remove(pick as usize % live.len());
                    events.push(Event::Free { slot });
                }
                _ => {}
            }
        }
        Program {
            events,
            slots,
            ..input::read(Path::new("p.trace"), &b"a 0 1 0\na 1 1 1\na 2 1 2\n"[..]).unwrap().remove(0)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn random_programs(
        program in program(),
        options in prop::sample::select(OPTIONS.to_vec()),
        mib in prop::sample::select(vec![60_u64, 150, 400, 4000]),
    ) {
        compare(&program, options, mib << 20, 2, 1);
    }
}

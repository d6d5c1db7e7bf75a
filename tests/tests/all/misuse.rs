//! Misuse of an allocator's memory on a simulated device is found, and legal uses are not reported.

use aquifer::Tensor;
use aquifer::kernels::{DType, Kernels};
use aquifer::tensor::ParamSet;
use aquifer::transfer::{Prefetcher, Spiller, Transfer};
use aquifer_allocator::snapshot::BlockState;
use aquifer_tests::prelude::*;

const BACKINGS: [&str; 2] = ["", "backing:segments"];
/// Where a request gets the memory that was just freed.
const WITHOUT_QUARANTINE: [&str; 2] = ["quarantine_mb:0", "backing:segments,quarantine_mb:0"];

struct Bench {
    device: Device,
    allocator: Allocator,
    stream: Stream,
}

fn bench(options: &str) -> Bench {
    let device = aquifer::open("sim:256MiB").unwrap();
    let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
    let stream = device.stream().unwrap();
    Bench { device, allocator, stream }
}

impl Bench {
    /// The violations found since the last call.
    fn found(&self) -> Vec<String> {
        std::iter::from_fn(|| self.device.driver().take_violation()).collect()
    }

    /// Asserts that one violation was found, and that its text has these parts.
    #[track_caller]
    fn finds(&self, parts: &[&str]) {
        let found = self.found();
        assert_eq!(found.len(), 1, "{found:?}");
        parts.iter().for_each(|part| assert!(found[0].contains(part), "{part:?} is missing: {}", found[0]));
    }

    #[track_caller]
    fn finds_nothing(&self) {
        assert_eq!(self.found(), [""; 0]);
    }

    fn read(&self, ptr: DevicePtr, bytes: usize) {
        self.stream.download_blocking(&mut vec![0; bytes], ptr).unwrap();
    }
}

/// File and line of the line before the call.
#[track_caller]
fn before() -> String {
    let here = std::panic::Location::caller();
    format!("{}:{}", here.file(), here.line() - 1)
}

#[test]
fn a_fill_beyond_a_block_is_found_with_both_places() {
    for options in BACKINGS {
        let bench = bench(options);
        let tag = TagScope::new("weights");
        let small = bench.allocator.alloc_bytes(512, &bench.stream).unwrap();
        let allocated = before();
        drop(tag);
        let neighbour = bench.allocator.alloc_bytes(512, &bench.stream).unwrap();
        bench.stream.fill(small.ptr(), 1, 512).unwrap();
        bench.stream.fill(neighbour.ptr(), 1, 512).unwrap();
        bench.finds_nothing();
        bench.stream.fill(small.ptr(), 1, 1024).unwrap();
        let filled = before();
        bench.finds(&["access beyond the bounds", &allocated, &filled, "tag `weights`", "512 bytes past the end"]);
        // Rounding is not part of a block.
        let odd = bench.allocator.alloc_bytes(500, &bench.stream).unwrap();
        bench.stream.fill(odd.ptr(), 1, 512).unwrap();
        bench.finds(&["12 bytes past the end"]);
        let aligned = bench.allocator.alloc_aligned(1000, 1 << 16, &bench.stream).unwrap();
        bench.stream.fill(aligned.ptr(), 1, 1000).unwrap();
        bench.finds_nothing();
    }
}

#[test]
fn use_after_drop_is_found_unless_it_was_enqueued_before() {
    for options in BACKINGS {
        let bench = bench(options);
        let other = bench.device.stream().unwrap();
        let buffer: Buffer<u8> = bench.allocator.alloc(4096, &bench.stream).unwrap();
        let allocated = format!("allocated at {}", before());
        let (ptr, view) = (buffer.ptr(), buffer.slice(1000..2000).share());
        bench.stream.fill(ptr, 1, 4096).unwrap();
        other.wait_for(&bench.stream.tick()).unwrap();
        other.fill(ptr, 1, 4096).unwrap();
        buffer.record_stream(&other).unwrap();
        drop(buffer);
        other.fill(view.ptr(), 2, 1000).unwrap(); // another handle keeps the memory
        drop(view);
        bench.device.synchronize().unwrap();
        bench.finds_nothing();
        other.fill(ptr, 2, 8).unwrap();
        let used = before();
        bench.finds(&["use after free", &used, "dropped by thread", &allocated]);
    }
}

#[test]
fn a_stale_address_is_found_where_an_equal_block_was_allocated_since() {
    for (options, reuse) in ["", "no_cache:True", "backing:segments"].iter().flat_map(|of| [(of, "on"), (of, "off")]) {
        let device = aquifer::open(&format!("sim:256MiB,reuse={reuse}")).unwrap();
        let (allocator, stream) = (Allocator::new(&device, *options).unwrap(), device.stream().unwrap());
        let bench = Bench { device, allocator, stream };
        let _tag = TagScope::new("weights");
        let block = bench.allocator.alloc_bytes(4000, &bench.stream).unwrap();
        let allocated = format!("tag `weights`), allocated at {}", before());
        let stale = block.ptr();
        drop(block);
        let equal = bench.allocator.alloc_bytes(4000, &bench.stream).unwrap();
        bench.stream.fill(equal.ptr(), 1, 4000).unwrap();
        bench.finds_nothing();
        bench.stream.fill(stale, 7, 4000).unwrap();
        let used = before();
        bench.finds(&["use after free", &used, &allocated, "dropped by thread"]);
    }
}

#[test]
fn a_free_with_a_place_is_named_though_equal_blocks_were_allocated_since() {
    for options in BACKINGS {
        let bench = bench(options);
        let other = bench.device.stream().unwrap();
        let _its_region = bench.allocator.alloc_bytes(4000, &other).unwrap();
        let block = bench.allocator.alloc_bytes(4000, &bench.stream).unwrap();
        let stale = block.ptr();
        block.drop_on(&other).unwrap();
        let dropped = format!("dropped at {}", before());
        let raw = bench.allocator.alloc_raw(4000, &other).unwrap();
        bench.allocator.free_raw(raw).unwrap();
        let freed = format!("dropped at {}", before());
        let equal = [(); 8].map(|()| bench.allocator.alloc_bytes(4000, &other).unwrap());
        bench.finds_nothing();
        for (stale, place) in [(stale, dropped), (raw, freed)] {
            bench.stream.fill(stale, 7, 4000).unwrap();
            bench.finds(&["use after free", &place]);
        }
        drop(equal);
    }
}

#[test]
fn a_block_in_quarantine_is_free_memory() {
    for options in BACKINGS {
        let Bench { device, allocator, stream } = bench(options);
        let block = allocator.alloc_bytes(1000, &stream).unwrap();
        let (keeps_the_granule, reserved) =
            (allocator.alloc_bytes(1000, &stream).unwrap(), allocator.memory_reserved());
        drop(block);
        let states = || -> Vec<_> {
            let segments = allocator.snapshot().segments;
            segments.iter().flat_map(|segment| &segment.blocks).map(|block| (block.size, block.state)).collect()
        };
        let inactive = BlockState::Inactive;
        let rest = reserved - 2048;
        assert_eq!(states(), [(1024, inactive), (1024, BlockState::ActiveAllocated), (rest, inactive)], "{options}");
        let stats = allocator.stats();
        assert_eq!((stats.allocated_bytes.all.current, stats.active_bytes.all.current), (1024, 1024));
        assert_eq!(allocator.fragmentation(0).free_bytes, reserved - 1024);
        drop(keeps_the_granule);
        allocator.empty_cache().unwrap();
        assert_eq!(allocator.memory_reserved(), 0, "{options}");
        device.assert_no_violations();
    }
}

#[test]
fn reading_unwritten_memory_is_found() {
    for options in WITHOUT_QUARANTINE {
        let bench = bench(options);
        let first = bench.allocator.alloc_bytes(4096, &bench.stream).unwrap();
        bench.stream.fill(first.ptr(), 1, 4096).unwrap();
        bench.read(first.ptr(), 4096);
        drop(first);
        // The same memory, with the old contents.
        let second = bench.allocator.alloc_bytes(4096, &bench.stream).unwrap();
        let allocated = before();
        bench.finds_nothing();
        bench.read(second.ptr(), 8);
        bench.finds(&["never written", &allocated]);
        let copy = bench.allocator.alloc_bytes(4096, &bench.stream).unwrap();
        bench.stream.copy(copy.ptr(), second.ptr(), 4096).unwrap();
        bench.finds_nothing();
        bench.stream.touch("sum", &[AccessRange { ptr: copy.ptr(), bytes: 4096, kind: AccessKind::Read }]).unwrap();
        bench.finds(&["kernel sum", "never written", &allocated]);
        let zeroed = bench.allocator.alloc_bytes_zeroed(4096, &bench.stream).unwrap();
        bench.read(zeroed.ptr(), 4096);
        bench.stream.upload_blocking(second.ptr(), &[1; 4096]).unwrap();
        bench.read(second.ptr(), 4096);
        bench.finds_nothing();
    }
}

#[test]
fn raw_pointers_have_bounds_and_an_end() {
    let bench = bench("");
    let ptr = bench.allocator.alloc_raw(1000, &bench.stream).unwrap();
    bench.stream.fill(ptr, 1, 1000).unwrap();
    bench.finds_nothing();
    bench.stream.fill(ptr, 1, 1001).unwrap();
    bench.finds(&["access beyond the bounds"]);
    bench.allocator.free_raw(ptr).unwrap();
    let freed = before();
    bench.stream.fill(ptr, 1, 8).unwrap();
    bench.finds(&["use after free", &format!("dropped at {freed}")]);
}

#[test]
fn memory_that_grows_shrinks_or_is_exported_has_bounds() {
    let bench = bench("");
    let mut cache = bench.allocator.growable(64 * MIB, &bench.stream).unwrap();
    let ptr = cache.ptr();
    cache.grow_to(3 * MIB, &bench.stream).unwrap();
    bench.stream.fill(ptr, 1, 3 * MIB).unwrap();
    cache.grow_to(9 * MIB, &bench.stream).unwrap();
    bench.stream.fill(ptr.offset(3 * MIB), 1, 6 * MIB).unwrap();
    bench.read(ptr, 9 << 20); // the first part was written before it grew
    bench.finds_nothing();
    bench.stream.fill(ptr, 1, 9 * MIB + 1).unwrap();
    bench.finds(&["access beyond the bounds"]);
    cache.shrink_to(MIB, &bench.stream).unwrap();
    bench.stream.fill(ptr.offset(MIB), 1, MIB).unwrap();
    bench.finds(&["use after free"]);
    cache.grow_to(2 * MIB, &bench.stream).unwrap();
    bench.read(ptr, 1 << 20);
    bench.finds_nothing();
    bench.read(ptr.offset(MIB), 1);
    bench.finds(&["never written"]);
    drop(cache);
    bench.stream.fill(ptr, 1, 1).unwrap();
    bench.finds(&["use after free"]);

    let shared = bench.allocator.alloc_exportable(1000, HandleKind::PosixFd, &bench.stream).unwrap();
    bench.stream.fill(shared.ptr(), 1, 1000).unwrap();
    bench.finds_nothing();
    bench.stream.fill(shared.ptr(), 1, 1001).unwrap();
    bench.finds(&["access beyond the bounds"]);
}

#[test]
fn graphs_use_their_pools_memory_after_it_was_dropped() {
    let bench = bench("");
    let outside = bench.allocator.alloc_bytes_zeroed(4096, &bench.stream).unwrap();
    let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
    let capture = bench.stream.begin_capture().unwrap();
    let route = bench.allocator.capture(&bench.stream, &pool).unwrap();
    let scratch = bench.allocator.alloc_bytes(4096, &bench.stream).unwrap();
    bench.stream.copy(scratch.ptr(), outside.ptr(), 4096).unwrap();
    bench.stream.touch("sum", &[AccessRange { ptr: scratch.ptr(), bytes: 4096, kind: AccessKind::Read }]).unwrap();
    drop((scratch, route));
    let graph = capture.end().unwrap();
    graph.launch(&bench.stream).unwrap();
    graph.launch(&bench.stream).unwrap();
    bench.finds_nothing();
    drop(outside);
    graph.launch(&bench.stream).unwrap();
    bench.finds(&["use after free", "the graph uses a block that was dropped after the capture"]);
}

#[test]
fn graphs_that_use_memory_a_growable_gave_up_are_found() {
    let bench = bench("");
    let mut cache = bench.allocator.growable(64 * MIB, &bench.stream).unwrap();
    cache.grow_to(9 * MIB, &bench.stream).unwrap();
    let capture = bench.stream.begin_capture().unwrap();
    bench.stream.fill(cache.ptr(), 1, 3 * MIB).unwrap();
    let graph = capture.end().unwrap();
    cache.shrink_to(3 * MIB, &bench.stream).unwrap();
    graph.launch(&bench.stream).unwrap();
    bench.finds_nothing();
    cache.shrink_to(3 * MIB - 100, &bench.stream).unwrap();
    graph.launch(&bench.stream).unwrap();
    bench.finds(&["use after free", "the graph uses 100 bytes that the block gave up after the capture"]);
    cache.grow_to(3 * MIB, &bench.stream).unwrap();
    graph.launch(&bench.stream).unwrap();
    bench.finds_nothing();
}

#[test]
fn the_present_block_is_named_together_with_the_dropped_one() {
    for options in WITHOUT_QUARANTINE {
        let bench = bench(options);
        drop(bench.allocator.alloc_bytes(1000, &bench.stream).unwrap());
        let short = bench.allocator.alloc_bytes(600, &bench.stream).unwrap();
        let allocated = before();
        bench.stream.fill(short.ptr().offset(700), 1, 8).unwrap();
        bench.finds(&["use after free", "1000 bytes", "100 bytes before this ends the block of 600 bytes", &allocated]);
    }
}

#[test]
fn memory_that_sleeps_must_be_woken_up() {
    let bench = bench("");
    let block = bench.allocator.alloc_bytes_zeroed(3 * MIB, &bench.stream).unwrap();
    bench.allocator.sleep(Contents::SaveToHost).unwrap();
    bench.stream.fill(block.ptr(), 1, 8).unwrap();
    bench.finds(&["use after free", "remedy: the memory is away while its allocator sleeps"]);
}

#[test]
fn sleep_keeps_or_discards_contents() {
    for contents in [Contents::SaveToHost, Contents::Discard] {
        let bench = bench("");
        let written = bench.allocator.alloc_bytes_zeroed(3 * MIB, &bench.stream).unwrap();
        let unwritten = bench.allocator.alloc_bytes(3 * MIB, &bench.stream).unwrap();
        bench.allocator.sleep(contents.clone()).unwrap();
        bench.allocator.wake().unwrap();
        bench.finds_nothing();
        bench.read(written.ptr(), 3 << 20);
        if contents == Contents::Discard {
            bench.finds(&["never written"]);
        }
        bench.finds_nothing();
        bench.read(unwritten.ptr(), 3 << 20);
        bench.finds(&["never written"]);
    }
}

#[test]
fn spilled_buffers_come_back_as_they_went() {
    let bench = bench("");
    let transfer = Transfer::new(&bench.allocator).unwrap();
    let spiller = Spiller::new(&transfer, 0).unwrap();
    let buffer: Buffer<u8> = bench.allocator.alloc(8192, &bench.stream).unwrap();
    bench.stream.fill(buffer.ptr(), 1, 4096).unwrap();
    let spillable = spiller.add(buffer, 0).unwrap();
    assert_eq!(spillable.spill().unwrap(), 8192);
    let resident = spillable.access(&bench.stream).unwrap();
    resident.slice(..4096).to_vec(&transfer).unwrap();
    bench.finds_nothing();
    resident.to_vec(&transfer).unwrap();
    bench.finds(&["never written"]);
}

#[test]
fn kernels_name_the_place_that_called_them() {
    let bench = bench("");
    let kernels = Kernels::load(&bench.device).unwrap();
    let mut half: Buffer<f32> = bench.allocator.alloc(1000, &bench.stream).unwrap();
    let mut out: Buffer<f32> = bench.allocator.alloc(1000, &bench.stream).unwrap();
    kernels.axpy(&bench.stream, 2.0, &half, &mut out).unwrap();
    let called = before();
    bench.device.synchronize().unwrap();
    bench.finds(&["kernel axpy", "never written", &called]);
    kernels.fill(&bench.stream, &mut half, 1.0_f32).unwrap();
    kernels.fill(&bench.stream, &mut out, 1.0_f32).unwrap();
    kernels.axpy(&bench.stream, 2.0, &half, &mut out).unwrap();
    bench.device.synchronize().unwrap();
    bench.finds_nothing();
}

#[test]
fn copies_that_another_thread_enqueues_name_the_place_that_asked_for_them() {
    let bench = bench("");
    let transfer = Transfer::new(&bench.allocator).unwrap();
    let buffer: Buffer<u8> = bench.allocator.alloc(usize::try_from(MIB).unwrap(), &bench.stream).unwrap();
    let pending = buffer.download(vec![0; buffer.len()], &transfer).unwrap();
    let called = before();
    pending.wait().unwrap();
    let found = bench.found();
    assert!(!found.is_empty());
    found.iter().for_each(|text| assert!(text.contains("never written") && text.contains(&called), "{text}"));
}

#[test]
fn memory_that_the_transfer_runtime_allocates_names_the_place_that_asked_for_it() {
    let bench = bench("");
    let transfer = Transfer::new(&bench.allocator).unwrap();
    let beyond = |tensor: &Tensor| {
        let buffer = tensor.device_buffer::<f32>().unwrap();
        bench.stream.fill(buffer.ptr(), 1, buffer.bytes() + 1).unwrap();
        bench.device.synchronize().unwrap();
    };
    let empty = Tensor::empty(&[100], DType::F32, &transfer).unwrap();
    let allocated = before();
    beyond(&empty);
    bench.finds(&["beyond the bounds", &allocated]);
    let mut set = ParamSet::new();
    set.insert("weights", Tensor::from_slice(&[1.0_f32; 100], &[100]).unwrap()).unwrap();
    let sent = set.get("weights").unwrap().to(&transfer).unwrap();
    let allocated = before();
    beyond(&sent.wait().unwrap());
    bench.finds(&["beyond the bounds", &allocated]);
    set.move_blocking(&transfer).unwrap();
    let allocated = before();
    beyond(set.get("weights").unwrap());
    bench.finds(&["beyond the bounds", &allocated]);
    let batches = Prefetcher::new(vec![vec![1.0_f32; 100]], &transfer, &bench.stream, 1).unwrap();
    let allocated = before();
    for batch in batches {
        let batch = batch.unwrap();
        bench.stream.fill(batch.ptr(), 1, batch.bytes() + 1).unwrap();
    }
    bench.finds(&["beyond the bounds", &allocated]);
    // No place stays in force after its call.
    bench.stream.fill(empty.device_buffer::<f32>().unwrap().ptr(), 1, 401).unwrap();
    let filled = before();
    bench.finds(&["beyond the bounds", &filled]);
}

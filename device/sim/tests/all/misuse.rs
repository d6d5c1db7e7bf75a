//! Misuse of memory that an allocator hands out in blocks, and panics about violations.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use aquifer_device::AccessKind::{Read, Write};
use aquifer_device::internal::{MovesContents, defer_panics_here};
use aquifer_device::{AccessRange, Device, DevicePtr, Driver, NewBlock, RawGraph, Witness};
use aquifer_sim::{SimConfig, SimDriver, ViolationKind};
use proptest::prelude::*;

use crate::common::{GRANULE, MIB, Short};

/// A device that checks how memory is used.
fn checked() -> Arc<SimDriver> {
    SimDriver::new(SimConfig::new(1 << 30))
}

/// A device with memory that an allocator manages, and its checks.
fn managed() -> (Arc<SimDriver>, DevicePtr, Arc<dyn Witness>) {
    let driver = checked();
    let memory = driver.alloc(MIB).unwrap();
    let checks = driver.witness().unwrap();
    checks.managed(memory.range(MIB));
    (driver, memory, checks)
}

fn block(ptr: DevicePtr, bytes: u64) -> NewBlock {
    NewBlock { ptr, bytes, tag: None, is_for_graphs: false, at: None }
}

fn kinds(driver: &SimDriver) -> Vec<ViolationKind> {
    driver.take_violations().into_iter().map(|violation| violation.kind).collect()
}

#[test]
fn work_beyond_a_block_is_found() {
    let (driver, memory, checks) = managed();
    let stream = driver.stream();
    checks.begins(NewBlock { tag: Some("weights".into()), ..block(memory, 500) });
    checks.begins(block(memory.offset(512), 512));
    driver.memset(memory, 1, 500, stream).unwrap();
    driver.memset(memory.offset(600), 1, 424, stream).unwrap();
    assert_eq!(kinds(&driver), []);

    driver.memset(memory, 1, 1024, stream).unwrap();
    let found = driver.take_violations();
    assert_eq!((found.len(), found[0].kind), (1, ViolationKind::OutOfBounds));
    assert_eq!(found[0].range, memory.0 + 500..memory.0 + 1024);
    let text = found[0].to_string();
    assert!(text.contains("524 bytes past the end") && text.contains("tag `weights`"), "{text}");

    driver.memset(memory, 1, 501, stream).unwrap(); // within the rounding
    driver.memset(memory.offset(504), 1, 4, stream).unwrap(); // between two blocks
    driver.memset(memory.offset(4096), 1, 4, stream).unwrap(); // where no block was yet
    assert_eq!(kinds(&driver), [ViolationKind::OutOfBounds; 3]);
    // The addresses of two blocks are not one range, even where nothing lies between.
    checks.begins(block(memory.offset(1024), 512));
    driver.memset(memory.offset(512), 1, 1024, stream).unwrap();
    assert_eq!(kinds(&driver), [ViolationKind::OutOfBounds]);
}

#[test]
fn only_work_enqueued_after_the_drop_is_use_after_free() {
    let (driver, memory, checks) = managed();
    let stream = driver.stream();
    checks.begins(block(memory, 512));
    driver.stall(stream, std::time::Duration::from_secs(1)).unwrap();
    driver.memset(memory, 1, 512, stream).unwrap();
    checks.ends(memory, None);
    driver.synchronize().unwrap(); // it runs after the drop
    assert_eq!(kinds(&driver), []);
    driver.memset(memory.offset(8), 1, 8, stream).unwrap();
    let found = driver.take_violations();
    assert_eq!((found.len(), found[0].kind), (1, ViolationKind::UseAfterFree));
    let text = found[0].to_string();
    assert!(text.contains("dropped by thread") && text.contains("remedy"), "{text}");
    // The same memory in another block.
    checks.begins(block(memory, 1024));
    driver.memset(memory, 1, 1024, stream).unwrap();
    driver.free(memory).unwrap();
    let plain = first_at(&driver, memory);
    driver.memset(plain, 1, MIB, stream).unwrap(); // not the allocator's any more
    assert_eq!(kinds(&driver), []);
}

/// Allocates memory, and gives it back, until it has an address that was free before.
fn first_at(driver: &SimDriver, address: DevicePtr) -> DevicePtr {
    loop {
        let plain = driver.alloc(MIB).unwrap();
        if plain == address {
            return plain;
        }
        driver.free(plain).unwrap();
    }
}

#[test]
fn addresses_given_back_last_serve_nothing_else_and_name_the_block_that_they_had() {
    for config in ["1GiB", "1GiB,reuse=off"] {
        let driver = SimDriver::new(SimConfig::parse(config).unwrap());
        let (checks, stream) = (driver.witness().unwrap(), driver.stream());
        let (plain, reserved) = (driver.alloc(MIB).unwrap(), driver.reserve(2 * MIB, 0).unwrap());
        for memory in [plain, reserved] {
            checks.managed(memory.range(MIB));
            checks.begins(NewBlock { tag: Some("weights".into()), ..block(memory, 512) });
            checks.ends(memory, None);
        }
        driver.free(plain).unwrap();
        driver.unreserve(reserved, 2 * MIB).unwrap();
        for _ in 0..60 {
            let other = driver.alloc(MIB).unwrap();
            assert_ne!(other, plain, "{config}");
            driver.free(other).unwrap();
        }
        assert_ne!(driver.reserve(2 * MIB, 0).unwrap(), reserved, "{config}");
        driver.stall(stream, std::time::Duration::from_secs(1)).unwrap();
        for memory in [plain, reserved] {
            driver.memset(memory, 1, 8, stream).unwrap();
            let found = driver.take_violations();
            assert_eq!((found.len(), found[0].kind), (1, ViolationKind::UseAfterFree), "{config}");
            assert!(found[0].to_string().contains("tag `weights`"), "{config}: {}", found[0]);
        }
    }
}

#[test]
fn blocks_that_grow_and_shrink_keep_their_contents() {
    let (driver, memory, checks) = managed();
    let stream = driver.stream();
    checks.begins(block(memory, 512));
    driver.memset(memory, 1, 512, stream).unwrap();
    checks.resized(memory, 1024, None);
    driver.get(memory, 512, stream).unwrap();
    assert_eq!(kinds(&driver), []);
    driver.get(memory, 1024, stream).unwrap();
    assert_eq!(kinds(&driver), [ViolationKind::NeverWritten]);
    checks.resized(memory, 100, None);
    driver.get(memory, 100, stream).unwrap();
    assert_eq!(kinds(&driver), []);
    driver.memset(memory, 1, 512, stream).unwrap();
    driver.memset(memory.offset(200), 1, 8, stream).unwrap();
    assert_eq!(kinds(&driver), [ViolationKind::OutOfBounds, ViolationKind::UseAfterFree]);
}

#[test]
fn copies_carry_unwritten_bytes_and_readers_report_them() {
    let (driver, memory, checks) = managed();
    let stream = driver.stream();
    let blocks = [0, 1, 2].map(|n| memory.offset(n * 1024));
    blocks.iter().for_each(|&ptr| checks.begins(block(ptr, 1024)));
    driver.memset(blocks[0], 1, 512, stream).unwrap();
    driver.copy_on_device(blocks[1], blocks[0], 1024, stream).unwrap();
    driver.copy_on_device(blocks[2], blocks[1].offset(256), 512, stream).unwrap();
    driver.get(blocks[2], 256, stream).unwrap();
    assert_eq!(kinds(&driver), []);
    driver.get(blocks[2].offset(255), 2, stream).unwrap();
    let host = driver.host_alloc(1024).unwrap();
    driver.download(host, blocks[1], 1024, stream);
    driver.kernel("sum", &[(blocks[1], 1024, Read)], None, stream).unwrap();
    assert_eq!(kinds(&driver), [ViolationKind::NeverWritten; 3]);
    // What a kernel writes is written.
    driver.kernel("fill", &[(blocks[1], 1024, Write)], None, stream).unwrap();
    driver.kernel("sum", &[(blocks[1], 1024, Read)], None, stream).unwrap();
    assert_eq!(kinds(&driver), []);
}

#[test]
fn a_kernel_that_reads_parts_of_its_range_is_checked_as_it_runs() {
    let (driver, memory, checks) = managed();
    let stream = driver.stream();
    checks.begins(block(memory, 1024));
    driver.memset(memory, 1, 512, stream).unwrap();
    for (at, expected) in [(256, vec![]), (512, vec![ViolationKind::NeverWritten])] {
        let from = memory.offset(at);
        let reads = move |memory: &mut dyn aquifer_device::KernelMemory, _: &[_]| memory.read(from, &mut [0; 8]);
        driver.kernel("gather", &[(memory, 1024, Read)], Some(Arc::new(reads)), stream).unwrap();
        driver.synchronize().unwrap();
        assert_eq!(kinds(&driver), expected, "{at}");
    }
}

#[test]
fn a_kernel_must_not_read_where_it_writes_before_it_has_written() {
    let (driver, memory, checks) = managed();
    let stream = driver.stream();
    for (writes_first, expected) in [(true, vec![]), (false, vec![ViolationKind::NeverWritten])] {
        checks.begins(block(memory, 1024));
        let updates = move |memory_of: &mut dyn aquifer_device::KernelMemory, _: &[_]| {
            if writes_first {
                memory_of.write(memory, &[1; 8])?;
            }
            memory_of.read(memory, &mut [0; 8])?;
            memory_of.write(memory, &[1; 1024])
        };
        driver.kernel("update", &[(memory, 1024, Write)], Some(Arc::new(updates)), stream).unwrap();
        driver.synchronize().unwrap();
        driver.get(memory, 1024, stream).unwrap();
        assert_eq!(kinds(&driver), expected, "{writes_first}");
    }
}

#[test]
fn an_access_of_no_bytes_reads_nothing() {
    let (driver, memory, checks) = managed();
    let stream = driver.stream();
    checks.begins(block(memory, 1024));
    driver.memset(memory, 1, 16, stream).unwrap();
    let middle = memory.offset(512);
    let reads = move |memory: &mut dyn aquifer_device::KernelMemory, _: &[_]| memory.read(middle, &mut []);
    let accesses = [(middle, 0, Read), (memory, 1024, Read)];
    driver.kernel("gather", &accesses, Some(Arc::new(reads)), stream).unwrap();
    driver.kernel("sum", &accesses[..1], None, stream).unwrap();
    driver.synchronize().unwrap();
    assert_eq!(kinds(&driver), []);
}

#[test]
fn contents_that_are_moved_away_and_back_keep_their_state() {
    let (driver, memory, checks) = managed();
    let stream = driver.stream();
    let (from, to) = (memory, memory.offset(1024));
    checks.begins(block(from, 1024));
    driver.memset(from, 1, 512, stream).unwrap();
    let host = driver.host_alloc(1024).unwrap();
    {
        let _moves = MovesContents::begin();
        driver.download(host, from, 1024, stream);
        driver.synchronize().unwrap();
        checks.ends(from, None);
        checks.begins(block(to, 1024));
        driver.upload(to, host, 1024, stream);
    }
    driver.get(to, 512, stream).unwrap();
    assert_eq!(kinds(&driver), []);
    driver.get(to, 513, stream).unwrap();
    assert_eq!(kinds(&driver), [ViolationKind::NeverWritten]);
    // Any other copy from there writes.
    driver.upload(to, host, 1024, stream);
    driver.get(to, 1024, stream).unwrap();
    assert_eq!(kinds(&driver), []);
}

#[test]
fn graphs_may_use_their_pools_memory_and_need_all_other_blocks() {
    for is_for_graphs in [true, false] {
        let (driver, memory, checks) = managed();
        let stream = driver.stream();
        checks.begins(NewBlock { is_for_graphs, ..block(memory, 512) });
        driver.begin_capture(stream).unwrap();
        driver.memset(memory, 1, 512, stream).unwrap();
        driver.memset(memory, 1, 513, stream).unwrap();
        assert_eq!(kinds(&driver), [ViolationKind::OutOfBounds]); // at the capture
        let graph = driver.end_capture(stream).unwrap();
        driver.launch_graph(graph, stream).unwrap();
        assert_eq!(kinds(&driver), []);
        checks.ends(memory, None);
        driver.launch_graph(graph, stream).unwrap();
        let expected = if is_for_graphs { 0 } else { 1 };
        assert_eq!(kinds(&driver), vec![ViolationKind::UseAfterFree; expected]);
    }
}

/// A capture of a fill of 512 bytes, in a block for graphs that is dropped during the capture.
fn capture_a_block(driver: &SimDriver, checks: &Arc<dyn Witness>, memory: DevicePtr) -> RawGraph {
    let stream = driver.stream();
    driver.begin_capture(stream).unwrap();
    checks.begins(NewBlock { is_for_graphs: true, ..block(memory, 512) });
    driver.memset(memory, 1, 512, stream).unwrap();
    checks.ends(memory, None);
    driver.end_capture(stream).unwrap()
}

#[test]
fn a_launch_that_uses_memory_given_out_since_the_capture_is_found() {
    let (driver, memory, checks) = managed();
    let (stream, graph) = (driver.stream(), capture_a_block(&driver, &checks, memory));
    let copy = driver.copy_graph(graph, false).unwrap();
    driver.launch_graph(graph, stream).unwrap();
    assert_eq!(kinds(&driver), [], "the memory is unused");
    checks.begins(NewBlock { tag: Some("weights".into()), ..block(memory.offset(256), 1024) });
    for graph in [graph, copy] {
        driver.launch_graph(graph, stream).unwrap();
        let found = driver.take_violations();
        assert_eq!((found.len(), found[0].kind), (1, ViolationKind::UseAfterFree));
        assert_eq!(found[0].range, memory.0 + 256..memory.0 + 256 + 1024);
        let text = found[0].to_string();
        assert!(text.contains("given out after the capture") && text.contains("tag `weights`"), "{text}");
    }
    checks.ends(memory.offset(256), None);
    driver.launch_graph(graph, stream).unwrap();
    assert_eq!(kinds(&driver), [], "the block is gone");
}

#[test]
fn a_launch_finds_a_block_that_was_given_the_physical_memory_of_a_graph() {
    let driver = checked();
    let (memory, physical) = driver.mapped();
    let (other, checks) = (driver.reserve(GRANULE, 0).unwrap(), driver.witness().unwrap());
    checks.managed(memory.range(GRANULE));
    checks.managed(other.range(GRANULE));
    let graph = capture_a_block(&driver, &checks, memory);
    driver.map(other, GRANULE, physical).unwrap();
    checks.begins(block(other, 512));
    driver.launch_graph(graph, driver.stream()).unwrap();
    assert_eq!(kinds(&driver), [ViolationKind::UseAfterFree]);
}

#[test]
fn graphs_may_use_memory_of_each_other() {
    let (driver, memory, checks) = managed();
    checks.begins(block(memory.offset(512), 512)); // not the graphs'
    let first = capture_a_block(&driver, &checks, memory);
    let second = capture_a_block(&driver, &checks, memory);
    let stream = driver.stream();
    driver.begin_capture(stream).unwrap();
    checks.begins(NewBlock { is_for_graphs: true, ..block(memory, 512) });
    let third = driver.end_capture(stream).unwrap();
    for graph in [first, second, third] {
        driver.launch_graph(graph, stream).unwrap();
    }
    assert_eq!(kinds(&driver), []);
}

#[test]
fn a_peers_copy_is_checked_on_the_device_of_its_source() {
    let (driver, memory, checks) = managed();
    let other = SimDriver::new(SimConfig::new(1 << 30).ordinal(1));
    let (there, other_checks) = (other.alloc(MIB).unwrap(), other.witness().unwrap());
    other_checks.managed(there.range(MIB));
    other_checks.begins(block(there, 1024));
    checks.begins(block(memory, 1024));
    let stream = other.stream();
    driver.memset(memory, 1, 512, driver.stream()).unwrap();
    driver.synchronize().unwrap();
    other.copy_peer(there, &*driver, memory, 1024, stream).unwrap();
    other.get(there, 512, stream).unwrap();
    assert_eq!((kinds(&driver), kinds(&other)), (vec![], vec![]));
    other.get(there, 1024, stream).unwrap();
    assert_eq!(kinds(&other), [ViolationKind::NeverWritten]);
    checks.ends(memory, None);
    other.copy_peer(there, &*driver, memory, 1024, stream).unwrap();
    assert_eq!((kinds(&driver), kinds(&other)), (vec![ViolationKind::UseAfterFree], vec![]));
}

#[test]
fn without_checks_no_misuse_is_reported() {
    let driver = SimDriver::new(SimConfig::parse("1GiB,checks=off").unwrap());
    assert!(!driver.witness().unwrap().watches_blocks());
}

#[test]
fn texts_name_both_places_and_the_remedy() {
    let device = Device::new(checked());
    let (one, two, memory) = (device.stream().unwrap(), device.stream().unwrap(), device.alloc(MIB).unwrap());
    one.fill(memory, 1, MIB).unwrap();
    let first = format!("misuse.rs:{}", line!() - 1);
    two.touch("sum", &[AccessRange { ptr: memory, bytes: MIB, kind: Read }]).unwrap();
    let second = format!("misuse.rs:{}", line!() - 1);
    let text = device.driver().take_violation().unwrap();
    assert!(text.contains(&first) && text.contains(&second), "{text}");
    assert!(text.contains("`b.wait_for(&a.tick())`, where `a` is stream 1"), "{text}");
}

/// A device that panics, with one block, and the text of a program's panic.
fn panics(program: impl FnOnce(&Device, DevicePtr)) -> Option<String> {
    let driver = SimDriver::new(SimConfig::parse("1GiB,violations=panic").unwrap());
    let memory = driver.alloc(MIB).unwrap();
    let checks = driver.witness().unwrap();
    checks.managed(memory.range(MIB));
    checks.begins(block(memory, 512));
    let device = Device::new(driver);
    let caught = catch_unwind(AssertUnwindSafe(move || program(&device, memory)));
    caught.err().map(|panic| panic.downcast_ref::<String>().cloned().unwrap())
}

#[test]
fn wrong_addresses_panic_in_the_call_and_races_in_the_next_wait() {
    let found = panics(|device, memory| {
        let stream = device.stream().unwrap();
        let _ = stream.fill(memory, 1, 513);
        unreachable!("the fill panics");
    });
    assert!(found.unwrap().contains("access beyond the bounds of a block"));

    let race = |device: &Device, memory| {
        let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
        one.fill(memory, 1, 512).unwrap();
        two.fill(memory, 1, 512).unwrap();
        one.is_idle().unwrap(); // asking is no wait
    };
    let found = panics(|device, memory| {
        race(device, memory);
        let _ = device.synchronize();
        unreachable!("the wait panics");
    });
    assert!(found.unwrap().contains("two unordered writes"));
    // The last handle of the device is dropped within `panics`.
    assert!(panics(race).unwrap().contains("two unordered writes"));
    assert_eq!(
        panics(|device, memory| {
            race(device, memory);
            assert!(device.driver().take_violation().is_some());
        }),
        None
    );
}

#[test]
fn nothing_panics_twice_or_on_threads_that_defer_it() {
    let found = panics(|device, memory| {
        let stream = device.stream().unwrap();
        let worker = stream.clone();
        std::thread::spawn(move || {
            defer_panics_here();
            worker.fill(memory, 1, 513).unwrap();
            worker.synchronize().unwrap();
        })
        .join()
        .unwrap();
        let _ = stream.synchronize();
        unreachable!("the wait of this thread panics");
    });
    assert!(found.unwrap().contains("access beyond"));

    struct Waits(Device);
    impl Drop for Waits {
        fn drop(&mut self) {
            let _ = self.0.synchronize();
        }
    }
    let found = panics(|device, memory| {
        let _waits = Waits(device.clone());
        let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
        one.fill(memory, 1, 512).unwrap();
        two.fill(memory, 1, 512).unwrap();
        panic!("{}", "the test's own");
    });
    assert_eq!(found.unwrap(), "the test's own");
}

/// What random programs know of each byte: the block that it is in, and whether it was written.
#[derive(Clone, Copy)]
struct Byte {
    block: Option<usize>,
    written: bool,
}

proptest! {
    /// Random blocks, fills, copies and reads against one cell a byte.
    #[test]
    fn checks_agree_with_a_model_of_bytes(
        steps in prop::collection::vec((0usize..7, 0usize..120, 1usize..40, 0usize..120), 1..80),
    ) {
        const SIZE: usize = 160;
        let (driver, memory, checks) = managed();
        let stream = driver.stream();
        let mut bytes = [Byte { block: None, written: true }; SIZE];
        let mut live: Vec<(usize, usize)> = Vec::new(); // start and length, by number; length 0 once dropped
        let at = |offset: usize| memory.offset(offset as u64);
        for (what, start, length, other) in steps {
            let range = start..start + length;
            let legal = |bytes: &[Byte], from: usize| {
                let block = bytes[from].block;
                block.is_some() && bytes[from..from + length].iter().all(|byte| byte.block == block)
            };
            let mut bad = Vec::new();
            match what {
                0 | 1 if bytes[range.clone()].iter().all(|byte| byte.block.is_none()) => {
                    checks.begins(block(at(start), length as u64));
                    bytes[range].fill(Byte { block: Some(live.len()), written: false });
                    live.push((start, length));
                }
                2 if bytes[start].block.is_some() => {
                    let (first, held) = live[bytes[start].block.unwrap()];
                    checks.ends(at(first), None);
                    bytes[first..first + held].iter_mut().for_each(|byte| byte.block = None);
                }
                3 => {
                    driver.memset(at(start), 1, length as u64, stream).unwrap();
                    if !legal(&bytes, start) { bad.push(true); }
                    bytes[range].iter_mut().for_each(|byte| byte.written = true);
                }
                4 if start + length <= other || other + length <= start => {
                    driver.copy_on_device(at(other), at(start), length as u64, stream).unwrap();
                    if !(legal(&bytes, start) && legal(&bytes, other)) { bad.push(true); }
                    for offset in 0..length { bytes[other + offset].written = bytes[start + offset].written; }
                }
                5 | 6 => {
                    if what == 5 {
                        driver.get(at(start), length, stream).unwrap();
                    } else {
                        driver.kernel("read", &[(at(start), length as u64, Read)], None, stream).unwrap();
                    }
                    // One operation is reported once.
                    let unwritten = bytes[range].iter().any(|byte| byte.block.is_some() && !byte.written);
                    if !legal(&bytes, start) { bad.push(true); } else if unwritten { bad.push(false); }
                }
                _ => {}
            }
            let found: Vec<bool> = kinds(&driver).into_iter().map(|kind| kind != ViolationKind::NeverWritten).collect();
            prop_assert_eq!(found, bad);
        }
    }
}

//! Peaks over all streams: exact with one thread, and within the documented bound with several.

use std::sync::Barrier;

use aquifer_tests::prelude::*;

/// Two credits of 16 MiB for each stream and pool, as `MemoryStats` says.
const BOUND: u64 = 32 * MIB;

#[test]
fn one_thread_on_many_streams_has_exact_peaks() {
    let Bench { device, allocator, .. } = Bench::new(64 * GIB, "");
    let streams: Vec<_> = (0..5).map(|_| device.stream().unwrap()).collect();
    let (mut held, mut bytes, mut peak, mut blocks, mut reserved) = (Vec::new(), 0, 0, 0, 0);
    for step in 0_u64..2000 {
        let stream = &streams[usize::try_from(step * 7 % 5).unwrap()];
        let size = (step * 37 % 4000 + 1) * 512;
        held.push(allocator.alloc_bytes(size, stream).unwrap());
        bytes += size;
        (peak, blocks) = (peak.max(bytes), blocks.max(held.len() as u64));
        if step % 3 != 0 {
            let gone = held.swap_remove(usize::try_from(step * 31).unwrap() % held.len());
            bytes -= gone.bytes();
        }
        let stats = allocator.stats();
        assert_eq!((stats.requested_bytes.all.current, stats.requested_bytes.all.peak), (bytes, peak));
        assert_eq!((stats.allocation.all.current, stats.allocation.all.peak), (held.len() as u64, blocks));
        assert!(stats.reserved_bytes.all.current >= reserved, "reserved memory shrank without empty_cache");
        reserved = stats.reserved_bytes.all.current;
    }
    allocator.reset_peak_stats();
    assert_eq!(allocator.stats().requested_bytes.all.peak, bytes);
}

#[test]
fn work_that_passes_to_another_thread_once_has_exact_peaks() {
    let Bench { device, allocator, .. } = Bench::new(64 * GIB, "");
    let stream = device.stream().unwrap();
    let first = allocator.alloc_bytes(100 * MIB, &stream).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drop((first, allocator.alloc_bytes(50 * MIB, &stream).unwrap())));
    });
    let peak = allocator.stats().allocated_bytes.all;
    assert_eq!((peak.current, peak.peak), (0, 150 * MIB));
}

#[test]
fn two_threads_have_peaks_within_the_bound() {
    let Bench { device, allocator, .. } = Bench::new(64 * GIB, "");
    let streams = [0; 2].map(|_| device.stream().unwrap());
    // At each barrier, both threads hold all they have: the true peak is known.
    let together = Barrier::new(2);
    let each = 400 * MIB;
    std::thread::scope(|scope| {
        for stream in &streams {
            let (allocator, together) = (&allocator, &together);
            scope.spawn(move || {
                for round in 0..20 {
                    together.wait();
                    let size = (round % 4 + 1) * 5 * MIB;
                    let held: Vec<_> = (0..each / size).map(|_| allocator.alloc_bytes(size, stream).unwrap()).collect();
                    together.wait();
                    drop(held);
                }
            });
        }
    });
    let stats = allocator.stats();
    let allocated = stats.allocated_bytes.all;
    assert_eq!((allocated.current, allocated.allocated), (0, allocated.freed));
    let truth = 2 * each;
    assert!((truth..=truth + 2 * BOUND).contains(&allocated.peak), "{} of {truth}", allocated.peak);
    assert!(allocated.peak <= stats.reserved_bytes.all.peak);
    // Counting is exact again after a reset.
    allocator.reset_peak_stats();
    drop(streams.each_ref().map(|stream| allocator.alloc_bytes(30 * MIB, stream).unwrap()));
    assert_eq!(allocator.stats().allocated_bytes.all.peak, 60 * MIB);
}

//! Frames of mapped memory: few driver calls where memory stays, and memory that can move next to
//! memory that stays.

use aquifer_tests::prelude::*;

fn fill(bench: &Bench, block: u64, bytes: u64) -> Vec<Allocation> {
    (0..bytes / block).map(|_| bench.alloc(block)).collect()
}

#[test]
fn memory_that_stays_takes_few_calls() {
    for (block, granules_in_a_frame) in [(8 * MIB, 1.5), (40 * MIB, 3.0), (256 * MIB, 3.0)] {
        let bench = Bench::new(16 * GIB, "backing:paged");
        let granules = 8 * GIB / (2 * MIB);
        let blocks = fill(&bench, block, 8 * GIB);
        let created = bench.calls(Operation::CreatePhysical);
        assert!(created as f64 * granules_in_a_frame < granules as f64, "{block}: {created} for {granules} granules");
        drop(blocks);
        bench.assert_returned();
    }
}

#[test]
fn memory_between_blocks_that_stay_can_move() {
    // Frames that are larger than a block are split.
    for (block, options) in
        [(4, "split_frames:on"), (6, "split_frames:on"), (8, "split_frames:on"), (16, ""), (36, ""), (64, "")]
    {
        let bench = Bench::new(4 * GIB, options);
        // So that blocks do not begin where frames do.
        let first = bench.alloc(3 * MIB);
        let mut freed = 0;
        let blocks = fill(&bench, block * MIB, 4 * GIB - 128 * MIB);
        let live: Vec<Allocation> = blocks
            .into_iter()
            .enumerate()
            .filter_map(|(at, block)| {
                let stays = at % 2 == 0;
                freed += if stays { 0 } else { block.bytes() };
                stays.then_some(block)
            })
            .collect();
        let third = bench.allocator.alloc_bytes(freed / 3, &bench.stream);
        assert!(third.is_ok(), "blocks of {block} MiB: {}", third.unwrap_err());
        drop((first, live, third));
        bench.assert_returned();
    }
}

#[test]
fn memory_of_frames_that_are_partly_in_use_serves_what_would_be_refused() {
    let capacity = 514 * MIB;
    for (options, is_served) in [("", false), (",split_frames:on", true)] {
        let bench = Bench::new(capacity, &format!("backing:paged,frame_mb:16,limit_mb:514{options}"));
        let side = bench.new_stream();
        drop(fill(&bench, 64 * MIB, 512 * MIB));
        let blocks = fill(&bench, 2 * MIB, 512 * MIB);
        let live: Vec<(Allocation, u8)> = blocks.into_iter().zip(0..=255).step_by(8).collect();
        side.wait_for(&bench.stream.tick()).unwrap();
        for (at, (block, byte)) in live.iter().enumerate() {
            // Half of them on another stream, which the allocator waits for.
            if at % 2 == 0 {
                bench.stream.fill(block.ptr(), *byte, block.bytes()).unwrap();
            } else {
                side.fill(block.ptr(), *byte, block.bytes()).unwrap();
                block.record_stream(&side).unwrap();
            }
        }
        let large = bench.allocator.alloc_bytes(420 * MIB, &bench.stream);
        assert_eq!(large.is_ok(), is_served, "{large:?}");
        if let Ok(large) = &large {
            bench.stream.fill(large.ptr(), 99, large.bytes()).unwrap();
            assert!(bench.allocator.stats().frames_split >= 20);
        }
        bench.stream.wait_for(&side.tick()).unwrap();
        for (block, byte) in &live {
            let mut found = vec![0; 2 << 20];
            bench.stream.download_blocking(&mut found, block.ptr()).unwrap();
            assert!(found.iter().all(|found| found == byte), "{byte}");
        }
        drop((live, large));
        bench.assert_returned();
    }
}

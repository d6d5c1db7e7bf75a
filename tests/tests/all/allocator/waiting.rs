//! Blocks that wait for other streams, and how often requests query those streams.

use aquifer_tests::prelude::*;

const LONG: Duration = Duration::from_millis(50);

/// A bench whose side stream still uses 20 MiB that the program gave back: all of the device's
/// memory.
fn one_block_waits(backing: Backing) -> Bench {
    let bench = Bench::new(22 * MIB, &on(backing, "cross_stream:ready"));
    let block = bench.alloc(20 * MIB);
    block.record_stream(&bench.side).unwrap();
    bench.side.wait_for(&bench.stream.tick()).unwrap();
    bench.stall(&bench.side, LONG);
    write_on(&bench.side, block.ptr(), block.bytes());
    drop(block);
    bench
}

/// Allocates and frees a small block so often; tells how many events were asked about meanwhile.
fn ask(bench: &Bench, times: u32) -> u64 {
    let queries = || bench.allocator.device().driver_calls().of(Operation::QueryEvent);
    let before = queries();
    (0..times).for_each(|_| drop(bench.alloc(1000)));
    queries() - before
}

#[test]
fn while_the_answer_is_no_few_requests_ask() {
    for backing in BACKINGS {
        let bench = one_block_waits(backing);
        let queries = ask(&bench, 400);
        assert!((80..=110).contains(&queries), "{backing}: {queries} queries, where one request in four asks");
        bench.side.synchronize().unwrap();
        bench.assert_returned();
    }
}

#[test]
fn a_request_that_finds_nothing_asks_at_once() {
    if !Subject::is_simulated() {
        return; // The time that passes is the simulator's.
    }
    for backing in BACKINGS {
        let bench = one_block_waits(backing);
        for requests in 0..12 {
            // Wherever in a pause the request comes.
            ask(&bench, requests);
            bench.driver.advance(2 * LONG);
            let block = bench.alloc(20 * MIB);
            assert_eq!(bench.allocator.stats().num_sync_all_streams, 0, "{backing}: the host waited");
            block.record_stream(&bench.side).unwrap();
            bench.side.wait_for(&bench.stream.tick()).unwrap();
            bench.stall(&bench.side, LONG);
            drop(block);
        }
        bench.side.synchronize().unwrap();
        bench.assert_returned();
    }
}

#[test]
fn emptying_gives_back_what_many_streams_used_last() {
    for backing in BACKINGS {
        let bench = Bench::new(GIB, &on(backing, ""));
        let blocks: Vec<_> = (0..160).map(|_| bench.allocator.alloc_bytes(MIB / 2, &bench.stream).unwrap()).collect();
        let streams: Vec<_> = blocks.iter().map(|_| bench.device.stream().unwrap()).collect();
        for (block, stream) in blocks.into_iter().zip(&streams) {
            stream.wait_for(&bench.stream.tick()).unwrap();
            bench.stall(stream, LONG);
            write_on(stream, block.ptr(), block.bytes());
            block.drop_on(stream).unwrap();
        }
        bench.allocator.empty_cache().unwrap();
        assert_eq!(bench.allocator.memory_reserved(), 0, "{backing}");
    }
}

//! Transfers and an allocator that sleeps: what was begun is enqueued first, and nothing is lost.

use aquifer_allocator::{AllocError, Contents, DeviceBuffer};
use aquifer_transfer::{Prefetcher, TransferError};

use super::Bench;

const LEN: u32 = 3 << 20;

#[test]
fn what_was_begun_is_enqueued_before_the_memory_goes() {
    let bench = Bench::new();
    let data: Vec<u32> = (0..LEN).collect();
    let allocator = bench.transfer.allocator().clone();
    let mut other: DeviceBuffer<u32> = allocator.alloc_buffer(LEN.into(), &bench.stream).unwrap();
    let begun = bench.transfer.to_device(data.clone(), &bench.stream).unwrap();
    let filled = bench.transfer.upload_from(data.clone(), &mut other).unwrap();
    assert!(allocator.sleep(Contents::SaveToHost).unwrap() > 0);
    allocator.wake().unwrap();
    let buffer = begun.wait().unwrap();
    filled.wait().unwrap();
    for buffer in [&buffer, &other] {
        let read = bench.transfer.to_vec(buffer).unwrap();
        allocator.sleep(Contents::SaveToHost).unwrap();
        assert!(read.wait().unwrap() == data);
        allocator.wake().unwrap();
    }
    drop((buffer, other));
    bench.finish();
}

#[test]
fn a_prefetcher_loses_no_batch() {
    let bench = Bench::new();
    let allocator = bench.transfer.allocator().clone();
    let source = (0..12).map(|batch| vec![batch; 200_000]);
    let mut batches = Prefetcher::<Vec<u32>>::new(source, &bench.transfer, &bench.stream, 2).unwrap();
    let (mut seen, mut refused) = (Vec::new(), 0);
    loop {
        if seen.len() == 3 && refused == 0 {
            allocator.sleep(Contents::SaveToHost).unwrap();
        }
        match batches.next() {
            None => break,
            Some(Ok(batch)) => seen.push(batch),
            Some(Err(TransferError::Alloc(AllocError::Asleep))) => {
                refused += 1;
                allocator.wake().unwrap();
            }
            Some(Err(error)) => panic!("{error}"),
        }
    }
    assert_eq!(refused, 1);
    for (number, batch) in (0..12).zip(&seen) {
        assert!(bench.transfer.to_vec(batch).unwrap().wait().unwrap().iter().all(|&value| value == number));
    }
    assert_eq!(seen.len(), 12);
    // One that is dropped meanwhile does not wait for that to end.
    let mut batches =
        Prefetcher::<Vec<u32>>::new((0..12).map(|_| vec![1; 1000]), &bench.transfer, &bench.stream, 1).unwrap();
    batches.next().unwrap().unwrap();
    allocator.sleep(Contents::Discard).unwrap();
    drop(batches);
    allocator.wake().unwrap();
    drop(seen);
    bench.finish();
}

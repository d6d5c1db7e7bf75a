//! Transfers and an allocator that sleeps: pending transfers are enqueued first, and none is lost.

use std::thread;

use aquifer::tensor::To;
use aquifer::transfer::{Batch, Prefetcher, Spiller, Transfer};
use aquifer::{Error, Pending, Tensor};
use aquifer_tests::prelude::*;
use aquifer_tests::random::pattern;

use super::{Bench, to_device, to_vec};

const LEN: usize = 12 << 20;

/// Waits until the transfers under way are enqueued.
fn patient() -> SleepOptions {
    SleepOptions::all(Contents::SaveToHost).waiting(Duration::MAX)
}

#[test]
fn pending_transfers_are_enqueued_before_the_memory_goes() {
    let bench = Bench::new();
    let data = pattern(1, LEN);
    let allocator = bench.transfer.allocator().clone();
    let mut other: Buffer<u8> = allocator.alloc(data.len(), &bench.stream).unwrap();
    let begun = to_device(&bench.transfer, data.clone(), &bench.stream).unwrap();
    let filled = other.upload(data.clone(), &bench.transfer).unwrap();
    assert!(allocator.sleep(patient()).unwrap() > 0);
    allocator.wake().unwrap();
    let buffer = begun.wait().unwrap();
    filled.wait().unwrap();
    for buffer in [&buffer, &other] {
        let read = to_vec(&bench.transfer, buffer).unwrap();
        allocator.sleep(patient()).unwrap();
        assert!(read.wait().unwrap() == data);
        allocator.wake().unwrap();
    }
    drop((buffer, other));
    bench.finish();
}

#[test]
fn refusing_to_spill_while_it_falls_asleep_is_no_failure_to_spill() {
    let bench = Bench::new();
    let allocator = bench.transfer.allocator().clone();
    let spiller = Spiller::new(&bench.transfer, 0).unwrap();
    let spillable = spiller.add(allocator.alloc::<u8>(32 << 20, &bench.stream).unwrap(), 0).unwrap();
    let awake = allocator.keep_awake().unwrap();
    thread::scope(|scope| {
        let falling = scope.spawn(|| allocator.sleep(patient()).unwrap());
        while !allocator.is_asleep() {
            thread::yield_now();
        }
        let refused = scope.spawn(|| allocator.alloc_bytes(1 << 40, &bench.stream).unwrap_err());
        assert!(matches!(refused.join().unwrap(), AllocError::Asleep));
        drop(awake);
        falling.join().unwrap();
    });
    let stats = spiller.stats();
    assert_eq!((stats.spills, stats.failures), (0, 0));
    let asleep = spillable.spill().unwrap_err();
    assert!(asleep.is_asleep(), "{asleep:?}");
    allocator.wake().unwrap();
    assert_eq!(spillable.spill().unwrap(), 32 << 20);
    drop((spillable, spiller));
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
            allocator.sleep(patient()).unwrap();
        }
        match batches.next() {
            None => break,
            Some(Ok(batch)) => seen.push(batch),
            Some(Err(Error::Alloc(AllocError::Asleep))) => {
                refused += 1;
                allocator.wake().unwrap();
            }
            Some(Err(error)) => panic!("{error}"),
        }
    }
    assert_eq!(refused, 1);
    for (number, batch) in (0..12).zip(&seen) {
        assert!(batch.to_vec(&bench.transfer).unwrap().iter().all(|&value| value == number));
    }
    assert_eq!(seen.len(), 12);
    // One that is dropped meanwhile does not wait for that to end.
    let mut batches =
        Prefetcher::<Vec<u32>>::new((0..12).map(|_| vec![1; 1000]), &bench.transfer, &bench.stream, 1).unwrap();
    drop(batches.next().unwrap().unwrap());
    allocator.sleep(patient()).unwrap();
    drop(batches);
    allocator.wake().unwrap();
    drop(seen);
    bench.finish();
}

/// A batch that is converted on the device once it has arrived there.
struct Widened(Tensor);

impl Batch for Widened {
    type OnDevice = Tensor;

    fn send(self, to: &Transfer) -> Result<Pending<Tensor>, Error> {
        let wide = Tensor::from_vec(vec![0_f64], &[1])?.dtype();
        self.0.to_with(to, To::new().dtype(wide))
    }
}

#[test]
fn a_batch_that_arrived_before_its_memory_went_is_had_later() {
    let bench = Bench::new();
    let allocator = bench.transfer.allocator().clone();
    let source = (0..4_u8).map(|batch| Widened(Tensor::from_vec(vec![f32::from(batch); 300_000], &[300_000]).unwrap()));
    let mut batches = Prefetcher::new(source, &bench.transfer, &bench.stream, 2).unwrap();
    let mut sums = Vec::new();
    let mut asleep = false;
    loop {
        if !asleep {
            allocator.sleep(patient()).unwrap();
        }
        match batches.next() {
            None => break,
            Some(Ok(batch)) => sums.push(batch.sum(&bench.stream).unwrap().item::<f64>().unwrap()),
            Some(Err(Error::Alloc(AllocError::Asleep))) => allocator.wake().unwrap(),
            Some(Err(error)) => panic!("{error}"),
        }
        asleep = !asleep;
    }
    assert_eq!(sums, [0.0, 3e5, 6e5, 9e5]);
    drop(batches);
    bench.finish();
}

#[test]
fn a_thread_with_a_wake_lock_does_not_wait_for_a_batch_that_cannot_come() {
    let bench = Bench::new();
    let allocator = bench.transfer.allocator().clone();
    let mut batches =
        Prefetcher::<Vec<u32>>::new((0..9).map(|_| vec![1; 1000]), &bench.transfer, &bench.stream, 1).unwrap();
    drop(batches.next().unwrap().unwrap());
    thread::scope(|scope| {
        let awake = allocator.keep_awake().unwrap();
        let sleeper = scope.spawn(|| allocator.sleep(patient()).unwrap());
        while !allocator.is_asleep() {
            thread::yield_now();
        }
        let refused = (0..9).find_map(|_| batches.next().unwrap().err());
        assert!(matches!(refused, Some(Error::Alloc(AllocError::Asleep))));
        drop(awake);
        sleeper.join().unwrap();
    });
    allocator.wake().unwrap();
    let rest = batches.by_ref().inspect(|batch| assert!(batch.is_ok())).count();
    assert!((1..9).contains(&rest), "{rest}");
    drop(batches);
    bench.finish();
}

//! The order, the bound and the release of batches.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aquifer_device::{Code, Device, RequestError};
use aquifer_kernels::Kernels;
use aquifer_sim::{Fault, SimConfig, SimDriver};
use aquifer_transfer::Direction;
use proptest::prelude::*;

use super::*;
use crate::allocator::Allocator;
use crate::buffer::Buffer;
use crate::tensor::Place;
use crate::transfer::tests::assert_unused;
use crate::{PinnedBuffer, Tensor};

struct Stand {
    driver: Arc<SimDriver>,
    device: Device,
    transfer: Transfer,
    stream: Stream,
    kernels: Kernels,
}

fn stand(config: SimConfig) -> Stand {
    let driver = SimDriver::new(config);
    let device = Device::new(driver.clone());
    let transfer = Transfer::new(&Allocator::new(&device, "quarantine_mb:0").unwrap()).unwrap();
    let (stream, kernels) = (device.stream().unwrap(), transfer.allocator().kernels().unwrap());
    Stand { driver, device, transfer, stream, kernels }
}

impl Stand {
    /// Asserts that nothing raced and that all memory came back.
    fn settled(self) {
        self.device.synchronize().unwrap();
        assert_eq!(self.device.driver().take_violation(), None);
        assert_eq!(self.transfer.allocator().memory_allocated(), 0);
        assert_unused(&self.transfer);
    }
}

fn steady() -> SimConfig {
    SimConfig::default().jitter(false)
}

#[test]
fn batches_arrive_in_order_and_intact() {
    let stand = stand(SimConfig::default().seed(3));
    let source = (0..50u32).map(|n| (vec![n; 3000], Some(vec![n + 1; 10]), [vec![n as f32; 5], vec![0.5f32]]));
    let mut count = 0;
    for (n, batch) in (0u32..).zip(Prefetcher::new(source, &stand.transfer, &stand.stream, 3).unwrap()) {
        let (a, b, c) = batch.unwrap();
        assert_eq!(a.to_vec(&stand.transfer).unwrap(), vec![n; 3000]);
        assert_eq!(b.unwrap().to_vec(&stand.transfer).unwrap(), vec![n + 1; 10]);
        assert_eq!(c[0].to_vec(&stand.transfer).unwrap(), vec![n as f32; 5]);
        count += 1;
    }
    assert_eq!(count, 50);
    stand.settled();
}

/// Later work on a batch does not run on the stream that fetches the next ones.
#[test]
fn tensors_of_batches_are_not_bound_to_a_stream() {
    let stand = stand(steady());
    let source = [Tensor::scalar(1u8).unwrap()];
    for batch in Prefetcher::new(source, &stand.transfer, &stand.stream, 2).unwrap() {
        let Place::Device(transfer) = batch.unwrap().place() else { panic!("it is on the device") };
        let [upload, download] = [Direction::Upload, Direction::Download].map(|way| transfer.next_stream(way).id());
        assert_ne!(upload, download);
    }
    stand.settled();
}

/// Neither a host that runs ahead of the device nor a fast source makes more batches than the ones
/// ahead and the one in use.
#[test]
fn memory_is_bounded_though_the_host_runs_ahead() {
    let stand = stand(steady());
    let bytes = 4 << 20;
    let source = (0..40u8).map(move |n| vec![n; bytes]);
    for batch in Prefetcher::new(source, &stand.transfer, &stand.stream, 2).unwrap() {
        let mut batch = batch.unwrap();
        stand.kernels.spin(&stand.stream, Duration::from_millis(20)).unwrap();
        stand.kernels.fill(&stand.stream, &mut batch, 1u8).unwrap();
        // Not the peak, which is only a bound where several threads are at work.
        let allocated = stand.transfer.allocator().memory_allocated();
        assert!(allocated <= 3 * bytes as u64, "{allocated}");
    }
    let reserved = stand.transfer.allocator().stats().to_map()["reserved_bytes.all.peak"];
    assert!(reserved <= 4 * bytes as i64 + (2 << 20), "{reserved}");
    stand.settled();
}

/// Large numbers cost no memory, and 0 means 1.
#[test]
fn any_number_of_batches_ahead_is_accepted() {
    let stand = stand(steady());
    for ahead in [0, 1, AHEAD_MAX + 1, usize::MAX / 2, usize::MAX] {
        let source = (0..5u32).map(|n| vec![n; 10]);
        let batches = Prefetcher::new(source, &stand.transfer, &stand.stream, ahead).unwrap();
        assert_eq!(batches.map(Result::unwrap).count(), 5, "{ahead}");
    }
    stand.settled();
}

#[test]
fn errors_and_panics_of_the_source_arrive_in_its_order() {
    let stand = stand(steady());
    let source = (0..10u32).map(|n| match n {
        3 | 5 => Err(format!("no batch {n}")),
        8 => panic!("broken at {n}"),
        n => Ok(vec![n; 100]),
    });
    let prefetcher = Prefetcher::try_new(source, &stand.transfer, &stand.stream, 2).unwrap();
    let texts: Vec<String> = prefetcher
        .map(|batch| match batch {
            Ok(batch) => batch.slice(7..=7).item(&stand.transfer).unwrap().to_string(),
            Err(error) => error.to_string(),
        })
        .collect();
    let failed = |n: u32| format!("the source of batches failed: no batch {n}");
    assert_eq!(
        texts,
        ["0", "1", "2", &failed(3), "4", &failed(5), "6", "7", "the source of batches panicked: broken at 8"]
    );
    stand.settled();
}

#[test]
fn waits_for_a_slow_source_are_counted() {
    let stand = stand(steady());
    let (give, take) = bounded::<Vec<u8>>(0);
    let mut prefetcher = Prefetcher::new(take, &stand.transfer, &stand.stream, 2).unwrap();
    let feeder = std::thread::spawn(move || {
        while give.send(vec![1; 10]).is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    // In any schedule the consumer waits at some point.
    while prefetcher.starved() == 0 {
        drop(prefetcher.next().unwrap().unwrap());
    }
    drop(prefetcher);
    feeder.join().unwrap();
    stand.settled();
}

/// A source that counts its batches, and the dropped ones.
struct Counted {
    left: u32,
    dropped: Arc<AtomicU64>,
}

impl Iterator for Counted {
    type Item = Vec<u32>;

    fn next(&mut self) -> Option<Vec<u32>> {
        self.left = self.left.checked_sub(1)?;
        Some(vec![self.left; 20_000])
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_prefetcher_can_be_dropped_at_any_point() {
    for taken in [0usize, 1, 2, 5, 19, 20] {
        let stand = stand(SimConfig::default().seed(taken as u64));
        let dropped = Arc::new(AtomicU64::new(0));
        let source = Counted { left: 20, dropped: dropped.clone() };
        let mut prefetcher = Prefetcher::new(source, &stand.transfer, &stand.stream, 3).unwrap();
        for _ in 0..taken {
            let mut batch = prefetcher.next().unwrap().unwrap();
            stand.kernels.fill(&stand.stream, &mut batch, 1u32).unwrap();
        }
        drop(prefetcher);
        // The thread may still return from the source, and then drops its batch.
        while dropped.load(Ordering::SeqCst) == 0 || Arc::strong_count(&dropped) > 1 {
            std::thread::yield_now();
        }
        stand.device.synchronize().unwrap();
        assert_eq!(stand.device.driver().take_violation(), None);
    }
}

/// A source that never returns does not block the drop.
#[test]
fn a_source_that_hangs_blocks_no_drop() {
    let stand = stand(steady());
    let (give, take) = unbounded::<Vec<u8>>();
    give.send(vec![1; 10]).unwrap();
    let mut prefetcher = Prefetcher::new(take, &stand.transfer, &stand.stream, 1).unwrap();
    assert!(prefetcher.next().unwrap().is_ok());
    drop(prefetcher); // while the thread waits in `take` for ever
    drop(give);
}

#[test]
fn a_lost_device_ends_prefetching_with_the_error() {
    for call in [1, 5, 20, 60] {
        let stand = stand(steady());
        let mut prefetcher =
            Prefetcher::new((0..1000u32).map(|n| vec![n; 100]), &stand.transfer, &stand.stream, 2).unwrap();
        stand.driver.inject(Fault::LostAt { nth: call });
        let lost = prefetcher.by_ref().find_map(Result::err);
        assert!(lost.as_ref().is_some_and(|error| error.is_device_lost()), "call {call}: {lost:?}");
        assert!(prefetcher.by_ref().take(10).all(|batch| batch.is_err()));
    }
}

/// A batch that can be sent, or not.
struct Picky(bool);

impl Batch for Picky {
    type OnDevice = Buffer<u8>;

    fn send(self, to: &Transfer) -> Result<Pending<Buffer<u8>>, Error> {
        if self.0 {
            vec![1u8; 100].send(to)
        } else {
            Err(Error::Request(RequestError::Unsupported { what: "another batch" }))
        }
    }
}

/// The slot of a batch that cannot be sent is for the next one. Otherwise all slots would be lost
/// at some point.
#[test]
fn a_batch_that_cannot_be_sent_frees_its_slot() {
    for ahead in [1, 2, 4] {
        let stand = stand(steady());
        let goes = move |n: usize| n > ahead + 3 && !n.is_multiple_of(3);
        let source = (0..20).map(move |n| Picky(goes(n)));
        let batches = Prefetcher::new(source, &stand.transfer, &stand.stream, ahead).unwrap();
        let went: Vec<bool> = batches.map(|batch| batch.is_ok()).collect();
        assert_eq!(went, (0..20).map(goes).collect::<Vec<_>>(), "{ahead} ahead");
        stand.settled();
    }
}

/// A panic while a batch is sent is the last item.
#[test]
fn a_batch_that_panics_is_the_last() {
    struct Panics;
    impl Batch for Panics {
        type OnDevice = Buffer<u8>;

        fn send(self, _: &Transfer) -> Result<Pending<Buffer<u8>>, Error> {
            panic!("no way")
        }
    }
    let stand = stand(steady());
    let batches = Prefetcher::new((0..5).map(|_| Panics), &stand.transfer, &stand.stream, 1).unwrap();
    let texts: Vec<String> = batches.map(|batch| batch.unwrap_err().to_string()).collect();
    assert_eq!(texts, ["a batch that was to be sent panicked: no way"]);
    stand.settled();
}

/// Even if the channel is full.
#[test]
fn a_panic_in_the_drop_of_a_source_is_the_last_item() {
    struct Panics(u8, Arc<AtomicU64>);
    impl Iterator for Panics {
        type Item = Vec<u8>;

        fn next(&mut self) -> Option<Vec<u8>> {
            self.0 += 1;
            (self.0 < 3).then(|| vec![self.0; 4])
        }
    }
    impl Drop for Panics {
        fn drop(&mut self) {
            self.1.store(1, Ordering::SeqCst);
            panic!("no way back")
        }
    }
    let (stand, dropped) = (stand(steady()), Arc::new(AtomicU64::new(0)));
    let source = Panics(0, dropped.clone());
    let batches = Prefetcher::new(source, &stand.transfer, &stand.stream, 2).unwrap();
    while dropped.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(10));
    let texts: Vec<String> =
        batches.map(|batch| batch.map_or_else(|error| error.to_string(), |_| String::new())).collect();
    assert_eq!(texts, ["", "", "the source of batches panicked: no way back"]);
    stand.settled();
}

#[test]
fn a_failed_copy_loses_its_batch_alone() {
    let stand = stand(steady());
    let (give, take) = unbounded::<Vec<u32>>();
    give.send(vec![0; 100]).unwrap();
    let mut prefetcher = Prefetcher::new(take, &stand.transfer, &stand.stream, 1).unwrap();
    let mut seen = Vec::new();
    let first = prefetcher.next().unwrap().unwrap();
    seen.push(first.slice(0..=0).item(&stand.transfer).unwrap());
    // The others come after the fault is set up, so it strikes the first of them.
    stand.driver.inject(Fault::Nth {
        operation: Some(aquifer_device::Operation::CopyToDevice),
        nth: 1,
        code: Code::OUT_OF_MEMORY,
    });
    (1..30).for_each(|n| give.send(vec![n; 100]).unwrap());
    drop(give);
    let mut failed = 0;
    for batch in prefetcher {
        match batch {
            Ok(batch) => seen.push(batch.slice(0..=0).item(&stand.transfer).unwrap()),
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                failed += 1;
            }
        }
    }
    assert_eq!((failed, seen), (1, (0..30).filter(|&n| n != 1).collect()));
    drop(first);
    stand.settled();
}

/// Steps take as long as the longer of computing and copying, and 5 % more at most.
#[test]
fn copies_and_computation_overlap() {
    for (compute, bytes) in [(Duration::from_millis(3), 32 << 20), (Duration::from_micros(200), 32 << 20)] {
        let stand = stand(steady());
        let steps = 12;
        let pool = stand.transfer.pinned().clone();
        // The source has its batches ready, as a loader with threads of its own has.
        let ready: Vec<PinnedBuffer<u8>> = (0..steps).map(|_| pool.alloc(bytes).unwrap()).collect();
        let copy_ns = {
            let timer = crate::transfer::Timer::start(&stand.device, &stand.stream).unwrap();
            let mut to =
                stand.transfer.allocator().alloc::<u8>(usize::try_from(bytes as u64).unwrap(), &stand.stream).unwrap();
            drop(to.upload(&ready[0], &stand.transfer.on(&stand.stream).unwrap()).unwrap());
            timer.stop(&stand.stream).unwrap().wait().unwrap().as_nanos()
        };
        let begun = stand.driver.now_ns();
        for batch in Prefetcher::new(ready, &stand.transfer, &stand.stream, 2).unwrap() {
            let _batch = batch.unwrap();
            stand.kernels.spin(&stand.stream, compute).unwrap();
        }
        stand.stream.synchronize().unwrap();
        let taken = u128::from(stand.driver.now_ns() - begun);
        let longer = compute.as_nanos().max(copy_ns);
        // The first copy and the last computation have nothing to hide behind.
        let ends = compute.as_nanos().min(copy_ns);
        assert!(
            taken <= (longer * steps as u128 + ends) * 105 / 100,
            "{taken} ns, {longer} ns a step, compute {compute:?}"
        );
        stand.settled();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// For any sizes, depth, failures and time of the drop: batches are intact, nothing races, and
    /// no memory stays.
    #[test]
    fn random_loops_deliver_the_batches_of_the_source(
        sizes in prop::collection::vec(0usize..6000, 0..12), ahead in 0usize..4, seed in 0u64..1000,
        taken in 0usize..14, errors in prop::collection::vec(0usize..12, 0..3), held in any::<bool>(),
    ) {
        let stand = stand(SimConfig::default().seed(seed));
        let items: Vec<Result<Vec<u32>, String>> = sizes.iter().enumerate()
            .map(|(n, &len)| if errors.contains(&n) { Err(n.to_string()) } else { Ok(vec![u32::try_from(n).unwrap(); len]) }).collect();
        let expected = items.clone();
        let mut prefetcher = Prefetcher::try_new(items, &stand.transfer, &stand.stream, ahead).unwrap();
        let mut kept = Vec::new();
        for (n, item) in expected.iter().take(taken).enumerate() {
            match (prefetcher.next().unwrap(), item) {
                (Ok(batch), Ok(item)) => {
                    prop_assert_eq!(&batch.to_vec(&stand.transfer).unwrap(), item);
                    if held && n % 2 == 0 {
                        kept.push((batch, item));
                    }
                }
                (Err(error), Err(text)) => prop_assert!(error.to_string().ends_with(text.as_str())),
                (got, item) => prop_assert!(false, "{n}: {got:?} {item:?}"),
            }
        }
        if taken >= expected.len() {
            prop_assert!(prefetcher.next().is_none());
        }
        drop(prefetcher);
        for (batch, item) in kept {
            prop_assert_eq!(&batch.to_vec(&stand.transfer).unwrap(), item);
        }
        stand.device.synchronize().unwrap();
        prop_assert_eq!(stand.device.driver().take_violation(), None);
    }
}

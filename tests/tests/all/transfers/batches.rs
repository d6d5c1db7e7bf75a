//! Batches of small copies and their results.

use aquifer::Error;
use aquifer::transfer::{Direction, TransferBatch, TransferError};
use aquifer_tests::prelude::*;
use aquifer_tests::random::pattern;
use proptest::prelude::*;

use super::{Bench, host, to_device};

/// Uploads to 20 buffers in a batch; each holds its number.
fn upload_numbered(bench: &Bench, batch: &mut TransferBatch) -> Vec<Buffer<u8>> {
    let mut upload = |number| {
        let mut buffer = bench.alloc(100);
        batch.upload(&[number; 100], &mut buffer).unwrap();
        buffer
    };
    (0..20).map(&mut upload).collect()
}

#[test]
fn downloads_are_read_once_their_batch_was_run() {
    let bench = Bench::new();
    let mut uploads = bench.transfer.batch();
    let buffers = upload_numbered(&bench, &mut uploads);
    uploads.run().unwrap().wait().unwrap();
    let (mut small, mut large) = (bench.transfer.batch(), bench.transfer.batch());
    let one = small.download(&buffers[7]).unwrap();
    let nothing = small.download(&bench.alloc(0)).unwrap();
    let all: Vec<_> = buffers.iter().map(|buffer| large.download(buffer).unwrap()).collect();
    drop(large.run().unwrap());
    for (number, download) in (0..).zip(&all) {
        assert_eq!(download.to_vec().unwrap(), [number; 100], "reading waits");
    }
    for unread in [&one, &nothing] {
        assert!(matches!(unread.to_vec(), Err(Error::Transfer(TransferError::NotRun))));
    }
    small.run().unwrap().wait().unwrap();
    assert_eq!((one.to_vec().unwrap(), nothing.to_vec().unwrap()), (vec![7; 100], Vec::new()));
    drop((buffers, one, nothing, all));
    bench.finish();
}

/// Drivers have no call for many copies there.
#[test]
fn a_batch_on_the_default_stream_does_the_same() {
    let bench = Bench::new();
    let on_default = bench.transfer.on(bench.device.default_stream()).unwrap();
    let mut batch = on_default.batch();
    let mut buffers = upload_numbered(&bench, &mut batch);
    for pair in 0..10 {
        let (from, to) = (buffers[pair].share(), &mut buffers[19 - pair]);
        batch.copy(&from, to).unwrap();
    }
    let all: Vec<_> = buffers.iter().map(|buffer| batch.download(buffer).unwrap()).collect();
    batch.run().unwrap().wait().unwrap();
    for (number, download) in (0..).zip(&all) {
        assert_eq!(download.to_vec().unwrap(), [number.min(19 - number); 100]);
    }
    drop((buffers, all));
    bench.finish();
}

#[test]
fn each_copy_of_a_batch_is_counted_also_where_several_become_one() {
    let bench = Bench::new();
    let (from, to) = (bench.alloc(90), bench.alloc(90));
    let part = |of: &Buffer<u8>, start: usize| of.slice(start..start + 30).share();
    let mut batch = bench.transfer.batch();
    // Adjacent pieces, and empty ones, which are no copies.
    let starts = [0, 30, 60];
    for start in starts {
        batch.upload(&[7; 30], &mut part(&from, start)).unwrap();
        batch.upload(&[], &mut bench.alloc(0)).unwrap();
    }
    starts.iter().for_each(|&start| batch.copy(&part(&from, start), &mut part(&to, start)).unwrap());
    for start in starts {
        batch.download(&part(&to, start)).unwrap();
    }
    let (added, pieces) = (bench.transfer.counters(), batch.pieces());
    assert_eq!((added.uploads.copies, added.on_device.copies, added.downloads.copies), (0, 0, 0));
    batch.run().unwrap().wait().unwrap();
    let counted = bench.transfer.counters();
    for traffic in [counted.uploads, counted.on_device, counted.downloads] {
        assert_eq!((traffic.copies, traffic.bytes), (3, 90));
    }
    assert_eq!(pieces, 3);
    drop((from, to));
    bench.finish();
}

/// Elements may have no bytes, but they have a number.
#[test]
fn elements_without_bytes_are_as_many_as_they_were() {
    let bench = Bench::new();
    let transfer = &bench.transfer;
    let buffer: Buffer<()> = transfer.allocator().alloc(5, &bench.stream).unwrap();
    let mut batch = transfer.batch();
    let download = batch.download(&buffer).unwrap();
    batch.run().unwrap().wait().unwrap();
    assert_eq!(download.to_vec().unwrap().len(), 5);
    assert_eq!(buffer.to_vec(&transfer).unwrap().len(), 5);
    assert_eq!(transfer.pinned().register(vec![(); 5]).unwrap().into_vec().unwrap().len(), 5);
    assert_eq!(transfer.pinned().alloc::<()>(5).unwrap().into_vec().unwrap().len(), 5);
    let refused = aquifer::transfer::Spiller::new(transfer, 0).unwrap().add(buffer, 0).map(drop).unwrap_err();
    assert!(matches!(refused, Error::Request(RequestError::Unsupported { .. })), "{refused}");
    bench.finish();
}

#[test]
fn a_batch_does_without_the_call_for_many_copies_where_that_fails() {
    let bench = Bench::new();
    bench.driver.inject(Fault::Nth { operation: Some(Operation::CopyBatch), nth: 1, code: Code::NOT_SUPPORTED });
    let mut uploads = bench.transfer.batch();
    let buffers = upload_numbered(&bench, &mut uploads);
    uploads.run().unwrap().wait().unwrap();
    let mut downloads = bench.transfer.batch();
    let all: Vec<_> = buffers.iter().map(|buffer| downloads.download(buffer).unwrap()).collect();
    downloads.run().unwrap().wait().unwrap();
    for (number, download) in (0..).zip(&all) {
        assert_eq!(download.to_vec().unwrap(), [number; 100]);
    }
    drop((buffers, all));
    bench.finish();
}

#[test]
fn small_blocks_are_copied_within_the_device_by_one_call() {
    let bench = Bench::new();
    let stream = bench.device.stream().unwrap();
    let bytes: Vec<u8> = (0..100u8).flat_map(|block| [block; 1000]).collect();
    let from = to_device(&bench.transfer, bytes, &stream).unwrap().wait().unwrap();
    let to = to_device(&bench.transfer, vec![255u8; 100_000], &stream).unwrap().wait().unwrap();
    let mut batch = bench.transfer.batch();
    // Every other block, from the last one on, to the same number of blocks side by side.
    for (number, block) in (0..100).rev().step_by(2).enumerate() {
        let (start, at) = (block * 1000, number * 1000);
        let mut part = to.slice(at..at + 1000).share();
        batch.copy(&from.slice(start..start + 1000), &mut part).unwrap();
    }
    assert_eq!(batch.pieces(), 50);
    // Any call for a copy of its own would fail.
    bench.driver.inject(Fault::Nth { operation: Some(Operation::CopyOnDevice), nth: 1, code: Code(999) });
    batch.run().unwrap().wait().unwrap();
    bench.driver.clear_faults();
    let counted = bench.transfer.counters().on_device;
    assert_eq!((counted.copies, counted.bytes), (50, 50_000));
    let copied = bench.read(&to);
    assert!((0..50).all(|number| copied[number * 1000..][..1000] == [99 - 2 * u8::try_from(number).unwrap(); 1000]));
    assert!(copied[50_000..].iter().all(|&byte| byte == 255));
    drop((from, to));
    bench.finish();
}

#[test]
fn a_batch_refuses_ends_that_do_not_fit_and_stays_as_it_was() {
    let (bench, other) = (Bench::new(), Bench::new());
    let (buffer, mut elsewhere) = (bench.alloc(100), other.alloc(10));
    let part = |range: std::ops::Range<usize>| buffer.slice(range).share();
    let mut batch = bench.transfer.batch();
    for (from, to) in [(0..10, 9..19), (9..19, 0..10), (5..15, 5..15)] {
        let refused = batch.copy(&part(from.clone()), &mut part(to.clone()));
        assert!(matches!(refused, Err(Error::Transfer(TransferError::Overlap { bytes: 10 }))), "{refused:?}");
        let refused = bench.transfer.copy(&part(from), &mut part(to)).map(drop);
        assert!(matches!(refused, Err(Error::Transfer(TransferError::Overlap { bytes: 10 }))), "{refused:?}");
    }
    let refused = batch.copy(&part(0..10), &mut part(10..21));
    assert!(matches!(refused, Err(Error::Transfer(TransferError::LengthMismatch { from: 10, to: 11 }))), "{refused:?}");
    assert!(matches!(batch.copy(&part(0..10), &mut elsewhere), Err(Error::Request(RequestError::WrongDevice { .. }))));
    assert!(matches!(batch.copy(&elsewhere, &mut part(0..10)), Err(Error::Request(RequestError::WrongDevice { .. }))));
    batch.copy(&part(7..7), &mut part(7..7)).unwrap();
    assert_eq!(batch.pieces(), 0);
    batch.run().unwrap().wait().unwrap();
    drop((buffer, elsewhere));
    bench.finish();
    other.finish();
}

/// A copy of a kind (upload, within the device, download) between two parts of a buffer: where each
/// begins, and their length.
type Step = (Direction, u64, u64, u64);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kinds =
        prop::sample::select(vec![Direction::Upload, Direction::OnDevice, Direction::OnDevice, Direction::Download]);
    // Some go on where the last one ends, at both ends.
    let steps = prop::collection::vec((kinds, any::<bool>(), 0u64..900, 0u64..900, 1u64..60), 1..40);
    steps.prop_map(|steps| {
        let mut last = (Direction::Upload, 0, 0, 0);
        let steps = steps.into_iter().map(|(kind, goes_on, from, to, bytes)| {
            last = if goes_on { (last.0, last.1 + last.3, last.2 + last.3, bytes) } else { (kind, from, to, bytes) };
            last
        });
        steps.filter(|(_, from, to, bytes)| from.abs_diff(*to) >= *bytes && from.max(to) + bytes <= 1000).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// Blocks that are written over each other and read, in one buffer.
    #[test]
    fn copies_in_a_batch_do_the_same_as_one_by_one(steps in steps(), seed in 0..1000u64) {
        let bench = Bench::seeded(seed);
        let mut buffer = bench.alloc(1000);
        let (mut expected, sent) = (pattern(seed, 1000), pattern(seed + 1, 1000));
        let mut batch = bench.transfer.batch();
        batch.upload(&expected, &mut buffer).unwrap();
        let mut downloads = Vec::new();
        for &(kind, from, to, bytes) in &steps {
            let (read, written) = (host(from)..host(from + bytes), host(to)..host(to + bytes));
            let (source, mut target) = (buffer.slice(read.clone()).share(), buffer.slice(written.clone()).share());
            match kind {
                Direction::Upload => {
                    batch.upload(&sent[read.clone()], &mut target).unwrap();
                    expected[written].copy_from_slice(&sent[read]);
                }
                Direction::Download => downloads.push((batch.download(&source).unwrap(), expected[read].to_vec())),
                _ => {
                    batch.copy(&source, &mut target).unwrap();
                    expected.copy_within(read, written.start);
                }
            }
        }
        downloads.push((batch.download(&buffer).unwrap(), expected));
        batch.run().unwrap().wait().unwrap();
        for (download, expected) in downloads {
            prop_assert!(download.to_vec().unwrap() == expected, "{:?}", steps);
        }
        drop(buffer);
        bench.finish();
    }
}

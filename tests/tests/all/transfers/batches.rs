//! Batches of small copies: whose results are whose.

use aquifer_allocator::DeviceBuffer;
use aquifer_device::sim::Fault;
use aquifer_device::{Code, Operation};
use aquifer_transfer::TransferError;

use super::Bench;

#[test]
fn results_are_read_for_downloads_of_their_own_batch_alone() {
    let bench = Bench::new();
    let mut buffers: Vec<DeviceBuffer<u8>> = (0..20).map(|_| bench.alloc(100)).collect();
    let mut uploads = bench.transfer.batch();
    for (number, buffer) in buffers.iter_mut().enumerate() {
        uploads.upload(&[u8::try_from(number).unwrap(); 100], buffer).unwrap();
    }
    uploads.run().unwrap().wait().unwrap();
    let (mut small, mut large) = (bench.transfer.batch(), bench.transfer.batch());
    let one = small.download(&buffers[7]).unwrap();
    let nothing = small.download(&bench.alloc(0)).unwrap();
    let all: Vec<_> = buffers.iter().map(|buffer| large.download(buffer).unwrap()).collect();
    let (small, large) = (small.run().unwrap().wait().unwrap(), large.run().unwrap().wait().unwrap());
    assert_eq!((small.read(&one).unwrap(), small.read(&nothing).unwrap()), (vec![7; 100], Vec::new()));
    for (number, download) in (0..).zip(&all) {
        assert_eq!(large.read(download).unwrap(), [number; 100]);
        assert!(matches!(small.read(download), Err(TransferError::OtherBatch)));
    }
    assert!(matches!(large.read(&one), Err(TransferError::OtherBatch)));
    assert!(matches!(large.read(&nothing), Err(TransferError::OtherBatch)));
    drop((buffers, small, large));
    bench.finish();
}

#[test]
fn a_batch_does_without_the_call_for_many_copies_where_that_fails() {
    let bench = Bench::new();
    bench.driver.inject(Fault::Nth { operation: Some(Operation::CopyBatch), nth: 1, code: Code::NOT_SUPPORTED });
    let mut buffers: Vec<DeviceBuffer<u8>> = (0..20).map(|_| bench.alloc(100)).collect();
    let mut uploads = bench.transfer.batch();
    for (number, buffer) in buffers.iter_mut().enumerate() {
        uploads.upload(&[u8::try_from(number).unwrap(); 100], buffer).unwrap();
    }
    uploads.run().unwrap().wait().unwrap();
    assert_eq!(bench.transfer.batch_calls_pay_below().unwrap(), None);
    let mut downloads = bench.transfer.batch();
    let all: Vec<_> = buffers.iter().map(|buffer| downloads.download(buffer).unwrap()).collect();
    let results = downloads.run().unwrap().wait().unwrap();
    for (number, download) in (0..).zip(&all) {
        assert_eq!(results.read(download).unwrap(), [number; 100]);
    }
    drop((buffers, results));
    bench.finish();
}

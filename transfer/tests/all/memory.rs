//! Pinned memory that the ring shares with others.

use std::sync::{Arc, Mutex};

use aquifer::kernels::DType;
use aquifer::memory::Config;
use aquifer::transfer::{Transfer, TransferConfig};
use aquifer::{Allocator, Error, Tensor};
use aquifer_device::{Device, DevicePtr, RequestError};
use aquifer_sim::{SimConfig, SimDriver};
use aquifer_transfer::{DevicePart, HostSource, TransferError};

use super::{content, runtime, sim, small, to_device};

/// The ring gives up its idle chunks before a request fails.
#[test]
fn an_idle_ring_gives_its_memory_back() {
    for stays in [false, true] {
        let sim = SimDriver::new(sim());
        let allocator = Allocator::new(&Device::new(sim.clone()), Config::default()).unwrap();
        let config = TransferConfig::default().pinned_limit(32 << 20).chunk_bytes(4 << 20).chunks(6).threads(2);
        let transfer = Transfer::with_config(&allocator, config).unwrap();
        let stream = transfer.device().stream().unwrap();
        let content = content(64 << 20, 1);
        let uploaded = to_device(&transfer, content.clone(), &stream).unwrap().wait().unwrap();
        if stays {
            assert!(transfer.pinned().alloc::<u8>(24 << 20).is_ok());
        } else {
            let ring = transfer.staging_stats();
            assert!(transfer.pinned().empty_cache().unwrap() >= ring.chunks * ring.chunk_bytes);
            assert_eq!(transfer.pinned().stats().allocated_bytes.current, 0);
        }
        assert_eq!(transfer.staging_stats().chunks, 0);
        // The next one makes its own again.
        assert!(uploaded.to_vec(&transfer).unwrap() == content);
        assert_eq!(sim.take_violations(), []);
    }
}

/// A pool with a limit serves small copies while the ring works on large ones.
#[test]
fn a_busy_ring_leaves_memory_to_small_copies() {
    /// Blocks readers until it is opened.
    struct Gate {
        bytes: u64,
        readers: Mutex<usize>,
        open: Mutex<bool>,
    }
    impl HostSource for Gate {
        fn bytes(&self) -> u64 {
            self.bytes
        }

        fn read(&self, _: u64, into: &mut [u8]) -> Result<(), TransferError> {
            *self.readers.lock().unwrap() += 1;
            while !*self.open.lock().unwrap() {
                std::thread::yield_now();
            }
            into.fill(3);
            Ok(())
        }
    }
    for limit in [512 << 10, 1 << 20, 4 << 20, 8 << 20, 30 << 20_u64] {
        let sim = SimDriver::new(sim());
        let allocator = Allocator::new(&Device::new(sim.clone()), Config::default()).unwrap();
        let config = TransferConfig::default().pinned_limit(limit).chunk_bytes(2 << 20).chunks(16).threads(4);
        let transfer = Transfer::with_config(&allocator, config).unwrap();
        let stream = transfer.device().stream().unwrap();
        let source = Arc::new(Gate { bytes: 64 << 20, readers: Mutex::new(0), open: Mutex::new(false) });
        let large = allocator.alloc::<u8>(usize::try_from(source.bytes).unwrap(), &stream).unwrap();
        let part = DevicePart { storage: large.storage(), ptr: large.ptr(), bytes: large.bytes() };
        let uploaded = transfer.upload_source(source.clone(), part).unwrap();
        while *source.readers.lock().unwrap() < 2 {
            std::thread::yield_now();
        }
        for n in 0..200u8 {
            let small = to_device(&transfer, vec![n; 100_000], &stream).unwrap().wait().unwrap();
            assert_eq!(small.slice(99_999..=99_999).item(&transfer).unwrap(), n);
        }
        let ring = transfer.staging_stats();
        assert!(ring.chunks >= 2 && ring.chunks * ring.chunk_bytes <= limit / 2, "{limit}: {ring:?}");
        *source.open.lock().unwrap() = true;
        uploaded.wait().unwrap();
        assert_eq!(large.slice(1 << 20..=1 << 20).item(&transfer).unwrap(), 3);
        assert_eq!(sim.take_violations(), []);
    }
}

#[test]
fn a_per_thread_stream_is_replaced() {
    let (sim, transfer) = runtime(small());
    let own = transfer.device().per_thread_stream();
    let content = content(300_000, 8);
    let pending = to_device(&transfer.on(&own).unwrap(), content.clone(), &own).unwrap();
    let back = pending.wait().unwrap().to_vec(&transfer.on(&own).unwrap()).unwrap();
    assert!(back == content && sim.violations().is_empty());
}

#[test]
fn reading_device_memory_larger_than_host_memory_is_an_error() {
    let bytes = 60 << 40;
    if Vec::<u8>::new().try_reserve_exact(60 << 40).is_ok() {
        eprintln!("skipped: this system promises any process any amount of memory");
        return;
    }
    let device = Device::new(SimDriver::new(SimConfig::new(bytes)));
    let allocator = Allocator::new(&device, Config::parse("backing:segments").unwrap()).unwrap();
    let transfer = Transfer::new(&allocator).unwrap();
    let buffer = allocator.alloc::<u32>(usize::try_from(bytes / 4).unwrap(), &device.stream().unwrap()).unwrap();
    let error = buffer.to_vec(&transfer).map(drop).unwrap_err();
    assert!(
        matches!(error, Error::Transfer(TransferError::OutOfHostMemory { bytes: asked, .. }) if asked == bytes),
        "{error}"
    );
    drop(buffer);
    let tensor = Tensor::empty(&[usize::try_from(bytes / 4).unwrap()], DType::F32, &transfer).unwrap();
    for error in [tensor.to_host().map(drop).unwrap_err(), tensor.to_vec::<f32>().map(drop).unwrap_err()] {
        assert!(error.is_out_of_memory(), "{error}");
    }
}

#[test]
fn parts_outside_of_their_storage_are_refused() {
    let (_, transfer) = runtime(small());
    let stream = transfer.device().stream().unwrap();
    let buffer = transfer.allocator().alloc_zeros::<u8>(1000, &stream).unwrap();
    let part = |start: i64, bytes: u64| {
        let ptr = DevicePtr(buffer.ptr().0.wrapping_add_signed(start));
        DevicePart { storage: buffer.storage(), ptr, bytes }
    };
    let copies: &aquifer_transfer::Transfer = &transfer;
    for (start, bytes) in [(0, 1001), (1, 1000), (-1, 10), (2000, 1), (1, u64::MAX)] {
        let refused = copies.download_new_vec::<u8>(part(start, bytes), 1).map(drop).unwrap_err();
        assert!(matches!(refused, TransferError::Request(RequestError::OutOfBounds { len: 1000, .. })), "{refused}");
    }
    let (copied, values) = copies.download_new_vec::<u8>(part(990, 10), 10).unwrap();
    copied.wait().unwrap();
    assert_eq!(values().unwrap(), [0; 10]);
    assert!(copies.download_new_vec::<u8>(part(5000, 0), 0).is_ok(), "nothing is copied");
}

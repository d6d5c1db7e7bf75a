//! Page-locked memory that the ring shares with others.

use super::*;

#[test]
fn a_job_fails_without_page_locked_memory() {
    let mut world = World::new(sim());
    world.pool = PinnedPool::new(&world.device, PinnedConfig::default().limit_bytes(4096)).unwrap();
    world.staging = Some(Staging::new(&world.pool, SMALL));
    let error = world.round_trip(&content(10, 0)).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    world.pool.set_limit(None);
    world.round_trip(&content(300_000, 0)).unwrap();
    world.end();
}

/// The ring gives up its idle chunks before a request fails.
#[test]
fn an_idle_ring_gives_its_memory_back() {
    for stays in [false, true] {
        let sim = SimDriver::new(sim());
        let allocator = Allocator::new(&Device::new(sim.clone()), Config::default()).unwrap();
        let config = TransferConfig::default()
            .pinned(PinnedConfig::default().limit_bytes(32 << 20))
            .staging(StagingConfig::default().chunk_bytes(4 << 20).chunks(6).threads(2));
        let transfer = Transfer::with_config(&allocator, config).unwrap();
        let stream = transfer.device().stream().unwrap();
        let content = content(64 << 20, 1);
        let uploaded = transfer.to_device(content.clone(), &stream).unwrap().wait().unwrap();
        if stays {
            assert!(transfer.pinned().alloc::<u8>(24 << 20).is_ok());
        } else {
            let ring = transfer.staging_stats();
            assert!(transfer.pinned().empty_cache().unwrap() >= ring.chunks * ring.chunk_bytes);
            assert_eq!(transfer.pinned().stats().allocated_bytes.current, 0);
        }
        assert_eq!(transfer.staging_stats().chunks, 0);
        // The next one makes its own again.
        assert!(transfer.to_vec(&uploaded).unwrap().wait().unwrap() == content);
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

        fn read(&self, _: u64, into: &mut [u8]) -> Result<(), Error> {
            *self.readers.lock() += 1;
            while !*self.open.lock() {
                std::thread::yield_now();
            }
            into.fill(3);
            Ok(())
        }
    }
    for limit in [512 << 10, 1 << 20, 4 << 20, 8 << 20, 30 << 20_u64] {
        let sim = SimDriver::new(sim());
        let allocator = Allocator::new(&Device::new(sim.clone()), Config::default()).unwrap();
        let config = TransferConfig::default()
            .pinned(PinnedConfig::default().limit_bytes(limit))
            .staging(StagingConfig::default().chunk_bytes(2 << 20).chunks(16).threads(4));
        let transfer = Transfer::with_config(&allocator, config).unwrap();
        let stream = transfer.device().stream().unwrap();
        let source = Arc::new(Gate { bytes: 64 << 20, readers: Mutex::new(0), open: Mutex::new(false) });
        let mut large = allocator.alloc::<u8>(usize::try_from(source.bytes).unwrap(), &stream).unwrap();
        let uploaded = crate::transfer::copy::stage_upload(&transfer, source.clone(), &mut large).unwrap();
        while *source.readers.lock() < 2 {
            std::thread::yield_now();
        }
        for n in 0..200u8 {
            let small = transfer.to_device(vec![n; 100_000], &stream).unwrap().wait().unwrap();
            assert_eq!(transfer.item(&small.slice(99_999..=99_999)).unwrap(), n);
        }
        let ring = transfer.staging_stats();
        assert!(ring.chunks >= 2 && ring.chunks * ring.chunk_bytes <= limit / 2, "{limit}: {ring:?}");
        *source.open.lock() = true;
        uploaded.wait().unwrap();
        assert_eq!(transfer.item(&large.slice(1 << 20..=1 << 20)).unwrap(), 3);
        assert_eq!(sim.take_violations(), []);
    }
}

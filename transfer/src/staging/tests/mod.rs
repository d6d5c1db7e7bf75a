//! The ring with real threads on a simulated device.

use std::sync::{Arc, mpsc};

use aquifer_allocator::{ALIGNMENT, Allocator, Storage};
use aquifer_device::fork::parking_lot::Mutex;
use aquifer_device::{AccessKind, Code, Device, RequestError, Stream, Tick};
use aquifer_sim::{Fault, SimConfig, SimDriver};
use proptest::prelude::*;

use super::*;
use crate::config::TransferConfig;
use crate::copy::DevicePart;
use crate::error::TransferError;
use crate::job::{Job, JobProgress};
use crate::pinned::PinnedPool;
use crate::rows::Rows;

const SMALL: TransferConfig =
    TransferConfig { pinned_limit: None, chunk_bytes: 64 << 10, chunks: 3, threads: 3, ring_bytes_max: 1 << 20 };

struct World {
    sim: Arc<SimDriver>,
    device: Device,
    allocator: Allocator,
    pool: PinnedPool,
    staging: Option<Staging>,
}

impl World {
    fn new(config: SimConfig) -> World {
        World::with(config, SMALL)
    }

    fn with(config: SimConfig, staging: TransferConfig) -> World {
        let sim = SimDriver::new(config);
        let device = Device::new(sim.clone());
        // As on a GPU: the next request gets what was just freed.
        let allocator = Allocator::new(&device, "quarantine_mb:0").unwrap();
        let pool = PinnedPool::new(&device);
        let staging = Some(Staging::new(&pool, staging));
        World { sim, device, allocator, pool, staging }
    }

    fn staging(&self) -> &Staging {
        self.staging.as_ref().unwrap()
    }

    fn buffer(&self, bytes: usize, stream: &Stream) -> Arc<Storage> {
        self.allocator.alloc_storage(bytes as u64, ALIGNMENT, stream).unwrap()
    }

    fn upload(
        &self,
        source: Arc<dyn HostSource>,
        to: &Arc<Storage>,
        stream: &Stream,
    ) -> Result<Arc<Job>, TransferError> {
        self.staging().begin(HostEndpoint::Source(source), device_end(to, AccessKind::Write)?, stream, stream, 0)
    }

    fn download(
        &self,
        from: &Arc<Storage>,
        to: Arc<dyn HostTarget>,
        stream: &Stream,
    ) -> Result<Arc<Job>, TransferError> {
        self.staging().begin(HostEndpoint::Target(to), device_end(from, AccessKind::Read)?, stream, stream, 0)
    }

    /// Uploads and downloads again; the bytes must be the same unless there is an error.
    fn round_trip(&self, content: &[u8]) -> Result<(), TransferError> {
        let (up, down) = (self.device.stream()?, self.device.stream()?);
        let buffer = self.allocator.alloc_storage(content.len() as u64, ALIGNMENT, &up)?;
        let upload = self.upload(Memory::new(content.to_vec()), &buffer, &up)?;
        let target = Memory::new(vec![0; content.len()]);
        let download = self.download(&buffer, target.clone(), &down)?;
        let downloaded = settled(&download);
        settled(&upload)?;
        downloaded?;
        assert_eq!(*target.0.lock(), content);
        Ok(())
    }

    /// Ends the staging; then no thread remains, no race was seen, and no memory is pinned.
    fn end(mut self) {
        self.close();
        self.device.synchronize().unwrap();
        self.pool.empty_cache().unwrap();
        let stats = self.pool.stats();
        assert_eq!((stats.active_bytes.current, stats.allocated_bytes.current), (0, 0), "{stats:?}");
        if let Some(violation) = self.sim.take_violations().first() {
            panic!("{violation}");
        }
    }

    /// Ends the staging, and waits for its threads.
    fn close(&mut self) {
        if let Some(staging) = self.staging.take() {
            let workers = staging.0.clone();
            drop(staging);
            workers.scheduler.join();
            assert_eq!(workers.scheduler.size().chunks, 0);
        }
    }
}

/// All of a buffer.
fn device_end(buffer: &Arc<Storage>, kind: AccessKind) -> Result<DeviceEndpoint, TransferError> {
    DeviceEndpoint::reserve(DevicePart::all(buffer), Rows::dense(buffer.bytes()), kind)
}

/// Waits for a job and its last copy.
fn settled(job: &Job) -> Result<(), TransferError> {
    match job.wait() {
        JobProgress::Enqueued(tick) => Ok(Tick::synchronize(&tick)?),
        JobProgress::Finished(result) => result,
        JobProgress::Working => unreachable!("it is settled"),
    }
}

struct Memory(Mutex<Vec<u8>>);

impl Memory {
    fn new(bytes: Vec<u8>) -> Arc<Memory> {
        Arc::new(Memory(Mutex::new(bytes)))
    }
}

impl HostSource for Memory {
    fn bytes(&self) -> u64 {
        self.0.lock().len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let start = usize::try_from(offset).unwrap();
        into.copy_from_slice(&self.0.lock()[start..start + into.len()]);
        Ok(())
    }

    fn phase(&self) -> u64 {
        self.0.lock().len() as u64 / 3
    }
}

impl HostTarget for Memory {
    fn bytes(&self) -> u64 {
        self.0.lock().len() as u64
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        let start = usize::try_from(offset).unwrap();
        self.0.lock()[start..start + from.len()].copy_from_slice(from);
        Ok(())
    }
}

/// A host end that does something else at an offset.
struct Odd<F>(u64, F);

impl<F: Fn(u64) -> Result<(), TransferError> + Send + Sync> HostSource for Odd<F> {
    fn bytes(&self) -> u64 {
        self.0
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        into.fill(1);
        self.1(offset)
    }
}

impl<F: Fn(u64) -> Result<(), TransferError> + Send + Sync> HostTarget for Odd<F> {
    fn bytes(&self) -> u64 {
        self.0
    }

    fn write(&self, offset: u64, _: &[u8]) -> Result<(), TransferError> {
        self.1(offset)
    }
}

fn content(bytes: usize, seed: usize) -> Vec<u8> {
    (seed..seed + bytes).map(|index| (index.wrapping_mul(0x9E37_79B1) >> 11).to_le_bytes()[0]).collect()
}

/// The name of the variable with the number of cores that tests assume, and so the most threads
/// that copy.
const THREADS: &str = "AQUIFER_TEST_STAGING_THREADS";

pub(crate) fn cores() -> Option<usize> {
    std::env::var(THREADS).ok()?.parse().ok()
}

/// All tests of the crate again, with rings of one thread, as on a machine with one core.
#[test]
fn all_tests_pass_with_one_staging_thread() {
    if cores().is_some() {
        return;
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap()).env(THREADS, "1").output().unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{text}\n{}", String::from_utf8_lossy(&child.stderr));
}

fn sim() -> SimConfig {
    SimConfig::new(1 << 30)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn concurrent_jobs_arrive_intact(
        seed in 0..1000u64,
        sizes in prop::collection::vec(1..700_000usize, 1..6),
        shape in (1..5usize, 1..4usize, 1..5usize),
    ) {
        let (pages, chunks, threads) = shape;
        let config = TransferConfig::default().chunk_bytes((pages * 32) << 10).chunks(chunks).threads(threads);
        let world = World::with(sim().seed(seed), config);
        std::thread::scope(|scope| {
            for (index, &bytes) in sizes.iter().enumerate() {
                let world = &world;
                scope.spawn(move || world.round_trip(&content(bytes, index)).unwrap());
            }
        });
        let stats = world.staging().stats();
        let bytes: usize = sizes.iter().sum();
        prop_assert_eq!((stats.uploaded_bytes, stats.downloaded_bytes), (bytes as u64, bytes as u64));
        let streams = 2 * sizes.len();
        prop_assert!(stats.chunks <= chunks as u64 && stats.threads <= (threads + streams) as u64, "{:?}", stats);
        world.end();
    }
}

#[test]
fn nothing_is_started_before_its_first_use_and_small_jobs_start_little() {
    let world = World::new(sim());
    let stats = world.staging().stats();
    assert_eq!((stats.threads, stats.chunks), (0, 0));
    let empty = world.buffer(0, world.device.default_stream());
    let job = world.upload(Memory::new(Vec::new()), &empty, world.device.default_stream()).unwrap();
    settled(&job).unwrap();
    assert_eq!(world.staging().stats().threads, 0);

    let stream = world.device.stream().unwrap();
    let buffer = world.buffer(1000, &stream);
    settled(&world.upload(Memory::new(vec![3; 1000]), &buffer, &stream).unwrap()).unwrap();
    let stats = world.staging().stats();
    assert_eq!((stats.threads, stats.chunks, stats.chunk_bytes), (1, 1, 64 << 10));
    world.end();
}

#[test]
fn every_driver_call_may_fail() {
    let content = content(400_000, 1);
    for nth in 1.. {
        // After a failed upload the download reads memory that was never written.
        let world = World::new(sim().checks(false));
        world.sim.inject(Fault::Nth { operation: None, nth, code: Code(999) });
        let failed = world.round_trip(&content);
        let (made, _) = (world.sim.calls_made(), world.sim.clear_faults());
        if let Err(error) = &failed {
            assert!(!error.is_device_lost(), "call {nth}: {error}");
        }
        world.round_trip(&content).unwrap_or_else(|error| panic!("after a failure of call {nth}: {error}"));
        world.end();
        if nth > made {
            assert!(failed.is_ok());
            break;
        }
    }
}

#[test]
fn the_device_may_be_lost_at_every_call() {
    let content = content(400_000, 2);
    for nth in (1..).step_by(3) {
        let mut world = World::new(sim());
        world.sim.inject(Fault::LostAt { nth });
        let failed = world.round_trip(&content);
        if failed.is_ok() {
            break;
        }
        assert!(failed.as_ref().is_err_and(TransferError::is_device_lost), "call {nth}: {failed:?}");
        assert!(world.round_trip(&content).is_err_and(|error| error.is_device_lost()), "call {nth}");
        world.close();
    }
}

#[test]
fn errors_and_panics_of_host_ends_fail_only_their_job() {
    let world = World::new(sim());
    let stream = world.device.stream().unwrap();
    let odd = |panics: bool| {
        move |offset: u64| match offset {
            0..200_000 => Ok(()),
            _ if panics => panic!("odd at {offset}"),
            _ => Err(TransferError::Request(RequestError::Unsupported { what: "something else" })),
        }
    };
    for panics in [false, true] {
        let buffers = [0; 3].map(|_| world.buffer(600_000, &stream));
        stream.fill(buffers[2].ptr(), 1, 600_000).unwrap();
        let jobs = [
            world.upload(Arc::new(Odd(600_000, odd(panics))), &buffers[0], &stream).unwrap(),
            world.upload(Memory::new(content(600_000, 7)), &buffers[1], &stream).unwrap(),
            world.download(&buffers[2], Arc::new(Odd(600_000, odd(panics))), &stream).unwrap(),
        ];
        let results = jobs.each_ref().map(|job| settled(job));
        for result in [&results[0], &results[2]] {
            match result {
                Err(TransferError::Panicked { what, message }) if panics => {
                    assert!(what.contains("of a transfer") && message.starts_with("odd at "), "{what}: {message}");
                }
                Err(TransferError::Request(RequestError::Unsupported { .. })) if !panics => {}
                other => panic!("{other:?}"),
            }
        }
        results[1].clone().unwrap();
    }
    world.end();
}

#[test]
fn a_source_that_blocks_stops_no_other_job_and_can_be_cancelled() {
    let world = World::new(sim());
    let stream = world.device.stream().unwrap();
    let (go, wait) = mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let buffer = world.buffer(600_000, &stream);
    let blocks = Odd(600_000, move |offset| {
        if offset == 0 {
            let _ = wait.lock().recv();
        }
        Ok(())
    });
    let job = world.upload(Arc::new(blocks), &buffer, &stream).unwrap();
    world.round_trip(&content(500_000, 3)).unwrap();
    job.cancel();
    go.send(()).unwrap();
    assert!(matches!(settled(&job), Err(TransferError::Cancelled)));
    // The reservation has ended, so the memory can be used.
    settled(&world.upload(Memory::new(vec![5; 600_000]), &buffer, &stream).unwrap()).unwrap();
    world.end();
}

#[test]
fn transfers_under_way_complete_when_the_ring_is_dropped() {
    let mut world = World::new(sim());
    let stream = world.device.stream().unwrap();
    let buffers: Vec<_> = (0..8).map(|_| world.buffer(500_000, &stream)).collect();
    let jobs: Vec<_> = (0..8)
        .map(|index| world.upload(Memory::new(content(500_000, index)), &buffers[index], &stream).unwrap())
        .collect();
    let workers = world.staging().0.clone();
    world.staging = None;
    for (index, job) in jobs.iter().enumerate() {
        settled(job).unwrap();
        let mut bytes = vec![0; 500_000];
        stream.download_blocking(&mut bytes, buffers[index].ptr()).unwrap();
        assert_eq!(bytes, content(500_000, index));
    }
    workers.scheduler.join();
    world.end();
}

#[test]
fn the_last_handle_may_be_dropped_by_a_thread_of_the_ring() {
    struct Holds(Mutex<Option<Staging>>);
    impl HostSource for Holds {
        fn bytes(&self) -> u64 {
            100_000
        }

        fn read(&self, _: u64, into: &mut [u8]) -> Result<(), TransferError> {
            into.fill(9);
            self.0.lock().take();
            Ok(())
        }
    }
    let mut world = World::new(sim());
    let stream = world.device.stream().unwrap();
    let buffer = world.buffer(100_000, &stream);
    let end = device_end(&buffer, AccessKind::Write).unwrap();
    let staging = world.staging.take().unwrap();
    let workers = staging.0.clone();
    let source = Arc::new(Holds(Mutex::new(None)));
    let mut held = source.0.lock();
    let job = staging.begin(HostEndpoint::Source(source.clone()), end, &stream, &stream, 0).unwrap();
    *held = Some(staging);
    drop(held);
    settled(&job).unwrap();
    workers.scheduler.join();
    world.end();
}

#[test]
fn a_job_fails_without_page_locked_memory() {
    let mut world = World::new(sim());
    world.pool = PinnedPool::new(&world.device);
    world.pool.set_limit(Some(4096));
    world.staging = Some(Staging::new(&world.pool, SMALL));
    let error = world.round_trip(&content(10, 0)).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    world.pool.set_limit(None);
    world.round_trip(&content(300_000, 0)).unwrap();
    world.end();
}

#[test]
fn a_file_that_shrinks_while_it_is_read_fails_its_transfer() {
    let path = std::env::temp_dir().join(format!("aquifer-staging-shrinks-{}", std::process::id()));
    std::fs::write(&path, [7; 200_000]).unwrap();
    let world = World::new(sim());
    let stream = world.device.stream().unwrap();
    let buffer = world.buffer(200_000, &stream);
    let source = open_file(&path, 0, 200_000).unwrap();
    std::fs::write(&path, [7; 1000]).unwrap();
    match settled(&world.upload(Arc::new(source), &buffer, &stream).unwrap()) {
        Err(TransferError::FileTooShort { len: 1000, offset: 0, bytes: 200_000, .. }) => {}
        other => panic!("{other:?}"),
    }
    settled(&world.upload(Memory::new(vec![1; 200_000]), &buffer, &stream).unwrap()).unwrap();
    std::fs::remove_file(&path).unwrap();
    world.end();
}

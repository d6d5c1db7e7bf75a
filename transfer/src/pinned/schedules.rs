//! Models of the pool and its memory under a scheduler that explores interleavings. Run by
//! `ci/schedules`.
//!
//! The simulated device reports a host that writes to memory while a copy is in flight, and a copy
//! that races with another one, with the two operations.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::{AccessKind, Device, DevicePtr, Stream};
use aquifer_sim::{SimConfig, SimDriver};
use shuttle::thread;

use super::{HostPart, PinnedPool};

const BYTES: usize = 4096;

/// Explores `model` at random, and with few but well-placed switches.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    let again = model.clone();
    shuttle::check_random(move || model(), 2000);
    shuttle::check_pct(move || again(), 1000, 3);
}

struct World {
    sim: Arc<SimDriver>,
    device: Device,
    pool: PinnedPool,
    memory: DevicePtr,
}

impl World {
    fn new(limit: u64) -> Arc<World> {
        let sim = SimDriver::new(SimConfig::new(1 << 24));
        let device = Device::new(sim.clone());
        let pool = PinnedPool::new(&device);
        pool.set_limit(Some(limit));
        let memory = device.alloc(16 * BYTES as u64).unwrap();
        Arc::new(World { sim, device, pool, memory })
    }

    /// Enqueues a copy of the part to a place that no other thread uses.
    #[allow(unsafe_code, reason = "raw driver copies, as the runtime makes them")]
    fn upload(&self, part: HostPart<'_>, place: u64, stream: &Stream) {
        let access = part.memory.access(stream, AccessKind::Read).unwrap();
        // SAFETY: until the copy is done, the access keeps all others from writing the part and
        // from reusing it.
        unsafe { stream.upload(self.memory.offset(place * BYTES as u64), part.ptr, part.bytes).unwrap() };
        drop(access);
        stream.tick().cover().unwrap();
    }

    /// Allocates, fills, uploads and drops, as a loader does.
    fn load(&self, place: u64, rounds: u8) {
        let stream = self.device.stream().unwrap();
        for round in 0..rounds {
            let Ok(mut buffer) = self.pool.alloc::<u8>(BYTES) else { continue };
            buffer.write().unwrap().fill(round);
            self.upload(buffer.as_slice().host(), place, &stream);
        }
    }

    fn check_over(&self) {
        self.device.synchronize().unwrap();
        self.pool.empty_cache().unwrap();
        assert_eq!(self.pool.stats().active_bytes.current, 0);
        assert_eq!(self.pool.reserved(), 0);
        let found = self.sim.violations();
        assert!(found.is_empty(), "{}", found[0]);
    }
}

fn spawn(world: &Arc<World>, run: impl FnOnce(&World) + Send + 'static) -> thread::JoinHandle<()> {
    let world = world.clone();
    thread::spawn(move || run(&world))
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn memory_in_flight_is_not_handed_to_another_thread() {
    explore(|| {
        let world = World::new(1 << 30);
        join([spawn(&world, |world| world.load(0, 2)), spawn(&world, |world| world.load(1, 2))]);
        world.check_over();
    });
}

#[test]
fn threads_that_grow_trim_and_wait_stay_below_the_limit() {
    explore(|| {
        let limit = 2 * BYTES as u64;
        let world = World::new(limit);
        let below = move |world: &World| assert!(world.pool.reserved() <= limit);
        join([
            spawn(&world, move |world| {
                world.load(0, 2);
                below(world);
            }),
            spawn(&world, move |world| {
                world.load(1, 2);
                below(world);
            }),
            spawn(&world, move |world| {
                world.pool.trim_to(BYTES as u64).unwrap();
                below(world);
            }),
        ]);
        world.check_over();
    });
}

/// Another thread notices that the copy is done, at any moment of a request that needs the whole
/// pool.
#[test]
fn blocks_that_become_available_during_a_request_are_not_missed() {
    explore(|| {
        let world = World::new(8 * BYTES as u64);
        let stream = world.device.stream().unwrap();
        world.sim.stall(stream.raw(), Duration::from_millis(1)).unwrap();
        world.upload(world.pool.alloc_zeroed::<u8>(BYTES).unwrap().as_slice().host(), 0, &stream);
        let learns = spawn(&world, |world| {
            world.device.synchronize().unwrap();
            world.pool.stats();
        });
        drop(world.pool.alloc::<u8>(8 * BYTES).unwrap());
        join([learns]);
        world.check_over();
    });
}

#[test]
fn a_buffer_that_several_threads_upload_is_written_after_all_of_them() {
    explore(|| {
        let world = World::new(1 << 30);
        let mut buffer = world.pool.alloc_zeroed::<u8>(BYTES).unwrap();
        let shared = Arc::new(buffer.as_slice().host().memory.clone());
        let threads = [0, 1].map(|place| {
            let memory = shared.clone();
            spawn(&world, move |world| {
                let stream = world.device.stream().unwrap();
                let part = HostPart { memory: &memory, ptr: memory.ptr, bytes: BYTES };
                world.upload(part, place, &stream);
            })
        });
        assert_eq!(buffer.read().unwrap()[0], 0);
        join(threads);
        buffer.write().unwrap().fill(1);
        drop((buffer, shared));
        world.check_over();
    });
}

#[test]
fn a_launch_and_a_borrow_of_the_host_see_each_other() {
    explore(|| {
        let world = World::new(1 << 30);
        let mut buffer = world.pool.alloc_zeroed::<u8>(BYTES).unwrap();
        let memory = buffer.as_slice().host().memory.clone();
        let launches = spawn(&world, move |world| {
            let stream = world.device.stream().unwrap();
            stream.fill(world.memory, 7, BYTES as u64).unwrap();
            let access = memory.access(&stream, AccessKind::Write).unwrap();
            if memory.refuse_borrowed(AccessKind::Write).is_ok() {
                #[allow(unsafe_code, reason = "a raw driver copy, as a graph makes it")]
                // SAFETY: the access keeps others from the memory until the copy is done.
                unsafe {
                    stream.download(memory.ptr, world.memory, BYTES).unwrap()
                };
            }
            drop(access);
            stream.synchronize().unwrap();
        });
        {
            let seen = buffer.read().unwrap();
            let before = seen[0];
            thread::yield_now();
            assert_eq!(seen[0], before, "nothing writes it meanwhile");
        }
        buffer.write().unwrap().fill(1);
        join([launches]);
        drop(buffer);
        world.check_over();
    });
}

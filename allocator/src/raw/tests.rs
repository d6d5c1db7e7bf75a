//! Raw pointers against the simulated device.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::{Device, DevicePtr, Stream};
use aquifer_sim::{SimConfig, SimDriver};

use crate::{AllocError, Allocator, owner_of};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(1);

struct World {
    sim: Arc<SimDriver>,
    device: Device,
    memory: Allocator,
}

fn world(bytes: u64, config: &str) -> World {
    let sim = SimDriver::new(SimConfig::new(bytes));
    let device = Device::new(sim.clone());
    let memory = Allocator::new(&device, config.parse::<crate::Config>().unwrap()).unwrap();
    World { sim, device, memory }
}

impl World {
    fn streams<const N: usize>(&self) -> [Stream; N] {
        std::array::from_fn(|_| self.device.stream().unwrap())
    }

    /// Keeps a stream busy for long, and has it write the memory then.
    fn fill_late(&self, ptr: DevicePtr, bytes: u64, stream: &Stream) {
        self.sim.stall(stream.raw(), LONG).unwrap();
        stream.fill(ptr, 1, bytes).unwrap();
    }

    /// The virtual time since a moment, in ns.
    fn since(&self, before: u64) -> Duration {
        Duration::from_nanos(self.sim.now_ns() - before)
    }

    fn assert_no_violation(&self) {
        self.device.synchronize().unwrap();
        assert_eq!(self.sim.violations(), []);
    }
}

#[test]
fn a_free_in_another_streams_order_waits_for_that_stream() {
    let world = world(64 * MIB, "");
    let [one, two] = world.streams();
    let ptr = world.memory.alloc_raw(MIB, &one).unwrap();
    two.wait_for(&one.tick()).unwrap();
    world.fill_late(ptr, MIB, &two);
    let before = world.sim.now_ns();
    world.memory.free_raw_on(ptr, &two).unwrap();
    assert_eq!(world.memory.memory_allocated(), 0);
    let other = world.memory.alloc_raw(MIB, &one).unwrap();
    assert_ne!(other, ptr, "its use may not be done");
    one.fill(other, 2, MIB).unwrap();
    assert!(world.since(before) < LONG, "nothing waits");
    world.assert_no_violation();
    world.memory.free_raw(other).unwrap();
    let again = [0; 2].map(|_| world.memory.alloc_raw(MIB, &one).unwrap());
    assert!(again.contains(&ptr), "all uses are done");
}

#[test]
fn a_free_in_another_streams_order_keeps_the_uses_of_others() {
    let world = world(64 * MIB, "");
    let [one, two, three] = world.streams();
    let ptr = world.memory.alloc_raw(MIB, &one).unwrap();
    for late in [&one, &three] {
        late.wait_for(&one.tick()).unwrap();
    }
    world.memory.record_stream_raw(ptr, &three).unwrap();
    world.fill_late(ptr, MIB, &three);
    world.memory.free_raw_on(ptr, &two).unwrap();
    for stream in [&one, &two] {
        let mine = world.memory.alloc_raw(MIB, stream).unwrap();
        stream.fill(mine, 2, MIB).unwrap();
    }
    world.assert_no_violation();
}

#[test]
fn a_free_in_the_order_of_its_own_stream_is_a_free() {
    let world = world(64 * MIB, "quarantine_mb:0");
    let [one] = world.streams();
    let ptr = world.memory.alloc_raw(MIB, &one).unwrap();
    world.memory.free_raw_on(ptr, &one).unwrap();
    assert_eq!(world.memory.alloc_raw(MIB, &one).unwrap(), ptr);
    assert!(world.memory.free_raw_on(DevicePtr(0), &one).is_ok());
}

#[test]
fn a_free_in_the_order_of_the_stream_that_had_the_memory_before_waits_for_it() {
    let world = world(64 * MIB, "backing:segments");
    let [one, two] = world.streams();
    let lent = world.memory.alloc_raw(40 * MIB, &one).unwrap();
    one.fill(lent, 1, 40 * MIB).unwrap();
    world.memory.free_raw(lent).unwrap();
    two.wait_for(&one.tick()).unwrap();
    let ptr = world.memory.alloc_raw(40 * MIB, &two).unwrap();
    assert_eq!(ptr, lent, "there is no other memory");
    one.wait_for(&two.tick()).unwrap();
    world.fill_late(ptr, 40 * MIB, &one);
    world.memory.free_raw_on(ptr, &one).unwrap();
    let again = world.memory.alloc_raw(40 * MIB, &two).unwrap();
    two.fill(again, 2, 40 * MIB).unwrap();
    world.assert_no_violation();
}

#[test]
fn a_free_that_is_refused_leaves_the_pointer_live() {
    let (ours, theirs) = (world(64 * MIB, ""), world(64 * MIB, ""));
    let ptr = ours.memory.alloc_raw(MIB, ours.device.default_stream()).unwrap();
    let refused = ours.memory.free_raw_on(ptr, theirs.device.default_stream());
    assert!(
        matches!(refused, Err(AllocError::Request(aquifer_device::RequestError::WrongDevice { .. }))),
        "{refused:?}"
    );
    let inside = ours.memory.free_raw_on(ptr.offset(512), ours.device.default_stream());
    assert!(matches!(inside, Err(AllocError::InvalidPointer { .. })), "{inside:?}");
    assert_eq!(ours.memory.size_of_raw(ptr).unwrap(), MIB);
    ours.memory.free_raw_on(ptr, ours.device.default_stream()).unwrap();
    let again = ours.memory.free_raw_on(ptr, ours.device.default_stream());
    assert!(matches!(again, Err(AllocError::InvalidPointer { .. })), "{again:?}");
}

/// Under each policy: memory that is in use is not given out, and is waited for rather than
/// refused.
#[test]
fn ready_memory_is_unused_and_is_waited_for_only_if_it_must() {
    // In quarantine, the memory of a pair would not be the next one's.
    for config in ["cross_stream:ready", "cross_stream:wait", "cross_stream:off", "backing:segments"] {
        let world = world(64 * MIB, &format!("quarantine_mb:0,{config}"));
        let [one, two] = world.streams();
        let busy = world.memory.alloc_raw(40 * MIB, &one).unwrap();
        world.fill_late(busy, 40 * MIB, &one);
        world.memory.free_raw(busy).unwrap();
        let before = world.sim.now_ns();
        let ready = world.memory.alloc_raw_ready(10 * MIB).unwrap();
        assert!(world.since(before) < LONG || config.ends_with("wait"), "{config}: other memory is there");
        two.fill(ready, 2, 10 * MIB).unwrap();
        let awaited = world.memory.alloc_raw_ready(40 * MIB).unwrap();
        assert!(world.since(before) >= LONG, "{config}: there is no other");
        world.device.default_stream().fill(awaited, 3, 40 * MIB).unwrap();
        world.assert_no_violation();
        [ready, awaited].iter().for_each(|&ptr| world.memory.free_raw(ptr).unwrap());
        let pairs = || {
            (0..10).for_each(|_| {
                let hit = world.memory.alloc_raw_ready(10 * MIB).unwrap();
                world.memory.free_raw(hit).unwrap();
            })
        };
        pairs();
        let calls = world.device.driver_calls();
        pairs();
        assert_eq!(world.device.driver_calls(), calls, "{config}: a hit makes no driver call");
    }
}

#[test]
fn the_owner_of_a_pointer_is_found_among_all_allocators() {
    let worlds = [world(64 * MIB, ""), world(1 << 30, "backing:segments")];
    let [one, two] = worlds[0].streams();
    let small: Vec<_> = (0..100).map(|_| worlds[0].memory.alloc_raw(1000, &one).unwrap()).collect();
    let large = worlds[0].memory.alloc_raw(10 * MIB + 1, &two).unwrap();
    for (ptr, bytes) in small.iter().map(|&ptr| (ptr, 1000)).chain([(large, 10 * MIB + 1)]) {
        for offset in [0, 1, bytes - 1] {
            let owner = owner_of(ptr.offset(offset)).unwrap();
            assert_eq!((owner.ptr, owner.bytes), (ptr, bytes));
            assert_eq!(owner.allocator.device().id(), worlds[0].device.id());
        }
        assert!(owner_of(ptr.offset(bytes)).is_none_or(|owner| owner.ptr != ptr), "{ptr} is over");
    }
    let handle = worlds[1].memory.alloc_bytes(600 * MIB, worlds[1].device.default_stream()).unwrap();
    assert!(owner_of(handle.ptr().offset(500 * MIB)).is_none(), "not a raw pointer");
    drop(handle);
    let far = worlds[1].memory.alloc_raw(600 * MIB, worlds[1].device.default_stream()).unwrap();
    let owner = owner_of(far.offset(500 * MIB)).unwrap();
    assert_eq!(owner.allocator.device().id(), worlds[1].device.id());
    owner.allocator.free_raw(owner.ptr).unwrap();
    assert!(owner_of(far.offset(500 * MIB)).is_none());
    assert!(owner_of(DevicePtr(0)).is_none());
}

#[test]
fn memory_of_a_closed_allocator_has_no_owner() {
    let world = world(64 * MIB, "");
    let ptr = world.memory.alloc_raw(MIB, world.device.default_stream()).unwrap();
    let owner = owner_of(ptr).unwrap();
    drop((world.memory, owner));
    assert!(owner_of(ptr).is_none());
}

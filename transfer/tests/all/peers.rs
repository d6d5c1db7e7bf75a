//! Copies between devices.

use std::sync::Arc;

use aquifer::transfer::{Region, Route, Transfer};
use aquifer::{Allocator, Buffer, Error};
use aquifer_allocator::{AccessGuard, Reservation};
use aquifer_device::{AccessKind, Code, Device, Operation, RequestError, Stream};
use aquifer_sim::{Fault, SimConfig, SimDriver};
use aquifer_transfer::{DevicePart, Elements};

use super::to_device;

/// Copies by two runtimes, and waits.
fn copy_from(transfer: &Transfer, peer: &Transfer, from: &Buffer<u32>, to: &mut Buffer<u32>) -> Result<Route, Error> {
    let part = |buffer: &Buffer<u32>| (buffer.storage().clone(), buffer.ptr(), buffer.bytes());
    let ((source, at, read), (target, to_at, written)) = (part(from), part(to));
    let (from_end, to_end) = (
        DevicePart { storage: &source, ptr: at, bytes: read },
        DevicePart { storage: &target, ptr: to_at, bytes: written },
    );
    let elements = Elements { size: 4, from: from.len(), to: to.len(), region: None };
    let (copied, route) = aquifer_transfer::Transfer::copy(transfer, peer, from_end, to_end, &elements)?;
    copied.wait()?;
    Ok(route)
}

const LEN: usize = 1 << 20;

struct World {
    sim: Arc<SimDriver>,
    transfer: Transfer,
    stream: Stream,
}

impl World {
    fn new(ordinal: u32) -> World {
        let sim = SimDriver::new(SimConfig::default().ordinal(ordinal));
        let device = Device::new(sim.clone());
        let transfer = Transfer::new(&Allocator::new(&device, "quarantine_mb:0").unwrap()).unwrap();
        World { sim, transfer, stream: device.stream().unwrap() }
    }

    fn fails(&self, operation: Operation) {
        self.sim.inject(Fault::Nth { operation: Some(operation), nth: 1, code: Code(999) });
    }

    fn reserved(&self) -> u64 {
        self.transfer.allocator().memory_reserved()
    }
}

/// Two devices, memory on the first, and the outcome of copying it to the second where streams
/// of the first cannot be ordered after the copy and so many ways to wait fail.
fn copied(ways: usize) -> ([World; 2], Buffer<u32>, Result<Vec<u32>, Error>) {
    let [one, two] = [0, 1].map(World::new);
    let content = vec![7u32; LEN];
    let from = to_device(&one.transfer, content, &one.stream).unwrap().wait().unwrap();
    let mut to = two.transfer.allocator().alloc(LEN, &two.stream).unwrap();
    one.fails(Operation::Wait);
    [Operation::SynchronizeEvent, Operation::Synchronize].into_iter().take(ways).for_each(|way| two.fails(way));
    let copied = copy_from(&two.transfer, &one.transfer, &from, &mut to);
    let result = copied.and_then(|_| to.to_vec(&two.transfer));
    ([one, two], from, result)
}

#[test]
fn a_copy_that_waits_for_one_end_does_not_hold_the_other() {
    for reserves_source in [false, true] {
        let [one, two] = [0, 1].map(World::new);
        let mut buffers = [&one, &two].map(|world| {
            let zeros = vec![0u32; LEN];
            to_device(&world.transfer, zeros, &world.stream).unwrap().wait().unwrap()
        });
        for source in [0, 1] {
            let [first, second] = &mut buffers;
            let (from, peer, to, own) =
                if source == 0 { (first, &one, second, &two) } else { (second, &two, first, &one) };
            let storages = [from.storage().clone(), to.storage().clone()];
            let (reserved, free) = if reserves_source { (0, 1) } else { (1, 0) };
            let stream = if (free == 0) == (source == 0) { &one.stream } else { &two.stream };
            let reservation = Reservation::acquire(&storages[reserved], AccessKind::Write).unwrap();
            std::thread::scope(|scope| {
                let copy = scope.spawn(|| copy_from(&own.transfer, &peer.transfer, from, to));
                // The thread that is to end the reservation needs the other end first. Were
                // that held, neither could go on.
                for _ in 0..1000 {
                    drop(AccessGuard::acquire(stream, &[(&storages[free], AccessKind::Write)]).unwrap());
                    std::thread::yield_now();
                }
                drop(reservation);
                assert_eq!(copy.join().unwrap().unwrap(), Route::Peer);
            });
        }
    }
}

#[test]
fn the_host_waits_for_a_copy_that_streams_cannot_be_ordered_after() {
    for ways in [0, 1] {
        let (worlds, from, result) = copied(ways);
        assert_eq!(result.unwrap(), vec![7; LEN]);
        drop(from);
        worlds[0].transfer.allocator().empty_cache().unwrap();
        assert_eq!(worlds[0].reserved(), 0);
        worlds.iter().for_each(|world| assert_eq!(world.sim.violations(), []));
    }
}

/// Whether memory of a device's allocator is still there.
fn is_kept(of: &World) -> bool {
    of.transfer.allocator().empty_cache().unwrap();
    of.reserved() >= LEN as u64 * 4
}

/// Also where no event covers the copy.
#[test]
fn the_source_of_a_copy_that_nothing_can_wait_for_is_never_freed() {
    for writes in [false, true] {
        let ([one, two], mut from, result) = copied(2);
        assert!(matches!(result, Err(Error::Device(_))), "{result:?}");
        if writes {
            one.transfer.allocator().kernels().unwrap().fill(&one.stream, &mut from, 9u32).unwrap();
            assert_eq!(from.to_vec(&one.transfer).unwrap(), vec![9; LEN]);
        }
        drop(from);
        two.transfer.synchronize().unwrap();
        assert!(is_kept(&one));
        let small = to_device(&one.transfer, vec![7u32; 10], &one.stream).unwrap().wait().unwrap();
        let mut to = two.transfer.allocator().alloc(10, &two.stream).unwrap();
        copy_from(&two.transfer, &one.transfer, &small, &mut to).unwrap();
        assert_eq!((one.sim.violations(), two.sim.violations()), (vec![], vec![]));
    }
    let [one, two] = [0, 1].map(World::new);
    let from = to_device(&one.transfer, vec![7u32; LEN], &one.stream).unwrap().wait().unwrap();
    let mut to = two.transfer.allocator().alloc(LEN, &two.stream).unwrap();
    two.sim.inject(Fault::Rate { operation: Some(Operation::Record), rate: 1.0, code: Code(999) });
    two.fails(Operation::Synchronize);
    let refused = copy_from(&two.transfer.on(&two.stream).unwrap(), &one.transfer, &from, &mut to);
    assert!(matches!(refused, Err(Error::Device(_))), "{refused:?}");
    two.sim.clear_faults();
    drop((from, to));
    assert!(is_kept(&one));
    assert_eq!((one.sim.violations(), two.sim.violations()), (vec![], vec![]));
}

/// Every shape of region, on the way of each route: gaps on one side, on both, none, repeated
/// elements, rows and single elements.
#[test]
fn regions_cross_between_devices_as_within_one() {
    let worlds = [0, 1].map(World::new);
    let [World { transfer: one, stream, .. }, World { transfer: two, stream: elsewhere, .. }] = &worlds;
    let from = to_device(one, (0..1000u32).collect::<Vec<_>>(), stream).unwrap().wait().unwrap();
    let regions = [
        Region { extents: &[10, 10], from_strides: &[10, 1], to_strides: &[10, 1] },
        Region { extents: &[10, 10], from_strides: &[100, 1], to_strides: &[10, 1] },
        Region { extents: &[10, 10], from_strides: &[10, 1], to_strides: &[100, 1] },
        Region { extents: &[4, 5, 6], from_strides: &[200, 30, 2], to_strides: &[1, 8, 50] },
        Region { extents: &[7, 9], from_strides: &[0, 1], to_strides: &[9, 1] },
        Region { extents: &[7, 9], from_strides: &[3, 0], to_strides: &[1, 7] },
        Region { extents: &[], from_strides: &[], to_strides: &[] },
        Region { extents: &[3, 0], from_strides: &[1, 1], to_strides: &[1, 1] },
    ];
    for region in &regions {
        let [mut expected, mut crossed] = [(one, stream), (two, elsewhere)]
            .map(|(transfer, stream)| to_device(transfer, vec![7u32; 1000], stream).unwrap().wait().unwrap());
        one.copy(region.of(&from), &mut expected).unwrap().wait().unwrap();
        let counted = || [one, two].map(|transfer| transfer.counters().on_device);
        let [at_source, mut here] = counted();
        let route = two.copy(region.of(&from), &mut crossed).unwrap().wait().unwrap();
        assert_eq!(route, Route::Peer);
        // Counted on the target's runtime, as one copy of its elements.
        let elements = region.extents.iter().product::<usize>() as u64;
        here.copies += elements.min(1);
        here.bytes += elements * 4;
        assert_eq!(counted(), [at_source, here], "{region:?}");
        let content = crossed.to_vec(&two).unwrap();
        assert_eq!(content, expected.to_vec(&one).unwrap(), "{region:?}");
    }
    let mut to = from.share();
    let beyond = Region { extents: &[11], from_strides: &[100], to_strides: &[1] };
    assert!(matches!(two.copy(beyond.of(&from), &mut to), Err(Error::Request(RequestError::WrongDevice { .. }))));
    let mut to = two.allocator().alloc::<u32>(11, elsewhere).unwrap();
    let refused = two.copy(beyond.of(&from), &mut to);
    assert!(matches!(refused, Err(Error::Request(RequestError::OutOfBounds { .. }))), "{refused:?}");
    worlds.iter().for_each(|world| assert_eq!(world.sim.take_violations(), []));
}

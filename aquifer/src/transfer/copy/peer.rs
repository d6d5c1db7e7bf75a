//! Copies between devices: by the driver where both are of one kind, else by way of the host. The
//! memory of each device has ticks of its own streams alone (invariant N5).

use std::fmt;

use aquifer_allocator::AccessGuard;
use aquifer_device::{AccessKind, DeviceError, Stream, Tick};
use bytemuck::Pod;

use super::memory::Owned;
use super::packed::{OnDevice, Packed};
use super::region::{Plan, Region};
use super::{host, on_device};
use crate::buffer::Buffer;
use crate::error::Error;
use crate::transfer::counters::Direction;
use crate::transfer::enqueue::{covered_tick, hold_off_captures};
use crate::transfer::host_memory;
use crate::transfer::pending::{OnStreams, Pending};
use crate::transfer::runtime::{NO_CAPTURE, Transfer};

/// The route of a copy from one device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// Both ends are on one device.
    Same,
    /// From device to device, over their link.
    Peer,
    /// From device to device by the driver, which goes by way of the host as the devices cannot
    /// reach each other.
    Staged,
    /// By way of page-locked memory of this crate, as the devices have different drivers. Waits on
    /// the host for the first half.
    ViaHost,
}

impl OnStreams for Route {
    fn ready_on(&self, _stream: &Stream) -> Result<(), Error> {
        Ok(())
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Route::Same => "on one device",
            Route::Peer => "from device to device",
            Route::Staged => "from device to device, staged by the driver",
            Route::ViaHost => "by way of the host",
        })
    }
}

/// Copies within a device.
pub(super) fn copy_on_one_device<T: Copy>(
    transfer: &Transfer,
    from: &Buffer<T>,
    to: &mut Buffer<T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<Route>, Error> {
    let Some((stream, bytes)) = on_device::enqueue(transfer, from, to, region)? else {
        return Ok(Pending::ready(transfer.shared(), Route::Same));
    };
    transfer.shared().counters.count(Direction::OnDevice, bytes);
    Ok(Pending::enqueued(transfer.shared(), covered_tick(stream), Route::Same))
}

/// The route of a copy from the device of `peer` to that of `transfer`.
pub(super) fn route(transfer: &Transfer, peer: &Transfer) -> Result<Route, Error> {
    let (own, other) = (transfer.device(), peer.device());
    if own.id() == other.id() {
        return Ok(Route::Same);
    }
    if own.info().kind != other.info().kind {
        return Ok(Route::ViaHost);
    }
    let reach = own.info().ordinal == other.info().ordinal || own.driver().can_access_peer(other.info().ordinal)?;
    Ok(if reach { Route::Peer } else { Route::Staged })
}

/// Enqueues a copy to memory of `transfer`'s device from memory of `peer`'s.
pub(crate) fn copy_from<T: Pod + Send + Sync>(
    transfer: &Transfer,
    peer: &Transfer,
    from: &Buffer<T>,
    to: &mut Buffer<T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<Route>, Error> {
    peer.check_device("buffer", from.storage().device_id())?;
    transfer.check_device("buffer", to.storage().device_id())?;
    let route = route(transfer, peer)?;
    if route == Route::Same {
        return copy_on_one_device(transfer, from, to, region);
    }
    let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| size_of::<T>() > 0) else {
        return Ok(Pending::ready(transfer.shared(), route));
    };
    let pending = match region {
        None => copy_dense(transfer, peer, from, to, route)?,
        Some(_) => {
            let there = peer.on(peer.next_stream(Direction::OnDevice))?;
            let here = transfer.on(transfer.next_stream(Direction::OnDevice))?;
            copy_region(&here, &there, from, to, &plan, route)?
        }
    };
    // Both halves of a copy by way of the host were counted.
    if route != Route::ViaHost {
        transfer.shared().counters.count(Direction::OnDevice, plan.bytes::<T>());
    }
    Ok(pending)
}

/// Enqueues a copy of a region in parts, none of which it counts: elements with gaps are packed on
/// their device, cross as one piece, and are unpacked on this one. Repeated elements cross once.
fn copy_region<T: Pod + Send + Sync>(
    transfer: &Transfer,
    peer: &Transfer,
    from: &Buffer<T>,
    to: &mut Buffer<T>,
    plan: &Plan,
    route: Route,
) -> Result<Pending<Route>, Error> {
    // In the order of the target if that makes unpacking unnecessary.
    let by_target = Packed::once(plan, OnDevice::To);
    let packed = if by_target.scattering().is_dense() { by_target } else { Packed::once(plan, OnDevice::From) };
    let (gathering, scattering) = (packed.gathering(), packed.scattering());
    let count = host_memory::len_of(gathering.len(), size_of::<T>() as u64)?;
    let dense = if gathering.is_dense() {
        from.try_slice(..count)?.share()
    } else {
        let stream = peer.next_stream(Direction::OnDevice);
        let mut dense = peer.allocator().alloc(count, stream)?;
        on_device::enqueue_on(peer, stream, from, &mut dense, &gathering)?;
        dense
    };
    if scattering.is_dense() {
        let mut to = to.try_slice_mut(..count)?;
        return copy_dense(transfer, peer, &dense, &mut to, route);
    }
    let stream = transfer.next_stream(Direction::OnDevice);
    let mut arrived: Buffer<T> = transfer.allocator().alloc(count, stream)?;
    let copied = copy_dense(transfer, peer, &dense, &mut arrived, route)?;
    if !copied.is_enqueued() {
        // It may still fail, and then there is nothing to unpack.
        copied.wait()?;
    }
    on_device::enqueue_on(transfer, stream, &arrived, to, &scattering)?;
    Ok(Pending::enqueued(transfer.shared(), covered_tick(stream), route))
}

fn copy_dense<T: Pod + Send + Sync>(
    transfer: &Transfer,
    peer: &Transfer,
    from: &Buffer<T>,
    to: &mut Buffer<T>,
    route: Route,
) -> Result<Pending<Route>, Error> {
    if route == Route::ViaHost {
        let elements = host::download_new_vec(peer, from)?.wait()?;
        return Ok(host::upload_owned(transfer, Owned::new::<T, _>(elements), to, None)?.map(move |()| route));
    }
    if from.bytes() == 0 {
        return Ok(Pending::ready(transfer.shared(), route));
    }
    let tick = enqueue(transfer, peer, from, to)?;
    Ok(Pending::enqueued(transfer.shared(), tick, route))
}

/// The copy runs on a stream of this device. A stream of the other device takes the access guard
/// with the source, is waited for by the copy, and waits for it. So the memory of each device has
/// ticks of its own streams alone.
fn enqueue<T: Pod + Send + Sync>(
    transfer: &Transfer,
    peer: &Transfer,
    from: &Buffer<T>,
    to: &Buffer<T>,
) -> Result<Tick, Error> {
    let (stream, there) = (transfer.next_stream(Direction::OnDevice), peer.next_stream(Direction::OnDevice));
    transfer.refuse_capture(stream)?;
    transfer.refuse_capture(there)?;
    // One guard on both ends, so that no thread waits for one while it holds the other.
    let (source, target) = (from.storage(), to.storage());
    let mut access =
        AccessGuard::of_streams(&[(there, source, AccessKind::Read), (stream, target, AccessKind::Write)])?;
    let _held_off = (hold_off_captures(stream, NO_CAPTURE)?, hold_off_captures(there, NO_CAPTURE)?);
    stream.wait_for(&there.tick())?;
    stream.copy_from_peer(to.ptr(), peer.device(), from.ptr(), to.bytes())?;
    let copied = stream.tick();
    let ordered = order_after(transfer, there, &copied);
    if ordered.as_ref().is_err_and(|error| !error.is_device_lost()) {
        // Later writes of the source try again to come after the copy.
        access.note_reader(source, &copied);
        tracing::warn!(
            bytes = source.bytes(),
            "no stream or thread can wait for a copy from another device; its source is never freed"
        );
        std::mem::forget(from.storage().clone());
        transfer.shared().in_flight.note_tick(&copied);
    }
    drop(access);
    ordered?;
    covered_tick(there);
    Ok(covered_tick(stream))
}

/// Orders a stream of another device after a copy on this one; if that fails, the host waits.
fn order_after(transfer: &Transfer, stream: &Stream, copied: &Tick) -> Result<(), DeviceError> {
    let Err(error) = stream.wait_for(copied) else { return Ok(()) };
    tracing::debug!(%error, "a stream could not be made to wait for a copy to another device; the host waits");
    copied.synchronize().or_else(|_| transfer.device().synchronize())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use aquifer_allocator::{Config, Reservation};
    use aquifer_device::{Code, Device, Operation, RequestError};
    use aquifer_sim::{Fault, SimConfig, SimDriver};

    use super::*;
    use crate::allocator::Allocator;

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
            let transfer = Transfer::new(&Allocator::new(&device, Config::default()).unwrap()).unwrap();
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
        let from = one.transfer.to_device(content, &one.stream).unwrap().wait().unwrap();
        let mut to = two.transfer.allocator().alloc(LEN, &two.stream).unwrap();
        one.fails(Operation::Wait);
        [Operation::SynchronizeEvent, Operation::Synchronize].into_iter().take(ways).for_each(|way| two.fails(way));
        let copied = copy_from(&two.transfer, &one.transfer, &from, &mut to, None);
        let result = copied.and_then(Pending::wait).and_then(|_| two.transfer.to_vec(&to)?.wait());
        ([one, two], from, result)
    }

    #[test]
    fn a_copy_that_waits_for_one_end_does_not_hold_the_other() {
        for reserves_source in [false, true] {
            let [one, two] = [0, 1].map(World::new);
            let mut buffers = [&one, &two].map(|world| {
                let zeros = vec![0u32; LEN];
                world.transfer.to_device(zeros, &world.stream).unwrap().wait().unwrap()
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
                    let copy = scope.spawn(|| copy_from(&own.transfer, &peer.transfer, from, to, None).unwrap().wait());
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
                assert_eq!(one.transfer.to_vec(&from).unwrap().wait().unwrap(), vec![9; LEN]);
            }
            drop(from);
            two.transfer.synchronize().unwrap();
            assert!(is_kept(&one));
            let small = one.transfer.to_device(vec![7u32; 10], &one.stream).unwrap().wait().unwrap();
            let mut to = two.transfer.allocator().alloc(10, &two.stream).unwrap();
            copy_from(&two.transfer, &one.transfer, &small, &mut to, None).unwrap().wait().unwrap();
            assert_eq!((one.sim.violations(), two.sim.violations()), (vec![], vec![]));
        }
        let [one, two] = [0, 1].map(World::new);
        let from = one.transfer.to_device(vec![7u32; LEN], &one.stream).unwrap().wait().unwrap();
        let mut to = two.transfer.allocator().alloc(LEN, &two.stream).unwrap();
        two.sim.inject(Fault::Rate { operation: Some(Operation::Record), rate: 1.0, code: Code(999) });
        two.fails(Operation::Synchronize);
        let refused = copy_from(&two.transfer.on(&two.stream).unwrap(), &one.transfer, &from, &mut to, None);
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
        let from = one.to_device((0..1000u32).collect::<Vec<_>>(), stream).unwrap().wait().unwrap();
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
                .map(|(transfer, stream)| transfer.to_device(vec![7u32; 1000], stream).unwrap().wait().unwrap());
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
            let content = two.to_vec(&crossed).unwrap().wait().unwrap();
            assert_eq!(content, one.to_vec(&expected).unwrap().wait().unwrap(), "{region:?}");
        }
        let mut to = from.share();
        let beyond = Region { extents: &[11], from_strides: &[100], to_strides: &[1] };
        assert!(matches!(two.copy(beyond.of(&from), &mut to), Err(Error::Request(RequestError::WrongDevice { .. }))));
        let mut to = two.allocator().alloc::<u32>(11, elsewhere).unwrap();
        let refused = two.copy(beyond.of(&from), &mut to);
        assert!(matches!(refused, Err(Error::Request(RequestError::OutOfBounds { .. }))), "{refused:?}");
        worlds.iter().for_each(|world| assert_eq!(world.sim.take_violations(), []));
    }
}

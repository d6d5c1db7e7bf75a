//! Copies between devices: by the driver where both are of one kind, else by way of the host. The
//! memory of each device has ticks of its own streams alone (invariant N5).

use std::fmt;

use aquifer_allocator::AccessGuard;
use aquifer_device::{AccessKind, DeviceError, Stream, Tick};

use super::memory::Owned;
use super::packed::{OnDevice, Packed};
use super::region::{Elements, Plan};
use super::{DevicePart, on_device};
use crate::completion::Completion;
use crate::counters::Direction;
use crate::enqueue::{covered_tick, hold_off_captures};
use crate::error::TransferError;
use crate::host_memory;
use crate::runtime::{NO_CAPTURE, Transfer};

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
    /// By way of pinned memory of this crate, as the devices have different drivers. Waits on
    /// the host for the first half.
    ViaHost,
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

impl Transfer {
    /// Enqueues a copy to this device's memory from memory of the device of `source`, which may be
    /// this one, and returns its route. Streams of both devices are ordered around it without
    /// waiting on the host, except by way of the host: see [`Route`].
    ///
    /// Elements of another device with gaps between them are packed on their device and unpacked on
    /// this one; elements that a region repeats cross once.
    ///
    /// # Errors
    /// Ends of different lengths, or that overlap; a region that reaches beyond either end, writes
    /// a place twice or writes what it reads; memory of other devices; a stream that captures; when
    /// device memory runs out; errors of the drivers. Where the drivers refuse every way to wait
    /// for a copy from another device, the copy goes on, and the memory that it reads is never
    /// freed.
    pub fn copy(
        &self,
        source: &Transfer,
        from: DevicePart<'_>,
        to: DevicePart<'_>,
        elements: &Elements<'_>,
    ) -> Result<(Completion, Route), TransferError> {
        source.check_part(from)?;
        self.check_part(to)?;
        let route = self.route_from(source)?;
        let copied = match (route, elements.region) {
            (Route::Same, _) => match on_device::enqueue(self, from, to, elements)? {
                Some(stream) => Completion::enqueued(self.shared(), [covered_tick(stream)]),
                None => Completion::complete(),
            },
            (_, region) => match Plan::of(elements, from.bytes, to.bytes)? {
                None => Completion::complete(),
                Some(plan) => {
                    let copied = if region.is_none() {
                        copy_dense(self, source, from, to, route)?
                    } else {
                        let there = source.on(source.next_stream(Direction::OnDevice))?;
                        let here = self.on(self.next_stream(Direction::OnDevice))?;
                        copy_region(&here, &there, from, to, &plan, route)?
                    };
                    // Both halves of a copy by way of the host were counted.
                    if route != Route::ViaHost {
                        self.shared().counters.count(Direction::OnDevice, plan.bytes());
                    }
                    copied
                }
            },
        };
        Ok((copied, route))
    }

    /// As [`Transfer::copy`], for callers that need only the stream's order: records no event.
    ///
    /// # Errors
    /// As [`Transfer::copy`].
    pub fn copy_in_order(
        &self,
        source: &Transfer,
        from: DevicePart<'_>,
        to: DevicePart<'_>,
        elements: &Elements<'_>,
    ) -> Result<(), TransferError> {
        if source.device().id() == self.device().id() {
            return on_device::enqueue(self, from, to, elements).map(drop);
        }
        let (copied, _) = self.copy(source, from, to, elements)?;
        // By way of the host, threads may go on with it, and may fail.
        copied.order(self.next_stream(Direction::OnDevice))
    }

    /// The route of a copy from the device of `peer` to this one.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn route_from(&self, peer: &Transfer) -> Result<Route, TransferError> {
        let (own, other) = (self.device(), peer.device());
        if own.id() == other.id() {
            return Ok(Route::Same);
        }
        if own.info().kind != other.info().kind {
            return Ok(Route::ViaHost);
        }
        let reach = own.info().ordinal == other.info().ordinal || own.driver().can_access_peer(other.info().ordinal)?;
        Ok(if reach { Route::Peer } else { Route::Staged })
    }
}

/// Enqueues a copy of a region in parts, none of which it counts: elements with gaps are packed on
/// their device, cross as one piece, and are unpacked on this one. Repeated elements cross once.
fn copy_region(
    transfer: &Transfer,
    peer: &Transfer,
    from: DevicePart<'_>,
    to: DevicePart<'_>,
    plan: &Plan,
    route: Route,
) -> Result<Completion, TransferError> {
    // In the order of the target if that makes unpacking unnecessary.
    let by_target = Packed::once(plan, OnDevice::To);
    let packed = if by_target.scattering().is_dense() { by_target } else { Packed::once(plan, OnDevice::From) };
    let (gathering, scattering) = (packed.gathering(), packed.scattering());
    let bytes = gathering.len().saturating_mul(plan.size as u64);
    let gathered;
    let dense = if gathering.is_dense() {
        DevicePart { bytes, ..from }
    } else {
        let stream = peer.next_stream(Direction::OnDevice);
        gathered = peer.allocator().alloc_storage(bytes, aquifer_allocator::ALIGNMENT, stream)?;
        on_device::enqueue_on(peer, stream, from, DevicePart::all(&gathered), &gathering, plan.size)?;
        DevicePart::all(&gathered)
    };
    if scattering.is_dense() {
        return copy_dense(transfer, peer, dense, DevicePart { bytes, ..to }, route);
    }
    let stream = transfer.next_stream(Direction::OnDevice);
    let arrived = transfer.allocator().alloc_storage(bytes, aquifer_allocator::ALIGNMENT, stream)?;
    let copied = copy_dense(transfer, peer, dense, DevicePart::all(&arrived), route)?;
    if !copied.is_enqueued() {
        // It may still fail, and then there is nothing to unpack.
        copied.wait()?;
    }
    on_device::enqueue_on(transfer, stream, DevicePart::all(&arrived), to, &scattering, plan.size)?;
    Ok(Completion::enqueued(transfer.shared(), [covered_tick(stream)]))
}

/// Copies all bytes of one end to the other, which is as long.
fn copy_dense(
    transfer: &Transfer,
    peer: &Transfer,
    from: DevicePart<'_>,
    to: DevicePart<'_>,
    route: Route,
) -> Result<Completion, TransferError> {
    if route == Route::ViaHost {
        let len = host_memory::len_of(from.bytes, 1)?;
        let (downloaded, bytes) = peer.download_new_vec::<u8>(from, len)?;
        downloaded.wait()?;
        return transfer.upload_owned(
            Owned::new::<u8, _>(bytes()?),
            to,
            &Elements { size: 1, from: len, to: len, region: None },
        );
    }
    if from.bytes == 0 {
        return Ok(Completion::complete());
    }
    let tick = enqueue(transfer, peer, from, to)?;
    Ok(Completion::enqueued(transfer.shared(), [tick]))
}

/// The copy runs on a stream of this device. A stream of the other device takes the access guard
/// with the source, is waited for by the copy, and waits for it. So the memory of each device has
/// ticks of its own streams alone.
fn enqueue(
    transfer: &Transfer,
    peer: &Transfer,
    from: DevicePart<'_>,
    to: DevicePart<'_>,
) -> Result<Tick, TransferError> {
    let (stream, there) = (transfer.next_stream(Direction::OnDevice), peer.next_stream(Direction::OnDevice));
    transfer.refuse_capture(stream)?;
    transfer.refuse_capture(there)?;
    // One guard on both ends, so that no thread waits for one while it holds the other.
    let (source, target) = (from.storage, to.storage);
    let mut access =
        AccessGuard::of_streams(&[(there, source, AccessKind::Read), (stream, target, AccessKind::Write)])?;
    let _held_off = (hold_off_captures(stream, NO_CAPTURE)?, hold_off_captures(there, NO_CAPTURE)?);
    stream.wait_for(&there.tick())?;
    stream.copy_from_peer(to.ptr, peer.device(), from.ptr, to.bytes)?;
    let copied = stream.tick();
    let ordered = order_after(transfer, there, &copied);
    if ordered.as_ref().is_err_and(|error| !error.is_device_lost()) {
        // Later writes of the source try again to come after the copy.
        access.note_reader(source, &copied);
        tracing::warn!(
            bytes = source.bytes(),
            "no stream or thread can wait for a copy from another device; its source is never freed"
        );
        std::mem::forget(from.storage.clone());
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

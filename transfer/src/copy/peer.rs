//! Copies between devices: by the driver where both are of one kind, else by way of the host.

use std::fmt;

use aquifer_allocator::{DeviceBuffer, Turn};
use aquifer_device::{AccessKind, Stream, Tick};
use bytemuck::Pod;

use crate::counters::Direction;
use crate::error::TransferError;
use crate::pending::{OnStreams, Pending};
use crate::runtime::Transfer;

/// Which way a copy from one device to another goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// Both ends are on one device.
    Same,
    /// From device to device, over what links them.
    Peer,
    /// From device to device by the driver, which goes by way of the host as the devices cannot reach each other.
    Staged,
    /// By way of page-locked memory of this crate, as the devices have different drivers. Waits on the host for the first half.
    ViaHost,
}

impl OnStreams for Route {}

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
    /// Which way a copy from the device of `peer` to this one goes.
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

    /// Enqueues a copy from memory of another device, whose runtime is `peer`, of as many elements as both ends have, and returns; the
    /// result says which way it goes. Streams of both devices are ordered around it without waiting on the host, except where it goes by
    /// way of the host: see [`Route`].
    ///
    /// # Errors
    /// Ends of different lengths, buffers of other devices than these two, a stream that captures, and those of both drivers.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, DeviceBuffer};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::{Route, Transfer};
    /// let mut transfers = Vec::new();
    /// for ordinal in 0..2 {
    ///     let device = Device::new(SimDriver::new(SimConfig::default().ordinal(ordinal)));
    ///     transfers.push(Transfer::new(&Allocator::new(&device, Config::default())?)?);
    /// }
    /// let streams = [transfers[0].device().create_stream()?, transfers[1].device().create_stream()?];
    /// let from = transfers[0].to_device(vec![1u32, 2, 3], &streams[0])?.wait()?;
    /// let mut to: DeviceBuffer<u32> = transfers[1].allocator().alloc_buffer(3, &streams[1])?;
    /// assert_eq!(transfers[1].copy_from_peer(&from, &transfers[0], &mut to)?.wait()?, Route::Peer);
    /// assert_eq!(transfers[1].to_vec(&to)?.wait()?, [1, 2, 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn copy_from_peer<T: Pod + Send + Sync>(
        &self,
        from: &DeviceBuffer<T>,
        peer: &Transfer,
        to: &mut DeviceBuffer<T>,
    ) -> Result<Pending<Route>, TransferError> {
        crate::copy::direct::check_lengths(from.len(), to.len())?;
        peer.check_device("buffer", from.storage().device_id())?;
        self.check_device("buffer", to.storage().device_id())?;
        let route = self.route_from(peer)?;
        match route {
            Route::Same => Ok(self.copy(from, to)?.map(move |()| route)),
            Route::ViaHost => {
                let host = peer.to_vec(from)?.wait()?;
                Ok(self.upload_from(host, to)?.map(move |()| route))
            }
            Route::Peer | Route::Staged if from.bytes() == 0 => Ok(Pending::ready(self.shared(), route)),
            Route::Peer | Route::Staged => {
                let tick = self.enqueue_peer(from, peer, to)?;
                self.shared().tally.count(Direction::OnDevice, to.bytes());
                Ok(Pending::enqueued(self.shared(), tick, route))
            }
        }
    }

    /// The copy runs on a stream of this device. A stream of the other one stands for it there: it takes the turn with the source, is
    /// waited for by the copy, and waits for it. So each device's memory carries ticks of its own streams alone.
    fn enqueue_peer<T: Pod + Send + Sync>(
        &self,
        from: &DeviceBuffer<T>,
        peer: &Transfer,
        to: &DeviceBuffer<T>,
    ) -> Result<Tick, TransferError> {
        let (stream, there) = (self.next_stream(Direction::OnDevice), peer.next_stream(Direction::OnDevice));
        self.refuse_capture(stream)?;
        self.refuse_capture(there)?;
        let source = [(from.storage().as_ref(), AccessKind::Read)];
        let target = [(to.storage().as_ref(), AccessKind::Write)];
        // In one order for all, so that turns do not wait for each other in a circle.
        let source_first = self.device().id() > peer.device().id();
        let first = if source_first { Turn::take(there, &source)? } else { Turn::take(stream, &target)? };
        let second = if source_first { Turn::take(stream, &target)? } else { Turn::take(there, &source)? };
        stream.wait_for(&there.tick())?;
        let copied = stream.copy_from_peer(to.ptr(), peer.device(), from.ptr(), to.bytes());
        let ordered = order_after(there, &stream.tick());
        drop((first, second));
        copied?;
        ordered?;
        peer.covered_tick(there);
        Ok(self.covered_tick(stream))
    }
}

/// Makes a stream come after a copy that uses its device's memory, or else the host, so that the memory is never reused before.
fn order_after(stream: &Stream, tick: &Tick) -> Result<(), TransferError> {
    stream.wait_for(tick).or_else(|error| {
        tracing::debug!(%error, "a stream could not be made to wait for a copy to another device; the host waits");
        tick.synchronize()
    })?;
    Ok(())
}

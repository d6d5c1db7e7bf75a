//! Copies from device memory to device memory, of the same device or of another one.

use aquifer_allocator::Buffer;
use aquifer_device::{AccessKind, CopyEnd, CopyPart, Stream};
use bytemuck::Pod;

use crate::copy::region::Plan;
use crate::copy::{DeviceSource, Region, Route};
use crate::counters::Direction;
use crate::error::TransferError;
use crate::pending::Pending;
use crate::runtime::Transfer;

/// Work that was enqueued on a stream, and the bytes that it copies.
pub(super) struct Enqueued<'a> {
    pub(super) stream: &'a Stream,
    pub(super) bytes: u64,
}

impl Transfer {
    /// Enqueues a copy to this device's memory from device memory, also of another device, and returns; the result says
    /// which way it goes. Streams of both devices are ordered around it without waiting on the host, except where it goes by
    /// way of the host: see [`Route`].
    ///
    /// Elements of another device with gaps between them are collected in memory of their device first, and brought to their
    /// places from memory of this one; those that a region repeats cross once.
    ///
    /// # Errors
    /// Ends of different lengths, or that overlap; a region that reaches beyond either end, writes a place twice or writes
    /// what it reads; a target of another device; a stream that captures; when device memory runs out; errors of the drivers.
    /// Where these hide when a copy from another device is done, it goes on, and the memory that it reads is kept until that
    /// is known. This runtime asks at its next such copy, at [`Transfer::synchronize`], and when its last handle is dropped;
    /// what may be in use even then is never reused.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::{Region, Route, Transfer};
    /// let devices = [0, 1].map(|ordinal| Device::new(SimDriver::new(SimConfig::default().ordinal(ordinal))));
    /// let one = Transfer::new(&Allocator::new(&devices[0], Config::default())?)?;
    /// let two = Transfer::new(&Allocator::new(&devices[1], Config::default())?)?;
    /// let from = one.to_device(vec![1u32, 2, 3, 4, 5, 6], &devices[0].stream()?)?.wait()?;
    /// let mut to = two.allocator().alloc::<u32>(6, &devices[1].stream()?)?;
    /// assert_eq!(two.copy(&from, &mut to)?.wait()?, Route::Peer);
    /// assert_eq!(two.to_vec(&to)?.wait()?, [1, 2, 3, 4, 5, 6]);
    ///
    /// // The second column of a 2 × 3 matrix.
    /// let column = Region { extents: &[2], from_strides: &[3], to_strides: &[1] };
    /// two.copy(column.of(&from.slice(1..)), &mut to)?.wait()?;
    /// assert_eq!(two.to_vec(&to)?.wait()?, [2, 5, 3, 4, 5, 6]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn copy<T: Pod + Send + Sync>(
        &self,
        from: impl DeviceSource<T>,
        to: &mut Buffer<T>,
    ) -> Result<Pending<Route>, TransferError> {
        let _place = self.called_here();
        let (from, region) = from.parts();
        if from.storage().device_id() == self.device().id() {
            return self.copy_here(from, to, region);
        }
        self.copy_from(&Transfer::of(from.allocator())?, from, to, region)
    }

    /// As [`Transfer::copy`], for a caller that the stream's order is enough for: no event is recorded.
    pub(crate) fn fill_from<T: Pod + Send + Sync>(
        &self,
        from: impl DeviceSource<T>,
        to: &mut Buffer<T>,
    ) -> Result<(), TransferError> {
        let (from, region) = from.parts();
        if from.storage().device_id() != self.device().id() {
            let copied = self.copy_from(&Transfer::of(from.allocator())?, from, to, region)?;
            // By way of the host, threads may go on with it, and may fail.
            return copied.enqueued_for(self.next_stream(Direction::OnDevice)).map(drop);
        }
        if let Some(copied) = self.enqueue_copy(from, to, region)? {
            self.shared().tally.count(Direction::OnDevice, copied.bytes);
        }
        Ok(())
    }

    /// As [`Transfer::copy`], from memory of another runtime's device.
    pub(crate) fn copy_from<T: Pod + Send + Sync>(
        &self,
        peer: &Transfer,
        from: &Buffer<T>,
        to: &mut Buffer<T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<Route>, TransferError> {
        peer.check_device("buffer", from.storage().device_id())?;
        self.check_device("buffer", to.storage().device_id())?;
        let route = self.route_from(peer)?;
        if route == Route::Same {
            return self.copy_here(from, to, region);
        }
        let Some(plan) = Plan::of(region, from.len(), to.len())? else {
            return Ok(Pending::ready(self.shared(), route));
        };
        let pending = match region {
            None => self.begin_from_peer(from, peer, to, route)?,
            Some(region) => self.region_from_peer(from, peer, to, region, route)?,
        };
        self.count_from_peer(route, plan.bytes::<T>());
        Ok(pending)
    }

    fn copy_here<T: Copy>(
        &self,
        from: &Buffer<T>,
        to: &mut Buffer<T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<Route>, TransferError> {
        let Some(Enqueued { stream, bytes }) = self.enqueue_copy(from, to, region)? else {
            return Ok(Pending::ready(self.shared(), Route::Same));
        };
        self.shared().tally.count(Direction::OnDevice, bytes);
        Ok(Pending::enqueued(self.shared(), self.covered_tick(stream), Route::Same))
    }

    /// Enqueues a copy within the device, not counted; `None` if there is nothing to copy.
    pub(super) fn enqueue_copy<T: Copy>(
        &self,
        from: &Buffer<T>,
        to: &mut Buffer<T>,
        region: Option<&Region<'_>>,
    ) -> Result<Option<Enqueued<'_>>, TransferError> {
        self.check_device("buffer", from.storage().device_id())?;
        self.check_device("buffer", to.storage().device_id())?;
        let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| to.bytes() > 0) else { return Ok(None) };
        if region.is_none() {
            check_apart(from, to)?;
        } else if plan.meets_itself(from.ptr().0, to.ptr().0, size_of::<T>() as u64) {
            return Err(TransferError::Region { reason: "what it writes meets what it reads, or may" });
        }
        let stream = self.next_stream(Direction::OnDevice);
        let (src, dst) = (CopyEnd::Device(from.ptr()), CopyEnd::Device(to.ptr()));
        let memory = [(from.storage().as_ref(), AccessKind::Read), (to.storage().as_ref(), AccessKind::Write)];
        self.enqueue_uncovered(stream, &memory, &[], || {
            #[allow(unsafe_code, reason = "the driver's call is unsafe for host memory, of which there is none")]
            // SAFETY: no host memory is touched.
            unsafe {
                plan.enqueue(stream, src, dst, size_of::<T>() as u64)
            }
        })?;
        Ok(Some(Enqueued { stream, bytes: plan.bytes::<T>() }))
    }
}

/// Refuses two ends on one device, of one length, that have memory in common.
pub(super) fn check_apart<T: Copy>(from: &Buffer<T>, to: &Buffer<T>) -> Result<(), TransferError> {
    let copy = CopyPart { dst: CopyEnd::Device(to.ptr()), src: CopyEnd::Device(from.ptr()), bytes: to.bytes() };
    if CopyPart::are_independent(&[copy]) { Ok(()) } else { Err(TransferError::Overlap { bytes: copy.bytes }) }
}

pub(crate) fn check_lengths(from: usize, to: usize) -> Result<(), TransferError> {
    if from == to { Ok(()) } else { Err(TransferError::LengthMismatch { from: from as u64, to: to as u64 }) }
}

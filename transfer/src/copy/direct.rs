//! Copies that the driver does by itself: between page-locked memory and the device, and within the device.
#![allow(single_use_lifetimes, reason = "a lifetime in an argument's `impl Trait` must have a name")]

use aquifer_allocator::DeviceBuffer;
use aquifer_device::{AccessKind, CopyEnd, CopyPart};
use aquifer_kernels::Element;
use bytemuck::Pod;

use crate::counters::Direction;
use crate::error::TransferError;
use crate::pending::Pending;
use crate::pinned::{PinnedSlice, PinnedSliceMut};
use crate::runtime::Transfer;

impl Transfer {
    /// Enqueues a copy from page-locked memory, of as many elements as both ends have, and returns. The host may read `from` at
    /// once; writing to it waits until the copy is done.
    ///
    /// # Errors
    /// Ends of different lengths or devices, a stream that captures, and errors of the driver. Memory that could not be page-locked
    /// ([`crate::PinnedPool::alloc_or_pageable`]) is staged.
    #[track_caller]
    pub fn upload<'a, T: Pod>(
        &self,
        from: impl Into<PinnedSlice<'a, T>>,
        to: &mut DeviceBuffer<T>,
    ) -> Result<Pending<()>, TransferError> {
        let _place = self.called_here();
        let from = from.into();
        check_lengths(from.len() as u64, to.len())?;
        let part = from.part();
        self.check_device("page-locked memory", part.memory.device_id())?;
        self.check_device("buffer", to.storage().device_id())?;
        if part.bytes == 0 {
            return Ok(Pending::ready(self.shared(), ()));
        }
        if !part.memory.is_pinned() {
            return Ok(self.stage_upload(part.into_source()?, to)?.1);
        }
        let stream = self.next_stream(Direction::Upload);
        let (ptr, bytes) = (to.ptr(), part.bytes);
        let tick = self.enqueue(stream, &[(to.storage(), AccessKind::Write)], &[(part, AccessKind::Read)], || {
            #[allow(unsafe_code, reason = "the driver gets an address; what keeps it good is above")]
            // SAFETY: the part is memory of its pool, live as `from` borrows its buffer now, and kept by the pool until the tick is done
            // that its turn leaves; until then the host does not write it, as the buffer waits for that tick first (N1, N2).
            unsafe {
                stream.upload(ptr, part.ptr, bytes)
            }
        })?;
        self.shared().tally.count(Direction::Upload, bytes as u64);
        Ok(Pending::enqueued(self.shared(), tick, ()))
    }

    /// Enqueues a copy to page-locked memory, of as many elements as both ends have, and returns. Reading `to` waits until the copy is
    /// done.
    ///
    /// # Errors
    /// As [`Transfer::upload`].
    #[track_caller]
    pub fn download<'a, T: Pod>(
        &self,
        from: &DeviceBuffer<T>,
        to: impl Into<PinnedSliceMut<'a, T>>,
    ) -> Result<Pending<()>, TransferError> {
        let _place = self.called_here();
        let to = to.into();
        check_lengths(from.len(), to.len() as u64)?;
        let part = to.part();
        self.check_device("page-locked memory", part.memory.device_id())?;
        self.check_device("buffer", from.storage().device_id())?;
        if part.bytes == 0 {
            return Ok(Pending::ready(self.shared(), ()));
        }
        if !part.memory.is_pinned() {
            let job = self.stage_download(from, part.into_target()?)?;
            return Ok(Pending::job(self.shared(), job, || Ok(())));
        }
        let stream = self.next_stream(Direction::Download);
        let (ptr, bytes) = (from.ptr(), part.bytes);
        let tick = self.enqueue(stream, &[(from.storage(), AccessKind::Read)], &[(part, AccessKind::Write)], || {
            #[allow(unsafe_code, reason = "the driver gets an address; what keeps it good is above")]
            // SAFETY: the part is memory of its pool, live as `to` borrows its buffer mutably now, and kept by the pool until the tick is
            // done that its turn leaves; until then the host does not touch it, as the buffer waits for that tick first (N1, N2).
            unsafe {
                stream.download(part.ptr, ptr, bytes)
            }
        })?;
        self.shared().tally.count(Direction::Download, bytes as u64);
        Ok(Pending::enqueued(self.shared(), tick, ()))
    }

    /// Enqueues a copy within the device, of as many elements as both ends have, and returns.
    ///
    /// # Errors
    /// Ends of different lengths or devices, or that overlap; a stream that captures, and errors of the driver.
    #[track_caller]
    pub fn copy<T: Copy>(
        &self,
        from: &DeviceBuffer<T>,
        to: &mut DeviceBuffer<T>,
    ) -> Result<Pending<()>, TransferError> {
        let _place = self.called_here();
        check_lengths(from.len(), to.len())?;
        self.check_device("buffer", from.storage().device_id())?;
        self.check_device("buffer", to.storage().device_id())?;
        if to.bytes() == 0 {
            return Ok(Pending::ready(self.shared(), ()));
        }
        check_apart(from, to)?;
        let stream = self.next_stream(Direction::OnDevice);
        let memory = [(from.storage().as_ref(), AccessKind::Read), (to.storage().as_ref(), AccessKind::Write)];
        let tick = self.enqueue(stream, &memory, &[], || stream.copy(to.ptr(), from.ptr(), to.bytes()))?;
        self.shared().tally.count(Direction::OnDevice, to.bytes());
        Ok(Pending::enqueued(self.shared(), tick, ()))
    }

    /// Enqueues setting every element to `value`, and returns.
    ///
    /// # Errors
    /// A buffer of another device, and those of [`aquifer_kernels::Kernels::fill`].
    #[track_caller]
    pub fn fill<T: Element + Pod>(&self, to: &mut DeviceBuffer<T>, value: T) -> Result<Pending<()>, TransferError> {
        let _place = self.called_here();
        let stream = self.next_stream(Direction::OnDevice);
        self.refuse_capture(stream)?;
        self.kernels()?.fill(stream, &mut *to, value)?;
        Ok(Pending::enqueued(self.shared(), self.covered_tick(stream), ()))
    }
}

pub(crate) fn check_lengths(from: u64, to: u64) -> Result<(), TransferError> {
    if from == to { Ok(()) } else { Err(TransferError::LengthMismatch { from, to }) }
}

/// Refuses two ends on one device, of one length, that have memory in common.
pub(super) fn check_apart<T: Copy>(from: &DeviceBuffer<T>, to: &DeviceBuffer<T>) -> Result<(), TransferError> {
    let copy = CopyPart { dst: CopyEnd::Device(to.ptr()), src: CopyEnd::Device(from.ptr()), bytes: to.bytes() };
    if CopyPart::are_independent(&[copy]) { Ok(()) } else { Err(TransferError::Overlap { bytes: copy.bytes }) }
}

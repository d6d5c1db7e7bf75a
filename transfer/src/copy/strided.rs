//! Copies of regions, in every direction.
#![allow(single_use_lifetimes, reason = "a lifetime in an argument's `impl Trait` must have a name")]

use aquifer_allocator::DeviceBuffer;
use aquifer_device::{AccessKind, CopyEnd};
use bytemuck::Pod;

use crate::copy::Region;
use crate::counters::Direction;
use crate::error::TransferError;
use crate::pending::Pending;
use crate::pinned::{PinnedSlice, PinnedSliceMut};
use crate::runtime::Transfer;

impl Transfer {
    /// Enqueues copying a region from page-locked memory, and returns. One driver call copies two dimensions at once, three where the
    /// innermost are dense; each index of further ones is a call of its own.
    ///
    /// # Errors
    /// A region that reaches beyond either end or writes a place twice; else as [`Transfer::upload`], also for memory that could not be
    /// page-locked.
    #[track_caller]
    pub fn upload_region<'a, T: Pod>(
        &self,
        from: impl Into<PinnedSlice<'a, T>>,
        to: &mut DeviceBuffer<T>,
        region: &Region<'_>,
    ) -> Result<Pending<()>, TransferError> {
        let _place = self.called_here();
        let from = from.into();
        let part = from.part();
        self.check_device("page-locked memory", part.memory.device_id())?;
        self.check_device("buffer", to.storage().device_id())?;
        let Some(plan) = region.plan()? else { return Ok(Pending::ready(self.shared(), ())) };
        plan.check_reach(from.len() as u64, to.len())?;
        if !part.memory.is_pinned() {
            return Ok(self.stage_upload_region(part.into_source()?, to, &plan)?.1);
        }
        let stream = self.next_stream(Direction::Upload);
        let (src, dst, size) = (CopyEnd::Host(part.ptr), CopyEnd::Device(to.ptr()), size_of::<T>() as u64);
        let tick = self.enqueue(stream, &[(to.storage(), AccessKind::Write)], &[(part, AccessKind::Read)], || {
            #[allow(unsafe_code, reason = "the driver gets an address; what keeps it good is above")]
            // SAFETY: as for `Transfer::upload` (N1, N2); the region was checked to lie within both ends.
            unsafe {
                plan.enqueue(stream, src, dst, size)
            }
        })?;
        self.shared().tally.count(Direction::Upload, plan.elements * size);
        Ok(Pending::enqueued(self.shared(), tick, ()))
    }

    /// Enqueues copying a region to page-locked memory, and returns; see [`Transfer::upload_region`]. What lies between stays.
    ///
    /// # Errors
    /// As [`Transfer::upload_region`].
    #[track_caller]
    pub fn download_region<'a, T: Pod>(
        &self,
        from: &DeviceBuffer<T>,
        to: impl Into<PinnedSliceMut<'a, T>>,
        region: &Region<'_>,
    ) -> Result<Pending<()>, TransferError> {
        let _place = self.called_here();
        let to = to.into();
        let part = to.part();
        self.check_device("page-locked memory", part.memory.device_id())?;
        self.check_device("buffer", from.storage().device_id())?;
        let Some(plan) = region.plan()? else { return Ok(Pending::ready(self.shared(), ())) };
        plan.check_reach(from.len(), to.len() as u64)?;
        if !part.memory.is_pinned() {
            let job = self.stage_download_region(from, part.into_target()?, &plan)?;
            return Ok(Pending::job(self.shared(), job, || Ok(())));
        }
        let stream = self.next_stream(Direction::Download);
        let (src, dst, size) = (CopyEnd::Device(from.ptr()), CopyEnd::Host(part.ptr), size_of::<T>() as u64);
        let tick = self.enqueue(stream, &[(from.storage(), AccessKind::Read)], &[(part, AccessKind::Write)], || {
            #[allow(unsafe_code, reason = "the driver gets an address; what keeps it good is above")]
            // SAFETY: as for `Transfer::download` (N1, N2); the region was checked to lie within both ends.
            unsafe {
                plan.enqueue(stream, src, dst, size)
            }
        })?;
        self.shared().tally.count(Direction::Download, plan.elements * size);
        Ok(Pending::enqueued(self.shared(), tick, ()))
    }

    /// Enqueues copying a region within the device, and returns; see [`Transfer::upload_region`].
    ///
    /// # Errors
    /// A region that reaches beyond either end, writes a place twice or writes what it reads; else as [`Transfer::copy`].
    #[track_caller]
    pub fn copy_region<T: Copy>(
        &self,
        from: &DeviceBuffer<T>,
        to: &mut DeviceBuffer<T>,
        region: &Region<'_>,
    ) -> Result<Pending<()>, TransferError> {
        let _place = self.called_here();
        let (pending, bytes) = self.begin_region(from, to, region)?;
        if bytes > 0 {
            self.shared().tally.count(Direction::OnDevice, bytes);
        }
        Ok(pending)
    }

    /// As [`Transfer::copy_region`], for a part of a transfer: not counted. Gives the region's bytes, too.
    pub(super) fn begin_region<T: Copy>(
        &self,
        from: &DeviceBuffer<T>,
        to: &mut DeviceBuffer<T>,
        region: &Region<'_>,
    ) -> Result<(Pending<()>, u64), TransferError> {
        self.check_device("buffer", from.storage().device_id())?;
        self.check_device("buffer", to.storage().device_id())?;
        let Some(plan) = region.plan()? else { return Ok((Pending::ready(self.shared(), ()), 0)) };
        plan.check_reach(from.len(), to.len())?;
        let (src, dst, size) = (CopyEnd::Device(from.ptr()), CopyEnd::Device(to.ptr()), size_of::<T>() as u64);
        if plan.meets_itself(from.ptr().0, to.ptr().0, size) {
            return Err(TransferError::Region { reason: "what it writes meets what it reads, or may" });
        }
        let stream = self.next_stream(Direction::OnDevice);
        let memory = [(from.storage().as_ref(), AccessKind::Read), (to.storage().as_ref(), AccessKind::Write)];
        let tick = self.enqueue(stream, &memory, &[], || {
            #[allow(unsafe_code, reason = "the driver's call is unsafe for host memory, of which there is none")]
            // SAFETY: no host memory is touched.
            unsafe {
                plan.enqueue(stream, src, dst, size)
            }
        })?;
        Ok((Pending::enqueued(self.shared(), tick, ()), plan.elements * size))
    }
}

//! Copies to the host: by the driver into page-locked memory, and from there, or through the staging ring, into other
//! memory.

use std::sync::Arc;

use aquifer_allocator::Buffer;
use aquifer_device::{AccessKind, CopyEnd};
use bytemuck::Pod;

use crate::copy::memory::{Landing, Lent};
use crate::copy::packed::{OnDevice, Packed};
use crate::copy::region::Plan;
use crate::copy::upload::UNSTAGED_BYTES;
use crate::copy::{Region, Target};
use crate::counters::Direction;
use crate::error::TransferError;
use crate::host_vec;
use crate::job::{Job, Progress};
use crate::pending::Pending;
use crate::pinned::{PinnedBuffer, PinnedSliceMut};
use crate::runtime::Transfer;
use crate::staging::{DeviceEnd, HostTarget, Scattered, Spread};

impl Transfer {
    /// Enqueues a copy of device memory to the host, and returns; see [`Target`].
    ///
    /// # Errors
    /// Ends of different lengths or devices; a region that reaches beyond either end or writes a place twice; a stream that
    /// captures; when page-locked memory runs out; errors of the driver. Memory that was handed over is dropped then.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::{Region, Transfer};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let transfer = Transfer::new(&Allocator::new(&device, Config::default())?)?;
    /// let buffer = transfer.to_device(vec![1u32, 4, 7, 10], &device.stream()?)?.wait()?;
    /// let mut pinned = transfer.pinned().alloc::<u32>(4)?;
    /// let _ = transfer.download(&buffer, &mut pinned)?;
    /// assert_eq!(pinned.read()?, [1, 4, 7, 10]); // waits
    ///
    /// // To the first column of a 4 × 3 matrix.
    /// let column = Region { extents: &[4], from_strides: &[1], to_strides: &[3] };
    /// let back = transfer.download(&buffer, column.of(vec![0; 10]))?.wait()?;
    /// assert_eq!(back, [1, 0, 0, 4, 0, 0, 7, 0, 0, 10]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn download<T: Pod + Send + Sync, D: Target<T>>(
        &self,
        from: &Buffer<T>,
        to: D,
    ) -> Result<Pending<D::Output>, TransferError> {
        let _place = self.called_here();
        self.check_device("buffer", from.storage().device_id())?;
        to.download_from(self, from, None)
    }

    /// Copies device memory to new page-locked memory.
    ///
    /// # Errors
    /// As [`Transfer::download`].
    #[track_caller]
    pub fn to_pinned<T: Pod + Send + Sync>(&self, from: &Buffer<T>) -> Result<Pending<PinnedBuffer<T>>, TransferError> {
        let _place = self.called_here();
        self.download(from, self.pinned().alloc(from.len())?)
    }

    /// Copies device memory to a new `Vec`.
    ///
    /// # Errors
    /// As [`Transfer::download`], and [`TransferError::OutOfHostMemory`] when the system has no memory for it.
    #[track_caller]
    pub fn to_vec<T: Pod + Send + Sync>(&self, from: &Buffer<T>) -> Result<Pending<Vec<T>>, TransferError> {
        let _place = self.called_here();
        self.check_device("buffer", from.storage().device_id())?;
        if from.bytes() <= UNSTAGED_BYTES as u64 {
            return self.take_small(from, &Plan::dense(from.len() as u64), |staged| Ok(staged.to_vec()));
        }
        self.download_vec(from, host_vec::zeroed::<T>(from.len())?, None)
    }

    /// Copies device memory to borrowed memory, and waits on the host until the copy is done.
    ///
    /// # Errors
    /// As [`Transfer::download`]. What `to` holds then is unspecified.
    #[track_caller]
    pub fn download_blocking<T: Pod + Send + Sync>(&self, from: &Buffer<T>, to: &mut [T]) -> Result<(), TransferError> {
        let _place = self.called_here();
        self.check_device("buffer", from.storage().device_id())?;
        let Some(plan) = Plan::of(None, from.len(), to.len())?.filter(|_| from.bytes() > 0) else { return Ok(()) };
        if plan.bytes::<T>() <= UNSTAGED_BYTES as u64 {
            let mut staged = self.pinned().alloc::<T>(to.len())?;
            self.download_pinned(from, staged.as_slice_mut(), None)?.wait()?;
            to.copy_from_slice(staged.read()?);
            return Ok(());
        }
        #[allow(unsafe_code, reason = "lending is a promise to wait, and here is where it is made")]
        // SAFETY: the memory is borrowed mutably until this returns, which waits until the job is settled.
        let lent = unsafe { Lent::to_write(to) };
        let job = self.stage_download_plan(from, Arc::new(lent), &plan)?;
        let settled = job.wait();
        match settled {
            Progress::Finished(Err(error)) => Err(error),
            _ => Pending::job(self.shared(), job, || Ok(())).wait(),
        }
    }

    /// Reads one element, and waits on the host until it is there: the device stands still meanwhile if it has nothing else to do.
    /// Counted as a synchronisation, also where the device was quick.
    ///
    /// # Errors
    /// [`TransferError::NotOneElement`] for another number of elements than one, and as [`Transfer::download`].
    #[track_caller]
    pub fn item<T: Pod + Send + Sync>(&self, from: &Buffer<T>) -> Result<T, TransferError> {
        let _place = self.called_here();
        if from.len() != 1 {
            return Err(TransferError::NotOneElement { shape: vec![from.len()] });
        }
        let staged = self.download(from, self.pinned().alloc::<T>(1)?)?.wait_counted()?;
        Ok(staged.read()?[0])
    }

    pub(super) fn download_pinned<T: Pod>(
        &self,
        from: &Buffer<T>,
        to: PinnedSliceMut<'_, T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<()>, TransferError> {
        let part = to.part();
        self.check_device("page-locked memory", part.memory.device_id())?;
        let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| part.bytes > 0) else {
            return Ok(Pending::ready(self.shared(), ()));
        };
        if !part.memory.is_pinned() {
            let job = self.stage_download_plan(from, part.into_target()?, &plan)?;
            return Ok(Pending::job(self.shared(), job, || Ok(())));
        }
        let stream = self.next_stream(Direction::Download);
        let (src, dst, size) = (CopyEnd::Device(from.ptr()), CopyEnd::Host(part.ptr), size_of::<T>() as u64);
        let tick = self.enqueue(stream, &[(from.storage(), AccessKind::Read)], &[(part, AccessKind::Write)], || {
            #[allow(unsafe_code, reason = "the driver gets an address; what keeps it good is above")]
            // SAFETY: the part is memory of its pool, live as `to` borrows its buffer mutably now, and kept by the pool until the tick is
            // done that its turn leaves; until then the host does not touch it, as the buffer waits for that tick first (N1, N2). The
            // plan was checked to lie within both ends.
            unsafe {
                plan.enqueue(stream, src, dst, size)
            }
        })?;
        self.shared().tally.count(Direction::Download, plan.bytes::<T>());
        Ok(Pending::enqueued(self.shared(), tick, ()))
    }

    pub(super) fn download_vec<T: Pod + Send + Sync>(
        &self,
        from: &Buffer<T>,
        mut to: Vec<T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<Vec<T>>, TransferError> {
        let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| from.bytes() > 0) else {
            return Ok(Pending::ready(self.shared(), to));
        };
        if plan.bytes::<T>() <= UNSTAGED_BYTES as u64 {
            let packed = Packed::new(&plan, OnDevice::From);
            return self.take_small(from, &plan, move |staged| packed.scatter_on_host(staged, &mut to).map(|()| to));
        }
        let target = Arc::new(Landing::new(to));
        let job = self.stage_download_plan(from, target.clone(), &plan)?;
        Ok(Pending::job(self.shared(), job, move || target.take()))
    }

    /// Copies the elements to page-locked memory, as [`Packed`] there, and makes of them what the transfer gives.
    fn take_small<T: Pod + Send + Sync, R>(
        &self,
        from: &Buffer<T>,
        plan: &Plan,
        take: impl FnOnce(&[T]) -> Result<R, TransferError> + Send + 'static,
    ) -> Result<Pending<R>, TransferError> {
        let mut staged: PinnedBuffer<T> =
            self.pinned().alloc(host_vec::len_of(plan.elements, size_of::<T>() as u64)?)?;
        let pending = if plan.is_dense() && staged.len() == from.len() {
            self.download_pinned(from, staged.as_slice_mut(), None)?
        } else {
            let packed = Packed::new(plan, OnDevice::From);
            self.download_pinned(from, staged.as_slice_mut(), Some(&packed.gathering()))?
        };
        Ok(pending.map(|()| staged).and_then(|staged| take(staged.read()?)))
    }

    fn stage_download_plan<T: Pod>(
        &self,
        from: &Buffer<T>,
        target: Arc<dyn HostTarget>,
        plan: &Plan,
    ) -> Result<Arc<Job>, TransferError> {
        if plan.is_dense() && target.bytes() == from.bytes() {
            return self.stage_download_from(from, Spread::dense(from.bytes()), target);
        }
        let (from_spread, to_spread) = Packed::new(plan, OnDevice::From).spreads(size_of::<T>() as u64);
        self.stage_download_from(from, from_spread, Arc::new(Scattered { target, spread: to_spread }))
    }

    /// Leaves a copy of those bytes of a buffer that lie so, which must be within it, to the staging ring. The memory is
    /// claimed when this returns.
    fn stage_download_from<T: Pod>(
        &self,
        from: &Buffer<T>,
        spread: Spread,
        target: Arc<dyn HostTarget>,
    ) -> Result<Arc<Job>, TransferError> {
        let (stream, bytes) = (self.staging_stream(Direction::Download)?, spread.bytes());
        let end = DeviceEnd::claim_rows(from, spread, AccessKind::Read)?;
        let job = self.staging().download(end, target, stream, self.priority())?;
        self.shared().tally.count(Direction::Download, bytes);
        Ok(job)
    }
}

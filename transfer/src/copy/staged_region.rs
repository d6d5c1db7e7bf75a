//! Copies of regions of ordinary memory: handed over, or borrowed within a scope.
//!
//! Elements are packed into page-locked memory on their way. As with whole memory, few of them by the calling thread, and more by the staging
//! ring.

use std::sync::Arc;

use aquifer_allocator::DeviceBuffer;
use bytemuck::Pod;

use crate::copy::memory::{Landing, Lent, Owned};
use crate::copy::owned::UNSTAGED_BYTES;
use crate::copy::packed::{OnDevice, Packed};
use crate::copy::region::Plan;
use crate::copy::{Region, Scope};
use crate::error::TransferError;
use crate::host_vec;
use crate::job::Job;
use crate::pending::Pending;
use crate::pinned::PinnedBuffer;
use crate::runtime::Transfer;
use crate::staging::{Gathered, HostSource, HostTarget, Scattered};

impl Transfer {
    /// Copies a region from host memory of any kind, as [`Transfer::upload_from`] copies all of it, and returns.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::{Region, Transfer};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let transfer = Transfer::new(&Allocator::new(&device, Config::default())?)?;
    /// let mut buffer = transfer.to_device(vec![0u32; 4], &device.stream()?)?.wait()?;
    /// // The second column of a 4 × 3 matrix there, and to the third column of another one back.
    /// let region = Region { extents: &[4], from_strides: &[3], to_strides: &[1] };
    /// let _ = transfer.upload_region_from((1..12).collect::<Vec<u32>>(), &mut buffer, &region)?;
    /// let region = Region { extents: &[4], from_strides: &[1], to_strides: &[3] };
    /// let back = transfer.download_region_to(&buffer, vec![0; 10], &region)?.wait()?;
    /// assert_eq!(back, [1, 0, 0, 4, 0, 0, 7, 0, 0, 10]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A region that reaches beyond either end or writes a place twice; else as [`Transfer::upload_from`].
    #[track_caller]
    pub fn upload_region_from<T: Pod + Send + Sync, S>(
        &self,
        source: S,
        to: &mut DeviceBuffer<T>,
        region: &Region<'_>,
    ) -> Result<Pending<()>, TransferError>
    where
        S: AsRef<[T]> + Send + Sync + 'static,
    {
        let _place = self.called_here();
        self.check_device("buffer", to.storage().device_id())?;
        let Some(plan) = region.plan()? else { return Ok(Pending::ready(self.shared(), ())) };
        let source = Owned::new::<T, S>(source);
        plan.check_reach(source.elements(), to.len())?;
        if source.len() == 0 {
            return Ok(Pending::ready(self.shared(), ()));
        }
        if plan.is_small::<T>() {
            return self.upload_small_region::<T>(bytemuck::cast_slice(source.bytes()), to, &plan);
        }
        Ok(self.stage_upload_region(Arc::new(source), to, &plan)?.1)
    }

    /// Copies a region to memory that is handed over, and returns. The memory comes back when the copy is complete; what lies between is as it
    /// was.
    ///
    /// # Errors
    /// A region that reaches beyond either end or writes a place twice; else as [`Transfer::to_vec`]. The memory is dropped then.
    #[track_caller]
    pub fn download_region_to<T: Pod + Send + Sync>(
        &self,
        from: &DeviceBuffer<T>,
        mut to: Vec<T>,
        region: &Region<'_>,
    ) -> Result<Pending<Vec<T>>, TransferError> {
        let _place = self.called_here();
        self.check_device("buffer", from.storage().device_id())?;
        let Some(plan) = region.plan()? else { return Ok(Pending::ready(self.shared(), to)) };
        plan.check_reach(from.len(), to.len() as u64)?;
        if plan.is_small::<T>() {
            let (pending, packed) = self.download_small_region(from, &plan)?;
            return Ok(pending.and_then(move |staged| packed.scatter_on_host(staged.read()?, &mut to).map(|()| to)));
        }
        let target = Arc::new(Landing::new(to));
        let job = self.stage_download_region(from, target.clone(), &plan)?;
        Ok(Pending::job(self.shared(), job, move || target.take()))
    }

    /// Leaves the copy of a region to the staging ring.
    pub(super) fn stage_upload_region<T: Pod>(
        &self,
        source: Arc<dyn HostSource>,
        to: &mut DeviceBuffer<T>,
        plan: &Plan,
    ) -> Result<(Arc<Job>, Pending<()>), TransferError> {
        let (from_spread, to_spread) = Packed::new(plan, OnDevice::To).spreads(size_of::<T>() as u64);
        self.stage_upload_to(Arc::new(Gathered { source, spread: from_spread }), to, to_spread)
    }

    /// Leaves the copy of a region to the staging ring.
    pub(super) fn stage_download_region<T: Pod>(
        &self,
        from: &DeviceBuffer<T>,
        target: Arc<dyn HostTarget>,
        plan: &Plan,
    ) -> Result<Arc<Job>, TransferError> {
        let (from_spread, to_spread) = Packed::new(plan, OnDevice::From).spreads(size_of::<T>() as u64);
        self.stage_download_from(from, from_spread, Arc::new(Scattered { target, spread: to_spread }))
    }

    /// Packs the elements into page-locked memory now, and copies them from there.
    fn upload_small_region<T: Pod>(
        &self,
        from: &[T],
        to: &mut DeviceBuffer<T>,
        plan: &Plan,
    ) -> Result<Pending<()>, TransferError> {
        let packed = Packed::new(plan, OnDevice::To);
        let mut staged = self.pinned().alloc(host_vec::len_of(plan.elements, size_of::<T>() as u64)?)?;
        packed.gather_on_host(from, staged.write()?)?;
        self.upload_region(&staged, to, &packed.scattering())
    }

    /// Copies the elements to page-locked memory. Says how they are packed there.
    fn download_small_region<T: Pod + Send + Sync>(
        &self,
        from: &DeviceBuffer<T>,
        plan: &Plan,
    ) -> Result<(Pending<PinnedBuffer<T>>, Packed), TransferError> {
        let packed = Packed::new(plan, OnDevice::From);
        let mut staged = self.pinned().alloc(host_vec::len_of(plan.elements, size_of::<T>() as u64)?)?;
        let pending = self.download_region(from, &mut staged, &packed.gathering())?;
        Ok((pending.map(|()| staged), packed))
    }

    /// Copies a region from borrowed memory, and waits on the host until the copy is done.
    ///
    /// # Errors
    /// As [`Scope::upload_region`].
    #[track_caller]
    pub fn upload_region_blocking<T: Pod + Send + Sync>(
        &self,
        from: &[T],
        to: &mut DeviceBuffer<T>,
        region: &Region<'_>,
    ) -> Result<(), TransferError> {
        let _place = self.called_here();
        self.scope(|scope| scope.upload_region(from, to, region))
    }

    /// Copies a region to borrowed memory, and waits on the host until the copy is done. What lies between stays.
    ///
    /// # Errors
    /// As [`Scope::download_region`]. What the region's places hold then is unspecified.
    #[track_caller]
    pub fn download_region_blocking<T: Pod + Send + Sync>(
        &self,
        from: &DeviceBuffer<T>,
        to: &mut [T],
        region: &Region<'_>,
    ) -> Result<(), TransferError> {
        let _place = self.called_here();
        self.scope(|scope| scope.download_region(from, to, region))
    }
}

impl<'env> Scope<'env> {
    /// Copies a region from borrowed memory, and returns; what is small is taken before that. The scope waits for it.
    ///
    /// # Errors
    /// A region that reaches beyond either end or writes a place twice; else as [`Scope::upload`].
    #[track_caller]
    pub fn upload_region<T: Pod + Send + Sync>(
        &self,
        from: &'env [T],
        to: &mut DeviceBuffer<T>,
        region: &Region<'_>,
    ) -> Result<(), TransferError> {
        let _place = self.transfer.called_here();
        self.transfer.check_device("buffer", to.storage().device_id())?;
        let Some(plan) = region.plan()? else { return Ok(()) };
        plan.check_reach(from.len() as u64, to.len())?;
        if plan.is_small::<T>() {
            let pending = self.transfer.upload_small_region(from, to, &plan)?;
            self.add(None, move || pending.wait());
            return Ok(());
        }
        #[allow(unsafe_code, reason = "lending is a promise to wait, and here is where it is made")]
        // SAFETY: the memory is borrowed for `'env`, which lasts beyond the scope, and the scope waits until the job is settled.
        let lent = unsafe { Lent::to_read(from) };
        let (job, pending) = self.transfer.stage_upload_region(Arc::new(lent), to, &plan)?;
        self.add(Some(job), move || pending.wait());
        Ok(())
    }

    /// Copies a region to borrowed memory, and returns. The scope waits for it. What lies between stays.
    ///
    /// # Errors
    /// A region that reaches beyond either end or writes a place twice; else as [`Scope::download`].
    #[track_caller]
    pub fn download_region<T: Pod + Send + Sync>(
        &self,
        from: &DeviceBuffer<T>,
        to: &'env mut [T],
        region: &Region<'_>,
    ) -> Result<(), TransferError> {
        let _place = self.transfer.called_here();
        self.transfer.check_device("buffer", from.storage().device_id())?;
        let Some(plan) = region.plan()? else { return Ok(()) };
        plan.check_reach(from.len(), to.len() as u64)?;
        if plan.is_small::<T>() {
            let (pending, packed) = self.transfer.download_small_region(from, &plan)?;
            self.add(None, move || packed.scatter_on_host(pending.wait()?.read()?, to));
            return Ok(());
        }
        #[allow(unsafe_code, reason = "lending is a promise to wait, and here is where it is made")]
        // SAFETY: the memory is borrowed mutably for `'env`, which lasts beyond the scope, and the scope waits until the job is settled.
        let lent = unsafe { Lent::to_write(to) };
        let job = self.transfer.stage_download_region(from, Arc::new(lent), &plan)?;
        let pending = Pending::job(self.transfer.shared(), job.clone(), || Ok(()));
        self.add(Some(job), move || pending.wait());
        Ok(())
    }
}

impl Plan {
    /// Whether the calling thread packs the elements by itself.
    fn is_small<T>(&self) -> bool {
        self.elements.saturating_mul(size_of::<T>() as u64) <= UNSTAGED_BYTES as u64
    }
}

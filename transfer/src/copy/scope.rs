//! Copies of borrowed memory: those that wait until they are done, and scopes, which wait at their end.

use std::cell::Cell;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use aquifer_allocator::DeviceBuffer;
use aquifer_device::fork::Mutex;
use bytemuck::Pod;

use crate::copy::direct::check_lengths;
use crate::copy::memory::Lent;
use crate::copy::owned::UNSTAGED_BYTES;
use crate::error::TransferError;
use crate::job::Job;
use crate::runtime::Transfer;

/// Copies of borrowed memory that are done before the scope's end.
///
/// Made by [`Transfer::scope`].
pub struct Scope<'env> {
    pub(super) transfer: Transfer,
    begun: Mutex<Vec<Begun<'env>>>,
    /// Keeps `'env` from being shortened, so that nothing is lent for less than the scope.
    invariant: PhantomData<Cell<&'env mut ()>>,
}

/// A copy that the scope waits for.
struct Begun<'env> {
    /// Who touches the borrowed memory until it is settled.
    job: Option<Arc<Job>>,
    /// Waits until it is complete.
    finish: Box<dyn FnOnce() -> Result<(), TransferError> + Send + 'env>,
}

impl Transfer {
    /// Calls `work` with a scope in which borrowed memory can be copied without waiting, and waits for all such copies before it
    /// returns, also when `work` fails or panics. Waits on the host.
    ///
    /// # Errors
    /// That of `work`, else the first of the copies.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, DeviceBuffer};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::Transfer;
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let transfer = Transfer::new(&Allocator::new(&device, Config::default())?)?;
    /// let stream = device.stream()?;
    /// let (input, mut output) = (vec![3u8; 1 << 20], vec![0u8; 1 << 20]);
    /// let mut buffer: DeviceBuffer<u8> = transfer.allocator().alloc_buffer(1 << 20, &stream)?;
    /// transfer.scope(|scope| {
    ///     scope.upload(&input, &mut buffer)?;
    ///     scope.download(&buffer, &mut output)
    /// })?;
    /// assert_eq!(input, output);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn scope<'env, R>(
        &self,
        work: impl FnOnce(&Scope<'env>) -> Result<R, TransferError>,
    ) -> Result<R, TransferError> {
        let scope = Scope { transfer: self.clone(), begun: Mutex::default(), invariant: PhantomData };
        let worked = catch_unwind(AssertUnwindSafe(|| work(&scope)));
        let begun = scope.begun.into_inner();
        // First of all nobody touches borrowed memory any more, whatever else fails.
        begun.iter().filter_map(|begun| begun.job.as_ref()).for_each(|job| drop(job.wait()));
        let mut finished = Ok(());
        for begun in begun {
            // All are waited for, whatever came of the others.
            let one = (begun.finish)();
            finished = finished.and(one);
        }
        match worked {
            Ok(result) => result.and_then(|result| finished.map(|()| result)),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Copies from borrowed memory, and waits on the host until the copy is done.
    ///
    /// # Errors
    /// Ends of different lengths, and as [`Transfer::to_device`].
    #[track_caller]
    pub fn upload_blocking<T: Pod + Send + Sync>(
        &self,
        from: &[T],
        to: &mut DeviceBuffer<T>,
    ) -> Result<(), TransferError> {
        let _place = self.called_here();
        self.scope(|scope| scope.upload(from, to))
    }

    /// Copies to borrowed memory, and waits on the host until the copy is done.
    ///
    /// # Errors
    /// Ends of different lengths, and as [`Transfer::to_vec`]. What `to` holds then is unspecified.
    #[track_caller]
    pub fn download_blocking<T: Pod + Send + Sync>(
        &self,
        from: &DeviceBuffer<T>,
        to: &mut [T],
    ) -> Result<(), TransferError> {
        let _place = self.called_here();
        self.scope(|scope| scope.download(from, to))
    }

    /// Reads one element, and waits on the host until it is there: the device stands still meanwhile if it has nothing else to do.
    /// Counted as a synchronisation, also where the device was quick.
    ///
    /// # Errors
    /// [`TransferError::OutOfBounds`] for an index beyond the end, and as [`Transfer::to_host`].
    #[track_caller]
    pub fn item<T: Pod + Send + Sync>(&self, from: &DeviceBuffer<T>, index: u64) -> Result<T, TransferError> {
        let _place = self.called_here();
        let end = index.saturating_add(1);
        let beyond = TransferError::OutOfBounds { start: index, end, len: from.len() };
        if index >= from.len() {
            return Err(beyond);
        }
        let host = self.to_host(&from.slice(index..end)?)?.wait_counted()?;
        let read = host.read()?;
        read.first().copied().ok_or(beyond)
    }
}

impl<'env> Scope<'env> {
    /// Copies from borrowed memory, and returns; what is small is taken before that. The scope waits for it.
    ///
    /// # Errors
    /// Ends of different lengths, and as [`Transfer::to_device`].
    #[track_caller]
    pub fn upload<T: Pod + Send + Sync>(&self, from: &'env [T], to: &mut DeviceBuffer<T>) -> Result<(), TransferError> {
        let _place = self.transfer.called_here();
        check_lengths(from.len() as u64, to.len())?;
        self.transfer.check_device("buffer", to.storage().device_id())?;
        if size_of_val(from) <= UNSTAGED_BYTES {
            let pending = self.transfer.upload_small(from, to)?;
            self.add(None, move || pending.wait());
            return Ok(());
        }
        #[allow(unsafe_code, reason = "lending is a promise to wait, and here is where it is made")]
        // SAFETY: the memory is borrowed for `'env`, which lasts beyond the scope, and the scope waits until the job is settled.
        let lent = unsafe { Lent::to_read(from) };
        let (job, pending) = self.transfer.stage_upload(Arc::new(lent), to)?;
        self.add(Some(job), move || pending.wait());
        Ok(())
    }

    /// Copies to borrowed memory, and returns. The scope waits for it.
    ///
    /// # Errors
    /// Ends of different lengths, and as [`Transfer::to_vec`].
    #[track_caller]
    pub fn download<T: Pod + Send + Sync>(
        &self,
        from: &DeviceBuffer<T>,
        to: &'env mut [T],
    ) -> Result<(), TransferError> {
        let _place = self.transfer.called_here();
        check_lengths(from.len(), to.len() as u64)?;
        self.transfer.check_device("buffer", from.storage().device_id())?;
        if size_of_val(to) <= UNSTAGED_BYTES {
            let pending = self.transfer.to_host(from)?;
            self.add(None, move || {
                to.copy_from_slice(pending.wait()?.read()?);
                Ok(())
            });
            return Ok(());
        }
        #[allow(unsafe_code, reason = "lending is a promise to wait, and here is where it is made")]
        // SAFETY: the memory is borrowed mutably for `'env`, which lasts beyond the scope, and the scope waits until the job is settled.
        let lent = unsafe { Lent::to_write(to) };
        let job = self.transfer.stage_download(from, Arc::new(lent))?;
        let pending = crate::pending::Pending::job(self.transfer.shared(), job.clone(), || Ok(()));
        self.add(Some(job), move || pending.wait());
        Ok(())
    }

    /// Has the scope wait for a copy.
    pub(super) fn add(&self, job: Option<Arc<Job>>, finish: impl FnOnce() -> Result<(), TransferError> + Send + 'env) {
        self.begun.lock().push(Begun { job, finish: Box::new(finish) });
    }
}

impl std::fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("transfer", &self.transfer).finish_non_exhaustive()
    }
}

//! The system memory behind slabs.

use std::any::Any;
use std::num::NonZeroUsize;
use std::thread;

use aquifer_device::{Device, DeviceError, HostPtr, Tick};
use memmap2::MmapMut;

use crate::error::TransferError;
use crate::host_memory;

/// The least that is worth a thread, in bytes.
const THREAD_PART: usize = 16 << 20;
/// The alignment of huge pages in bytes.
const HUGE: usize = 2 << 20;
/// A page in bytes.
const PAGE: usize = 4096;

/// The memory of a slab, with one owner. Dropping it releases nothing: call a release method.
#[derive(Debug)]
pub(super) struct SlabMemory {
    ptr: HostPtr,
    bytes: usize,
    /// The memory, if it is not the driver's. Leaked rather than unmapped while it is registered.
    map: Option<Box<MmapMut>>,
}

impl SlabMemory {
    /// `bytes` bytes of pinned memory that starts at a page. All of it is initialised.
    ///
    /// First releases finished memory of earlier pools that the device holds, so programs that make
    /// one pool after another do not grow. If the system has no memory, releases the rest of it,
    /// too.
    pub(super) fn obtain(
        register_threads: Option<NonZeroUsize>,
        device: &Device,
        bytes: u64,
    ) -> Result<SlabMemory, TransferError> {
        let bytes = host_memory::len_of(bytes, 1)?;
        device.settle_host();
        match Self::from_system(register_threads, device, bytes) {
            Err(error) if error.is_out_of_memory() && device.wait_and_settle_host() > 0 => {
                Self::from_system(register_threads, device, bytes)
            }
            outcome => outcome,
        }
    }

    fn from_system(
        register_threads: Option<NonZeroUsize>,
        device: &Device,
        bytes: usize,
    ) -> Result<SlabMemory, TransferError> {
        match register_threads {
            None => Ok(SlabMemory { ptr: device.driver().host_alloc(bytes)?, bytes, map: None }),
            Some(threads) => Self::register(device, bytes, threads),
        }
    }

    #[allow(unsafe_code, reason = "the driver is given memory by its address")]
    fn register(device: &Device, bytes: usize, threads: NonZeroUsize) -> Result<SlabMemory, TransferError> {
        let no_memory =
            |cause: std::io::Error| TransferError::OutOfHostMemory { bytes: bytes as u64, cause: cause.into() };
        // Room to start at a huge page. The rest is never touched, so no memory is behind it.
        let room = if bytes >= HUGE { HUGE } else { 0 };
        let length = bytes.checked_add(room).ok_or_else(|| no_memory(std::io::ErrorKind::OutOfMemory.into()))?;
        let mut map = Box::new(MmapMut::map_anon(length).map_err(no_memory)?);
        #[cfg(target_os = "linux")]
        if room > 0
            && let Err(error) = map.advise(memmap2::Advice::HugePage)
        {
            tracing::debug!(%error, "no huge pages for pinned memory");
        }
        let start = map.as_ptr().expose_provenance();
        let offset = if room > 0 { start.next_multiple_of(HUGE) - start } else { 0 };
        let slab = &mut map[offset..offset + bytes];
        touch(slab, threads);
        // SAFETY: the memory stays mapped until it is unregistered: `release` and `release_later`
        // see to that, and dropping this before does not unmap it.
        let ptr = unsafe { device.driver().host_register(slab.as_mut_ptr(), bytes)? };
        Ok(SlabMemory { ptr, bytes, map: Some(map) })
    }

    /// The first address.
    pub(super) fn addr(&self) -> u64 {
        self.ptr.0 as u64
    }

    /// Its length.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Whether giving it back makes the driver wait for the device.
    pub(super) fn waits_for_device(&self) -> bool {
        self.map.is_some()
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// It is unused, and no copy is in flight for it.
    #[allow(unsafe_code, reason = "the driver takes memory back by its address")]
    pub(super) unsafe fn release(&mut self, device: &Device) -> Result<(), DeviceError> {
        if self.map.is_none() {
            // SAFETY: it came from `obtain`, has one owner, and is unused, as the caller promises.
            return unsafe { device.driver().host_free(self.ptr) };
        }
        // SAFETY: it came from `register`, has one owner, and is unused, as the caller promises.
        unsafe { device.driver().host_unregister(self.ptr)? };
        self.map = None;
        Ok(())
    }

    /// Gives the memory back some time after the device is done with these `uses`. Makes no driver
    /// call.
    ///
    /// # Safety
    /// It is unused, except by copies before these ticks of their streams.
    #[allow(unsafe_code, reason = "the driver takes memory back by its address")]
    pub(super) unsafe fn release_later(mut self, device: &Device, uses: Vec<Tick>) {
        let bytes = self.bytes as u64;
        match self.map.take() {
            // SAFETY: it came from `obtain` and has one owner; its uses are as the caller promises.
            None => unsafe { device.host_free_later(self.ptr, bytes, uses) },
            // SAFETY: it came from `register` and has one owner; its uses are as the caller
            // promises.
            Some(map) => unsafe { device.host_unregister_later(self.ptr, bytes, map as Box<dyn Any + Send>, uses) },
        }
    }
}

impl Drop for SlabMemory {
    fn drop(&mut self) {
        // Still registered, so the device may know its address.
        std::mem::forget(self.map.take());
    }
}

/// Writes to every page, which makes the system provide it, in parallel where that is worth
/// threads. If a thread does not start, the driver provides its part, more slowly.
fn touch(slab: &mut [u8], threads: NonZeroUsize) {
    let threads = threads.get().min(slab.len() / THREAD_PART).max(1);
    let part = slab.len().div_ceil(threads).next_multiple_of(HUGE);
    let touch_pages = |part: &mut [u8]| part.chunks_mut(PAGE).for_each(|page| page[0] = 0);
    thread::scope(|scope| {
        let mut parts = slab.chunks_mut(part);
        let own = parts.next();
        for part in parts {
            let started =
                thread::Builder::new().name("aquifer-touch".to_owned()).spawn_scoped(scope, move || touch_pages(part));
            if let Err(error) = started {
                tracing::debug!(%error, "no thread to touch pinned memory");
            }
        }
        own.map(touch_pages);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_written_by_any_number_of_threads() {
        for (bytes, threads) in [(1, 1), (PAGE, 4), (3 * THREAD_PART + PAGE, 2), (5 * THREAD_PART, 64)] {
            let mut slab = vec![1; bytes];
            touch(&mut slab, NonZeroUsize::new(threads).unwrap());
            assert!(slab.chunks(PAGE).all(|page| page[0] == 0 && page[1..].iter().all(|&byte| byte == 1)));
        }
    }
}

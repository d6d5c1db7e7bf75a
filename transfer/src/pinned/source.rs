//! Where slabs come from, and how they go back.

use aquifer_device::{Device, HostPtr, Result};

/// Where the slabs of a pool come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlabSource {
    /// The driver allocates them (`cuMemHostAlloc`).
    #[default]
    DriverAlloc,
}

/// What holds the memory of a slab. Dropping it leaks the memory: it must be released.
#[derive(Debug)]
pub(crate) struct SlabMemory {
    ptr: HostPtr,
}

impl SlabMemory {
    /// `bytes` bytes of page-locked memory that starts at a page.
    pub(crate) fn obtain(source: &SlabSource, device: &Device, bytes: usize) -> Result<SlabMemory> {
        match source {
            SlabSource::DriverAlloc => Ok(SlabMemory { ptr: device.driver().host_alloc(bytes)? }),
        }
    }

    /// The first address.
    pub(crate) fn start(&self) -> usize {
        self.ptr.0
    }

    /// Gives the memory back. No copy may be in flight for it.
    pub(crate) fn release(&mut self, device: &Device) -> Result<()> {
        device.driver().host_free(self.ptr)
    }

    /// Gives the memory back some time after the device is done with it. Makes no driver call.
    pub(crate) fn release_later(self, device: &Device) {
        device.host_free_later(self.ptr);
    }
}

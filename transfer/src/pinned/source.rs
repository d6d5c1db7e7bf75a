//! The system memory behind slabs.

use aquifer_device::{Device, DeviceError, HostPtr, Tick};

use crate::error::TransferError;
use crate::host_memory;

/// The memory of a slab, with one owner. Dropping it releases nothing: call a release method.
#[derive(Debug)]
pub(super) struct SlabMemory {
    ptr: HostPtr,
    bytes: usize,
}

impl SlabMemory {
    /// `bytes` bytes of pinned memory that starts at a page. All of it is initialised.
    ///
    /// First releases finished memory of earlier pools that the device holds, so programs that make
    /// one pool after another do not grow. If the system has no memory, releases the rest of it,
    /// too.
    pub(super) fn obtain(device: &Device, bytes: u64) -> Result<SlabMemory, TransferError> {
        let bytes = host_memory::len_of(bytes, 1)?;
        device.settle_host();
        let ptr = match device.driver().host_alloc(bytes) {
            Err(error) if error.is_out_of_memory() && device.wait_and_settle_host() > 0 => {
                device.driver().host_alloc(bytes)?
            }
            outcome => outcome?,
        };
        Ok(SlabMemory { ptr, bytes })
    }

    /// The first address.
    pub(super) fn addr(&self) -> u64 {
        self.ptr.0 as u64
    }

    /// Its length.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// It is unused, and no copy is in flight for it.
    #[allow(unsafe_code, reason = "the driver takes memory back by its address")]
    pub(super) unsafe fn release(&self, device: &Device) -> Result<(), DeviceError> {
        // SAFETY: it came from `obtain`, has one owner, and is unused, as the caller promises.
        unsafe { device.driver().host_free(self.ptr) }
    }

    /// Gives the memory back some time after the device is done with these `uses`. Makes no driver
    /// call.
    ///
    /// # Safety
    /// It is unused, except by copies before these ticks of their streams.
    #[allow(unsafe_code, reason = "the driver takes memory back by its address")]
    pub(super) unsafe fn release_later(self, device: &Device, uses: Vec<Tick>) {
        // SAFETY: it came from `obtain` and has one owner; its uses are as the caller promises.
        unsafe { device.host_free_later(self.ptr, self.bytes as u64, uses) }
    }
}

//! The owning handle of a live block.

use std::fmt;
use std::ops::Range;

use aquifer_device::{DevicePtr, Stream};

use crate::error::AllocError;
use crate::heap::BlockId;
use crate::shell::Shell;

/// A live block of device memory. Dropping it gives the memory back, on any thread, without a driver call and without
/// waiting for the device.
///
/// The memory is for work on the stream it was allocated for. Work on another stream must be ordered after that stream, and
/// noted with [`Allocation::record_stream`] unless the allocation's own stream is ordered after it before the handle is
/// dropped.
#[must_use = "dropping the handle gives the memory back"]
pub struct Allocation {
    shell: &'static Shell,
    /// [`BlockId::NONE`] for an allocation of zero bytes, which has none, and for a handle that was given up.
    block: BlockId,
    slot: u32,
    ptr: DevicePtr,
    bytes: u64,
}

impl Allocation {
    pub(crate) fn new(shell: &'static Shell, block: BlockId, slot: u32, ptr: DevicePtr, bytes: u64) -> Allocation {
        Allocation { shell, block, slot, ptr, bytes }
    }

    pub(crate) fn zero(shell: &'static Shell, slot: u32) -> Allocation {
        Allocation { shell, block: BlockId::NONE, slot, ptr: DevicePtr(0), bytes: 0 }
    }

    /// Its first address; null for zero bytes.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Bytes asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its addresses.
    pub fn range(&self) -> Range<u64> {
        self.ptr.range(self.bytes)
    }

    /// Our own number of the stream it was allocated for.
    pub fn stream_id(&self) -> u32 {
        self.slot
    }

    /// Notes that `stream` uses the memory too: it will not be reused before the work enqueued there until the handle is
    /// dropped is done. Nothing for the allocation's own stream.
    ///
    /// # Errors
    /// When the stream belongs to another device.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        if self.block == BlockId::NONE {
            return Ok(());
        }
        let mut core = self.shell.lock();
        if core.device.as_ref().is_none_or(|device| device.id() != stream.device_id()) {
            return Err(AllocError::WrongDevice { what: "stream" });
        }
        let slot = core.slot(stream);
        core.note_use(self.block, slot);
        Ok(())
    }

    /// Gives the memory back in the order of `stream`, which must come after every use of it: `stream` may reuse it at once,
    /// the stream it was allocated for only after the work enqueued on `stream` until now.
    ///
    /// # Errors
    /// When the stream belongs to another device. The memory is then given back as by dropping the handle.
    pub fn drop_on(self, stream: &Stream) -> Result<(), AllocError> {
        if self.block == BlockId::NONE {
            return Ok(());
        }
        let mut core = self.shell.lock();
        if core.device.as_ref().is_none_or(|device| device.id() != stream.device_id()) {
            return Err(AllocError::WrongDevice { what: "stream" });
        }
        let on = core.slot(stream);
        drop(core);
        let shell = self.shell;
        shell.free(self.into_block(), Some(on));
        Ok(())
    }

    /// Gives up the handle; the block stays live.
    pub(crate) fn into_block(mut self) -> BlockId {
        std::mem::replace(&mut self.block, BlockId::NONE)
    }
}

const _: () = assert!(size_of::<Option<Allocation>>() == 32, "two handles fill a cache line");

impl Drop for Allocation {
    #[inline]
    fn drop(&mut self) {
        if self.block != BlockId::NONE {
            self.shell.free(self.block, None);
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation")
            .field("ptr", &self.ptr)
            .field("bytes", &self.bytes)
            .field("stream", &self.slot)
            .finish_non_exhaustive()
    }
}

//! Pinned host memory with one owner, through which contents of device memory pass.
//!
//! Invariant: the host touches the bytes, and the memory is freed, only once the copies that use it
//! are done.

use crate::device::Device;
use crate::driver::{DevicePtr, HostPtr};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::launch::AccessKind;
use crate::stream::Stream;
use crate::timeline::Tick;

/// Pinned host memory for copies of bytes that nothing waits for, with one call of the driver each.
/// Dropped while copies are under way, it is freed once they are done.
///
/// It orders nothing on the device: that is up to the streams.
///
/// ```
/// use aquifer_device::HostBuffer;
/// let device = aquifer::open("sim:24GiB")?;
/// let (stream, memory) = (device.stream()?, device.alloc(4096)?);
/// let mut host = HostBuffer::new(&device, 4096)?;
/// host.bytes()?.fill(7);
/// host.upload(0, memory, 4096, &stream)?; // returns at once
/// host.download(2048, memory, 1024, &stream)?; // after the upload: on the same stream
/// assert_eq!(host.bytes()?[2048], 7); // waits
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Debug)]
pub struct HostBuffer {
    device: Device,
    ptr: HostPtr,
    bytes: usize,
    /// A tick of each stream that copies here, behind its last copy.
    uses: Vec<Tick>,
}

impl HostBuffer {
    /// Allocates `bytes` bytes, not 0.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(device: &Device, bytes: usize) -> Result<HostBuffer> {
        let ptr = device.driver().host_alloc(bytes)?;
        Ok(HostBuffer { device: device.for_memory(), ptr, bytes, uses: Vec::new() })
    }

    /// Its length in bytes.
    pub fn size(&self) -> usize {
        self.bytes
    }

    /// Enqueues a copy from the device to the bytes from `at` on.
    ///
    /// # Errors
    /// When the bytes lie outside; a stream of another device, or one that captures; errors of the
    /// driver.
    pub fn download(&mut self, at: usize, src: DevicePtr, bytes: usize, stream: &Stream) -> Result<()> {
        // SAFETY: the bytes lie in this buffer, as `copy` has checked. It touches and frees them
        // only after a wait for the tick that `copy` notes.
        self.copy(at, bytes, stream, Operation::CopyToHost, |host| unsafe { stream.download(host, src, bytes) })
    }

    /// Enqueues a copy to the device of the bytes from `at` on.
    ///
    /// # Errors
    /// As [`HostBuffer::download`].
    pub fn upload(&mut self, at: usize, dst: DevicePtr, bytes: usize, stream: &Stream) -> Result<()> {
        // SAFETY: as for `download`.
        self.copy(at, bytes, stream, Operation::CopyToDevice, |host| unsafe { stream.upload(dst, host, bytes) })
    }

    fn copy(
        &mut self,
        at: usize,
        bytes: usize,
        stream: &Stream,
        operation: Operation,
        enqueue: impl FnOnce(HostPtr) -> Result<()>,
    ) -> Result<()> {
        let refused = |why: &str| Err(DeviceError::refused(operation, Code::INVALID_VALUE).with_detail(why));
        if at.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return refused("the bytes lie outside of the pinned memory");
        }
        if stream.device_id() != self.device.id() {
            return refused("the stream and the pinned memory belong to different devices");
        }
        // A graph could copy at any time.
        let Some(_held_off) = stream.hold_off_captures() else { return refused("the stream captures") };
        let enqueued = enqueue(HostPtr(self.ptr.0 + at));
        // After an error, too: part of the copy may be under way.
        self.uses.retain(|tick| tick.timeline().id() != stream.id());
        self.uses.push(stream.tick());
        enqueued
    }

    /// Waits until all copies are done.
    ///
    /// # Errors
    /// Errors of the driver. The copies may be under way still.
    pub fn wait(&mut self) -> Result<()> {
        self.uses.iter().try_for_each(Tick::synchronize)?;
        self.uses.clear();
        Ok(())
    }

    /// The bytes, once all copies are done.
    ///
    /// # Errors
    /// As [`HostBuffer::wait`].
    pub fn bytes(&mut self) -> Result<&mut [u8]> {
        self.wait()?;
        self.device.driver().host_access(self.ptr, self.bytes, AccessKind::Write)?;
        // SAFETY: the driver allocated these bytes for this buffer, and they are initialised
        // (`Driver::host_alloc`). No copy uses them, and the borrow keeps new ones away.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.bytes) })
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let uses = std::mem::take(&mut self.uses);
        // SAFETY: this buffer owned the memory, and all work that uses it comes before these ticks,
        // which are of its device.
        unsafe { self.device.host_free_later(self.ptr, self.bytes as u64, uses) };
    }
}

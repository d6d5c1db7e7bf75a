//! Copies between devices.

use std::panic::Location;

use crate::device::Device;
use crate::driver::{DevicePtr, Driver};
use crate::error::{Operation, Result};
use crate::stream::Stream;

impl Stream {
    /// Enqueues a copy from the memory of another device of the same kind, whether or not the two
    /// can access each other's memory. Use [`Stream::wait_for`], which takes ticks of other
    /// devices, to order this stream after the work that wrote the source, and to order work that
    /// overwrites or frees the source after this stream.
    ///
    /// ```
    /// let (one, two) = (aquifer::open("sim:24GiB")?, aquifer::open("sim:24GiB,ordinal=1")?);
    /// let (producer, consumer) = (one.stream()?, two.stream()?);
    /// let (src, dst) = (one.alloc(1 << 20)?, two.alloc(1 << 20)?);
    /// producer.fill(src, 7, 1 << 20)?;
    /// consumer.wait_for(&producer.tick())?; // before the source is read
    /// consumer.copy_from_peer(dst, &one, src, 1 << 20)?;
    /// producer.wait_for(&consumer.tick())?; // before the source is used again
    /// producer.fill(src, 8, 1 << 20)?;
    /// let mut bytes = [0; 4];
    /// consumer.download_blocking(&mut bytes, dst)?;
    /// assert_eq!(bytes, [7; 4]);
    /// one.assert_no_violations();
    /// two.assert_no_violations();
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the device is of another kind, the ranges are not live memory of their devices, or a
    /// capture is in progress; errors of the driver.
    #[track_caller]
    pub fn copy_from_peer(&self, dst: DevicePtr, peer: &Device, src: DevicePtr, bytes: u64) -> Result<()> {
        let _place = self.called_from(Location::caller());
        let context = self.context();
        let answer = context.driver.copy_peer(dst, peer.driver(), src, bytes, self.usable(Operation::CopyPeer)?);
        context.complete_with_peer(peer.context(), answer)
    }
}

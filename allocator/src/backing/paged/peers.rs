//! Access of other devices to this one's memory.
//!
//! Each mapping has its own list of devices with access. So a new peer is given access to all
//! existing mappings, and to every later one by the list that operations on mappings use. The gate
//! excludes those operations in between, so that no mapping is missed.

use aquifer_device::DevicePtr;

use crate::allocator::Allocator;
use crate::backing::paged::probe::try_mapping;
use crate::error::AllocError;

impl Allocator {
    /// Lets the device with this ordinal read and write all memory of the allocator that is mapped,
    /// now and later. Once is enough; again is nothing.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let driver = SimDriver::new(SimConfig::default());
    /// let peer = SimDriver::new(SimConfig::default().ordinal(1));
    /// let device = Device::new(driver.clone());
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let before = allocator.alloc_bytes(5 << 20, device.default_stream())?;
    /// allocator.enable_peer_access(1)?;
    /// let after = allocator.alloc_bytes(50 << 20, device.default_stream())?;
    /// for buffer in [before, after] {
    ///     assert_eq!(driver.mapping_at(buffer.ptr()).unwrap().devices, [0, 1]);
    /// }
    /// # drop(peer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the driver, such as a device that does not exist, or devices that cannot reach
    /// each other: the peer is then not let into later mappings, though it may have access to some
    /// of the present ones. [`AllocError::NotMapped`] where memory comes in segments.
    pub fn enable_peer_access(&self, ordinal: u32) -> Result<(), AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::SetAccess)?;
        let _alone = self.gate()?.exclusive();
        let shared = self.state().shared();
        let Some(paged) = shared.paged() else {
            return Err(self.not_mapped("access of peers"));
        };
        if paged.access.contains(&ordinal) {
            return Ok(());
        }
        let (granule, options) = (paged.granule, paged.options);
        let ranges = paged.mapped_ranges();
        drop(shared);
        if ranges.is_empty() {
            // Better now than at the first growth. A device that is just full is taken to be able.
            let tried = try_mapping(self.device(), granule, options, &[self.device().info().ordinal, ordinal]);
            tried.map(|_| ()).or_else(|error| if error.is_out_of_memory() { Ok(()) } else { Err(error) })?;
        }
        for range in ranges {
            self.device().driver().set_access(DevicePtr(range.start), range.end - range.start, &[ordinal])?;
        }
        self.state().shared().add_peer(ordinal);
        Ok(())
    }
}

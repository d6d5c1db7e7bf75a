//! Copies between host memory, which the calling thread makes: a copy engine cannot, and drivers make the host wait for such copies anyway.
#![allow(single_use_lifetimes, reason = "a lifetime in an argument's `impl Trait` must have a name")]

use bytemuck::Pod;

use crate::copy::{Region, check_lengths};
use crate::error::TransferError;
use crate::pinned::{PinnedSlice, PinnedSliceMut};
use crate::runtime::Transfer;

impl Transfer {
    /// Copies as many elements as both ends have from one piece of host memory to another, with the calling thread, after waiting on the
    /// host for copies into `from`, and for all that use `to`. The pools may be of different devices, and the memory pageable. To set all
    /// elements to a value, use [`PinnedSliceMut::write`] and [`slice::fill`].
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::Transfer;
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let transfer = Transfer::new(&Allocator::new(&device, Config::default())?)?;
    /// let from = transfer.pinned().alloc_from(&[1u32, 2, 3, 4])?;
    /// let mut to = transfer.pinned().alloc_zeroed::<u32>(2)?;
    /// transfer.copy_on_host_blocking(from.slice(1..3)?, &mut to)?;
    /// assert_eq!((to.read()?, transfer.counters().on_host.bytes), (&[2, 3][..], 8));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Ends of different lengths, and errors of the driver: what a lost device was to write will never be there.
    pub fn copy_on_host_blocking<'a, 'b, T: Pod>(
        &self,
        from: impl Into<PinnedSlice<'a, T>>,
        to: impl Into<PinnedSliceMut<'b, T>>,
    ) -> Result<(), TransferError> {
        let (from, to) = (from.into(), to.into());
        check_lengths(from.len() as u64, to.len() as u64)?;
        if from.bytes() == 0 {
            return Ok(());
        }
        let to = to.into_write()?;
        to.copy_from_slice(from.read()?);
        self.shared().tally.count_on_host(size_of_val(to) as u64);
        Ok(())
    }

    /// Copies a region from one piece of host memory to another; see [`Transfer::copy_on_host_blocking`]. What lies between stays.
    ///
    /// # Errors
    /// A region that reaches beyond either end or writes a place twice, and errors of the driver.
    pub fn copy_region_on_host_blocking<'a, 'b, T: Pod>(
        &self,
        from: impl Into<PinnedSlice<'a, T>>,
        to: impl Into<PinnedSliceMut<'b, T>>,
        region: &Region<'_>,
    ) -> Result<(), TransferError> {
        let (from, to) = (from.into(), to.into());
        let Some(plan) = region.plan()? else { return Ok(()) };
        plan.check_reach(from.len() as u64, to.len() as u64)?;
        plan.copy_on_host(from.read()?, to.into_write()?);
        self.shared().tally.count_on_host(plan.elements * size_of::<T>() as u64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use aquifer_allocator::{Allocator, Config, DeviceBuffer};
    use aquifer_device::Device;
    use aquifer_device::sim::{SimConfig, SimDriver};

    use super::*;
    use crate::{PinnedConfig, PinnedPool};

    /// Both ends wait for what is in flight, whosever pools they are of, page-locked or not.
    #[test]
    fn copies_on_the_host_come_after_those_of_devices() {
        let (sim, other) = (SimDriver::new(SimConfig::default()), Device::new(SimDriver::new(SimConfig::default())));
        let device = Device::new(sim.clone());
        let transfer = Transfer::new(&Allocator::new(&device, Config::default()).unwrap()).unwrap();
        let stream = device.create_stream().unwrap();
        let (mut from, mut to) = (
            transfer.pinned().alloc_zeroed::<u32>(1000).unwrap(),
            transfer.pinned().alloc_zeroed::<u32>(1000).unwrap(),
        );
        let sent: Vec<u32> = (0..1000).collect();
        let buffer = transfer.to_device(sent.clone(), &stream).unwrap().wait().unwrap();
        let mut target: DeviceBuffer<u32> = transfer.allocator().alloc_buffer(1000, &stream).unwrap();
        drop(transfer.upload(&to, &mut target).unwrap());
        drop(transfer.download(&buffer, &mut from).unwrap());
        transfer.copy_on_host_blocking(&from, &mut to).unwrap();
        assert_eq!(to.read().unwrap(), sent);
        assert!(transfer.to_vec(&target).unwrap().wait().unwrap().iter().all(|&n| n == 0), "it was written too early");

        let elsewhere = PinnedPool::new(&other, PinnedConfig::default().limit_bytes(0)).unwrap();
        let mut pageable = elsewhere.alloc_or_pageable::<u32>(20).unwrap();
        // A column, and beside it the same three elements again and again.
        let region = Region { extents: &[5], from_strides: &[200], to_strides: &[4] };
        transfer.copy_region_on_host_blocking(&to, &mut pageable, &region).unwrap();
        let region = Region { extents: &[5, 3], from_strides: &[0, 1], to_strides: &[4, 1] };
        let beside = pageable.slice_mut(1..).unwrap();
        transfer.copy_region_on_host_blocking(to.slice(7..).unwrap(), beside, &region).unwrap();
        let expected: Vec<u32> = (0..5).flat_map(|row| [200 * row, 7, 8, 9]).collect();
        assert_eq!(pageable.read().unwrap(), expected);

        let refused = transfer.copy_on_host_blocking(&from, &mut pageable).unwrap_err();
        assert!(matches!(refused, TransferError::LengthMismatch { from: 1000, to: 20 }), "{refused}");
        let beyond = Region { extents: &[21], from_strides: &[1], to_strides: &[1] };
        let refused = transfer.copy_region_on_host_blocking(&from, &mut pageable, &beyond).unwrap_err();
        assert!(matches!(refused, TransferError::OutOfBounds { end: 21, len: 20, .. }), "{refused}");
        let on_host = transfer.counters().on_host;
        assert_eq!((on_host.copies, on_host.bytes), (3, 4 * (1000 + 5 + 15)));
        assert_eq!(sim.take_violations(), []);
    }
}

//! Copies between host memory: a copy engine cannot make them, and drivers make the host wait for them. So threads of the staging ring do.
#![allow(single_use_lifetimes, reason = "a lifetime in an argument's `impl Trait` must have a name")]

use std::marker::PhantomData;
use std::ops::Range;

use aquifer_device::{AccessKind, Tick};
use bytemuck::Pod;

use crate::copy::memory::{Lends, Owned};
use crate::copy::region::Plan;
use crate::copy::{HostEnd, Region, UNSTAGED_BYTES};
use crate::error::TransferError;
use crate::pending::Pending;
use crate::pinned::{Claimed, PinnedSlice, PinnedSliceMut};
use crate::runtime::Transfer;
use crate::staging::HostCopy;

impl Transfer {
    /// Copies host memory to page-locked memory, and returns. Threads of the staging ring copy, after copies into `from`, and
    /// after all that use `to`; up to 256 KiB that nothing is in flight for, the calling thread does before it returns. Until
    /// the copy is done, whoever writes or uploads into, or reads, `to`, or writes `from`, waits on the host. The pools may be
    /// of different devices, and the memory pageable.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::{Region, Transfer};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let transfer = Transfer::new(&Allocator::new(&device, Config::default())?)?;
    /// let from = transfer.pinned().alloc_from(&[1u32, 2, 3, 4])?;
    /// let mut to = transfer.pinned().alloc_zeroed::<u32>(2)?;
    /// let _ = transfer.copy_on_host(from.slice(1..3), &mut to)?;
    /// assert_eq!((to.read()?, transfer.counters().on_host.bytes), (&[2, 3][..], 8));
    /// let every_second = Region { extents: &[2], from_strides: &[2], to_strides: &[1] };
    /// let _ = transfer.copy_on_host(every_second.of(vec![5, 6, 7]), &mut to)?;
    /// assert_eq!(to.read()?, [5, 7]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The ends have no element in common:
    ///
    /// ```compile_fail,E0502
    /// # fn never(transfer: &aquifer_transfer::Transfer, mut buffer: aquifer_transfer::PinnedBuffer<u8>) {
    /// let _ = transfer.copy_on_host(&buffer, &mut buffer);
    /// # }
    /// ```
    ///
    /// # Errors
    /// Ends of different lengths, a region that reaches beyond either end or writes a place twice, and errors of the driver:
    /// what a lost device was to write will never be there.
    pub fn copy_on_host<'a, T: Pod + Send + Sync>(
        &self,
        from: impl HostEnd<T>,
        to: impl Into<PinnedSliceMut<'a, T>>,
    ) -> Result<Pending<()>, TransferError> {
        from.copy_to(self, to.into(), None)
    }

    pub(super) fn copy_pinned<T: Pod>(
        &self,
        from: PinnedSlice<'_, T>,
        to: PinnedSliceMut<'_, T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<()>, TransferError> {
        let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| size_of::<T>() > 0) else {
            return Ok(Pending::ready(self.shared(), ()));
        };
        let (read, to, before) = from.part().claim_to_copy(to.part());
        self.begin_on_host(Rows::<T, _>::new(read, to, plan), before)
    }

    pub(super) fn copy_owned<T: Pod + Send + Sync>(
        &self,
        from: Owned,
        to: PinnedSliceMut<'_, T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<()>, TransferError> {
        let Some(plan) = Plan::of(region, from.elements(), to.len())?.filter(|_| from.len() > 0) else {
            return Ok(Pending::ready(self.shared(), ()));
        };
        let (to, before) = to.part().claim_to_write();
        self.begin_on_host(Rows::<T, _>::new(from, to, plan), before)
    }

    /// Makes a copy now where it is small and nothing is in flight, else leaves it to threads of the ring.
    fn begin_on_host(&self, copy: impl HostCopy + 'static, before: Vec<Tick>) -> Result<Pending<()>, TransferError> {
        let mut open = Vec::new();
        for tick in before {
            if !tick.is_done()? {
                open.push(tick);
            }
        }
        let bytes = copy.bytes();
        if open.is_empty() && bytes <= UNSTAGED_BYTES as u64 {
            copy.begin()?;
            copy.copy(0..bytes)?;
            self.shared().tally.count_on_host(bytes);
            return Ok(Pending::ready(self.shared(), ()));
        }
        let job = self.staging().copy_on_host(Box::new(copy), open, &self.shared().waiter);
        self.shared().tally.count_on_host(bytes);
        Ok(Pending::job(self.shared(), job, || Ok(())))
    }
}

/// A copy of a region that was checked to lie within both ends.
struct Rows<T, F> {
    /// Dropped first: an owner that is dropped may use this memory.
    to: Claimed,
    from: F,
    plan: Plan,
    element: PhantomData<fn() -> T>,
}

impl<T, F> Rows<T, F> {
    fn new(from: F, to: Claimed, plan: Plan) -> Self {
        Rows { to, from, plan, element: PhantomData }
    }
}

impl<T: Pod, F: Lends> HostCopy for Rows<T, F> {
    fn bytes(&self) -> u64 {
        self.plan.elements * size_of::<T>() as u64
    }

    fn begin(&self) -> Result<(), TransferError> {
        self.from.begin()?;
        self.to.announce(AccessKind::Write)
    }

    fn copy(&self, range: Range<u64>) -> Result<(), TransferError> {
        let (from, size) = (self.from.lend(), size_of::<T>());
        // An element belongs to the range that its first byte is in.
        let elements = range.start.div_ceil(size as u64)..range.end.div_ceil(size as u64);
        let place = |element: u64| usize::try_from(element).unwrap_or(usize::MAX) * size;
        let mut copied = Ok(());
        self.plan.rows(elements, |from_at, to_at, width| {
            let (from_at, to_at) = (place(from_at), place(to_at));
            // The size of one element is known to the compiler.
            let bytes = if width == 1 { size } else { place(width) };
            if copied.is_ok() {
                copied = self.to.put(to_at, &from[from_at..from_at + bytes]);
            }
        });
        copied
    }
}

#[cfg(test)]
mod tests {
    use aquifer_allocator::{Allocator, Buffer, Config};
    use aquifer_device::sim::{Fault, SimConfig, SimDriver};
    use aquifer_device::{Device, RequestError};

    use super::*;
    use crate::{PinnedConfig, PinnedPool, StagingConfig, TransferConfig};

    /// Both ends wait for what is in flight, whosever pools they are of, page-locked or not.
    #[test]
    fn copies_on_the_host_come_after_those_of_devices() {
        let (sim, other) = (SimDriver::new(SimConfig::default()), Device::new(SimDriver::new(SimConfig::default())));
        let device = Device::new(sim.clone());
        let transfer = Transfer::new(&Allocator::new(&device, Config::default()).unwrap()).unwrap();
        let stream = device.stream().unwrap();
        let (mut from, mut to) = (
            transfer.pinned().alloc_zeroed::<u32>(1000).unwrap(),
            transfer.pinned().alloc_zeroed::<u32>(1000).unwrap(),
        );
        let sent: Vec<u32> = (0..1000).collect();
        let buffer = transfer.to_device(sent.clone(), &stream).unwrap().wait().unwrap();
        let mut target: Buffer<u32> = transfer.allocator().alloc(1000, &stream).unwrap();
        drop(transfer.upload(&to, &mut target).unwrap());
        drop(transfer.download(&buffer, &mut from).unwrap());
        drop(transfer.copy_on_host(&from, &mut to).unwrap());
        assert_eq!(to.read().unwrap(), sent);
        assert!(transfer.to_vec(&target).unwrap().wait().unwrap().iter().all(|&n| n == 0), "it was written too early");

        let elsewhere = PinnedPool::new(&other, PinnedConfig::default().limit_bytes(0)).unwrap();
        let mut pageable = elsewhere.alloc_or_pageable::<u32>(20).unwrap();
        // A column, and beside it the same three elements again and again.
        let region = Region { extents: &[5], from_strides: &[200], to_strides: &[4] };
        drop(transfer.copy_on_host(region.of(&to), &mut pageable).unwrap());
        let region = Region { extents: &[5, 3], from_strides: &[0, 1], to_strides: &[4, 1] };
        let beside = pageable.slice_mut(1..);
        transfer.copy_on_host(region.of(to.slice(7..)), beside).unwrap().wait().unwrap();
        let expected: Vec<u32> = (0..5).flat_map(|row| [200 * row, 7, 8, 9]).collect();
        assert_eq!(pageable.read().unwrap(), expected);

        let refused = transfer.copy_on_host(&from, &mut pageable).unwrap_err();
        assert!(matches!(refused, TransferError::LengthMismatch { from: 1000, to: 20 }), "{refused}");
        let beyond = Region { extents: &[21], from_strides: &[1], to_strides: &[1] };
        let refused = transfer.copy_on_host(beyond.of(&from), &mut pageable).unwrap_err();
        assert!(
            matches!(refused, TransferError::Request(RequestError::OutOfBounds { end: 21, len: 20, .. })),
            "{refused}"
        );
        let on_host = transfer.counters().on_host;
        assert_eq!((on_host.copies, on_host.bytes), (3, 4 * (1000 + 5 + 15)));
        assert_eq!(sim.take_violations(), []);
    }

    fn bench(threads: usize) -> (std::sync::Arc<SimDriver>, Transfer) {
        let sim = SimDriver::new(SimConfig::default());
        let staging = StagingConfig::default().chunk_bytes(64 << 10).chunks(3).threads(threads);
        let allocator = Allocator::new(&Device::new(sim.clone()), Config::default()).unwrap();
        (sim, Transfer::with_config(&allocator, TransferConfig::default().staging(staging)).unwrap())
    }

    /// Large copies in both directions at once, by threads that each have a part of both buffers: who claimed one end after the other would
    /// wait for ever. Beside them uploads from, and downloads to, the same memory by one thread of the ring.
    #[test]
    fn copies_to_and_fro_do_not_wait_for_each_other_in_a_circle() {
        const LEN: usize = 400_000;
        let (sim, transfer) = bench(1);
        let stream = transfer.device().stream().unwrap();
        let mut one = transfer.pinned().alloc_zeroed::<u8>(2 * LEN).unwrap();
        let mut two = transfer.pinned().alloc_zeroed::<u8>(2 * LEN).unwrap();
        let (mut read, mut written) = one.as_slice_mut().split_at(LEN).unwrap();
        let (mut back, mut there) = two.as_slice_mut().split_at(LEN).unwrap();
        read.write().unwrap().fill(1);
        back.write().unwrap().fill(2);
        std::thread::scope(|scope| {
            let transfer = &transfer;
            let device = transfer.to_device(vec![3u8; LEN], &stream).unwrap().wait().unwrap();
            let staged = transfer.to_device(vec![4u8; LEN], &stream).unwrap().wait().unwrap();
            scope.spawn(move || {
                for _ in 0..50 {
                    drop(transfer.copy_on_host(read.as_shared(), there.reborrow()).unwrap());
                    drop(transfer.to_vec(&staged).unwrap());
                }
            });
            scope.spawn(move || {
                for _ in 0..50 {
                    drop(transfer.copy_on_host(back.as_shared(), written.reborrow()).unwrap());
                    drop(transfer.download(&device, back.reborrow()).unwrap());
                }
            });
        });
        assert!(one.read().unwrap()[..LEN].iter().all(|&byte| byte == 1));
        assert!(one.read().unwrap()[LEN..].iter().all(|&byte| byte == 3));
        assert!(two.read().unwrap()[..LEN].iter().all(|&byte| byte == 3));
        assert!(two.read().unwrap()[LEN..].iter().all(|&byte| byte == 1));
        assert_eq!(sim.take_violations(), []);
    }

    /// What is in flight holds a large copy back, and a small one, without blocking the caller or the ring's only thread; an upload of what is
    /// copied has the new bytes.
    #[test]
    fn copies_come_after_what_is_in_flight_and_before_what_follows() {
        for len in [1000usize, 3_000_000] {
            let (sim, transfer) = bench(1);
            let stream = transfer.device().stream().unwrap();
            let sent: Vec<u8> = (0..=250).cycle().take(len).collect();
            let device = transfer.to_device(sent.clone(), &stream).unwrap().wait().unwrap();
            let mut target: Buffer<u8> =
                transfer.allocator().alloc(usize::try_from(len as u64).unwrap(), &stream).unwrap();
            let [mut from, mut to] = [(); 2].map(|()| transfer.pinned().alloc_zeroed::<u8>(len).unwrap());
            drop(transfer.upload(&to, &mut target).unwrap());
            drop(transfer.download(&device, &mut from).unwrap());
            let pending = transfer.copy_on_host(&from, &mut to).unwrap();
            drop(transfer.upload(&to, &mut target).unwrap());
            // Both may go while they are in use.
            drop((from, to));
            pollster::block_on(pending).unwrap();
            assert!(transfer.to_vec(&target).unwrap().wait().unwrap() == sent);
            let mut moved = transfer.pinned().alloc_zeroed::<u8>(len).unwrap();
            std::mem::forget(transfer.copy_on_host(sent.clone(), &mut moved).unwrap());
            assert!(moved.read().unwrap() == sent);
            assert_eq!(sim.take_violations(), []);
        }
    }

    #[test]
    fn a_copy_that_is_cancelled_and_a_lost_device_let_their_ends_go() {
        let (sim, transfer) = bench(2);
        let stream = transfer.device().stream().unwrap();
        let mut to = transfer.pinned().alloc_zeroed::<u8>(1 << 20).unwrap();
        let from = transfer.pinned().alloc_zeroed::<u8>(1 << 20).unwrap();
        transfer.copy_on_host(&from, &mut to).unwrap().cancel();
        to.write().unwrap().fill(1);
        let device = transfer.to_device(vec![7u8; 1 << 20], &stream).unwrap().wait().unwrap();
        let other = bench(2).1;
        let mut elsewhere = other.pinned().alloc_zeroed::<u8>(1 << 20).unwrap();
        drop(transfer.download(&device, &mut to).unwrap());
        sim.inject(Fault::LostAt { nth: 1 });
        let lost = other.copy_on_host(&to, &mut elsewhere).and_then(Pending::wait).unwrap_err();
        assert!(lost.is_device_lost(), "{lost}");
        // The other runtime's device is not lost.
        other.copy_on_host(vec![5u8; 1 << 20], &mut elsewhere).unwrap().wait().unwrap();
        assert!(elsewhere.read().unwrap().iter().all(|&byte| byte == 5));
    }
}

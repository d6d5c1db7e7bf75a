//! Trimming: giving free frames and empty reservations back to the device.
//!
//! Frames on their way back are not counted as reserved, because another thread may get their
//! memory from the device, and count it, before this one has the lock again. The limit counts them
//! until they are gone (`Core::leaving`).

use aquifer_device::{DeviceError, DevicePtr, ErrorKind};

use crate::allocator::Allocator;
use crate::backing::paged::carry_out::{unless_capturing, unmap_range};
use crate::backing::paged::dedicated::recycle_deferred_releases;
use crate::core::paged::frames::LooseFrames;
use crate::core::pools::Which;
use crate::core::remap::donors::BATCH;
use crate::core::remap::trim::Trim;
use crate::cross_stream::synchronize_all;
use crate::error::AllocError;
use crate::pools::{awaited_launches, wait_for_launched};
use crate::types::Request;

/// Gives free frames that no pool keeps back to the device, spare ones first, until at
/// most `target` bytes are held from it or none is left. Returns how many bytes went back. Frames
/// that are not known done stay.
pub(crate) fn trim_paged(allocator: &Allocator, target: u64) -> Result<u64, AllocError> {
    let recycled = recycle_deferred_releases(allocator)?;
    Ok(recycled + trim_free(allocator, target, true, Which::Unpromised)?)
}

/// As [`trim_paged`], of some private pools. Spare frames and dedicated memory stay: they belong to
/// no pool.
pub(crate) fn trim_pools(allocator: &Allocator, target: u64, which: Which) -> Result<u64, AllocError> {
    trim_free(allocator, target, false, which)
}

fn trim_free(allocator: &Allocator, target: u64, spares_too: bool, which: Which) -> Result<u64, AllocError> {
    let stuck = take_stuck_back(allocator);
    let _gate = allocator.gate()?.shared();
    let shared = allocator.state().shared();
    let Some(granule) = shared.paged().map(|paged| paged.granule) else { return Ok(0) };
    if shared.is_asleep() {
        return Ok(0);
    }
    drop(shared);
    let mut trim = Trim::default();
    let mut below = Some(u64::MAX);
    while below.is_some() {
        below = allocator.state().lock().begin_trim(&mut trim, below, target, spares_too, which);
    }
    if target > 0 {
        // A frame that is larger than what is still too much, if there is one.
        allocator.state().lock().begin_trim(&mut trim, None, target, spares_too, which);
    }
    let (mut unmapped, mut failed) = (0, None);
    for (range, frames) in &trim.ranges {
        if let Err(error) = unmap_range(allocator.device(), allocator.hooks(), range) {
            failed = unless_capturing(Err(error)).err();
            break;
        }
        unmapped += 1;
        trim.loose.extend(frames.iter().copied());
    }
    let (released, failed) = release_frames(allocator, &mut trim.loose, failed);
    commit_trim(allocator, trim, unmapped);
    // The device gets released memory back only once it is mapped nowhere.
    let lingering = unmap_lingering_at_gate(allocator);
    let addresses = give_addresses_back(allocator, if spares_too { Which::All } else { which });
    match failed {
        Some(error) => Err(error.into()),
        None => stuck.and(lingering).and(addresses).map(|()| released * granule),
    }
}

/// Accounts for a trim of which the driver unmapped the first `unmapped` ranges; the loose frames
/// are still here.
fn commit_trim(allocator: &Allocator, trim: Trim, unmapped: usize) {
    let Trim { donors, ranges, loose, bytes } = trim;
    let mut left = donors.into_iter().zip(ranges).enumerate().peekable();
    loop {
        let mut guard = allocator.state().lock();
        for (at, (donor, (_, frames))) in left.by_ref().take(BATCH) {
            guard.commit_trimmed(donor, &frames, at < unmapped);
        }
        if left.peek().is_some() {
            continue;
        }
        guard.commit_trim(bytes, &loose);
        return;
    }
}

/// Unmaps stuck mappings, which the driver refused to unmap when they failed. Their frames become
/// spare. Such a frame may also be mapped where it was before, so mappings that linger go first, and
/// nothing is taken back while the device may use memory through one. Mappings that the driver still
/// refuses to unmap stay as they are. Returns the first error.
pub(crate) fn take_stuck_back(allocator: &Allocator) -> Result<(), AllocError> {
    let _gate = allocator.gate()?.shared();
    let lingering = unmap_lingering_at_gate(allocator);
    if allocator.state().shared().may_use_lingering() {
        return lingering;
    }
    let count = allocator.state().shared().paged().map_or(0, |paged| paged.stuck.len());
    (0..count).map(|_| take_one_back(allocator)).fold(lingering, Result::and)
}

/// Unmaps the mappings that have been stuck for longest.
fn take_one_back(allocator: &Allocator) -> Result<(), AllocError> {
    let Some(stuck) = allocator.state().shared().take_stuck() else { return Ok(()) };
    let (mut unmapped, mut failed) = (0, None);
    for frame in stuck.frames.iter().rev() {
        failed = allocator.device().unmap(DevicePtr(frame.start), frame.end - frame.start).err();
        if failed.is_some() {
            break;
        }
        unmapped += 1;
    }
    allocator.state().lock().commit_stuck(stuck, unmapped);
    Ok(unless_capturing(failed.map_or(Ok(()), Err))?)
}

/// Releases frames until none is left or a call fails. Returns how many granules were released, and
/// the error.
fn release_frames(
    allocator: &Allocator,
    loose: &mut LooseFrames,
    mut failed: Option<DeviceError>,
) -> (u64, Option<DeviceError>) {
    let before = loose.granules();
    while failed.is_none()
        && let Some(frame) = loose.pop()
    {
        failed = allocator.device().driver().release_physical(frame.physical).inspect_err(|_| loose.add(frame)).err();
    }
    (before - loose.granules(), failed)
}

/// Waits until the free memory in some pools is known done, and the launches that closed pools
/// among them wait for. Returns true if anything was not known done. Skips streams that cannot be
/// waited for now.
pub(crate) fn synchronize_free(allocator: &Allocator, which: Which) -> Result<bool, AllocError> {
    let of = if let Which::Of(key) | Which::UnusedOf(key) = which { Some(key) } else { None };
    let launched = awaited_launches(allocator, of);
    wait_for_launched(allocator, &launched)?;
    let waits = allocator.state().lock().free_not_done(which);
    synchronize_all(&waits)?;
    Ok(!waits.is_empty() || !launched.ticks.is_empty() || launched.device.is_some())
}

/// Unmaps the mappings that linger although the device is known to be done with them.
pub(crate) fn unmap_lingering(allocator: &Allocator) -> Result<(), AllocError> {
    if !allocator.state().shared().has_lingering() {
        return Ok(());
    }
    let _gate = allocator.gate()?.shared();
    unmap_lingering_at_gate(allocator)
}

/// As [`unmap_lingering`]; the caller has the gate. Mappings that the driver refuses to unmap linger
/// on. Returns the first error once all others are unmapped.
pub(crate) fn unmap_lingering_at_gate(allocator: &Allocator) -> Result<(), AllocError> {
    let captures = allocator.device().is_capturing();
    let done = if captures { Vec::new() } else { allocator.state().shared().take_lingering() };
    let mut failed = Ok(());
    let mut unmapped = Vec::with_capacity(done.len());
    for lingering in done {
        // A capture that began meanwhile is no error.
        let outcome = unmap_range(allocator.device(), allocator.hooks(), &lingering.range);
        unmapped.push((lingering, outcome.is_ok()));
        failed = failed.and(unless_capturing(outcome));
    }
    let mut unmapped = unmapped.into_iter().peekable();
    while unmapped.peek().is_some() {
        let mut guard = allocator.state().lock();
        unmapped.by_ref().take(BATCH).for_each(|(lingering, gone)| guard.commit_unmapped(lingering, gone));
        guard.account_for_granules();
    }
    Ok(failed?)
}

/// At most this many times as many addresses are reserved as the device has memory. Live blocks
/// spread over addresses: on a full device whose program never settles, they took more than four
/// times as many addresses as it had memory.
const ADDRESSES_FOR_MEMORY: u64 = 64;

/// Reserves addresses for the request's pool. Returns false if there are none.
///
/// Each reservation gets an equal share of what is left of [`ADDRESSES_FOR_MEMORY`] times the
/// device's memory: the first has room for all memory, later ones for less. Small requests get a
/// sixteenth. A request always gets as many addresses as it needs. If the driver refuses, a quarter
/// is tried, down to what the request needs; then empty reservations are given back, and the least
/// is tried once more.
pub(super) fn reserve_addresses(allocator: &Allocator, request: &Request) -> Result<bool, AllocError> {
    let held =
        allocator.state().shared().paged().map(|paged| (paged.granule, paged.reservations(), paged.address_bytes()));
    let Some((granule, count, held)) = held else { return Ok(false) };
    let left = allocator.device().info().total_bytes.saturating_mul(ADDRESSES_FOR_MEMORY).saturating_sub(held);
    let least = request.size.next_multiple_of(granule) + granule;
    let share = if request.size <= crate::size_class::SMALL_SIZE { 16 } else { 1 };
    let mut bytes = (left / (ADDRESSES_FOR_MEMORY + count) / share).next_multiple_of(granule).max(least);
    let mut gave_back = false;
    allocator.device().settle_unused();
    loop {
        match allocator.device().driver().reserve(bytes, granule) {
            Ok(ptr) => {
                allocator.state().tell_witness(|witness| witness.managed(ptr.range(bytes)));
                allocator.state().lock().add_reservation(request, ptr.0, bytes);
                return Ok(true);
            }
            Err(error) if error.kind == ErrorKind::OutOfAddresses || error.is_out_of_memory() => {
                if bytes == least && std::mem::replace(&mut gave_back, true) {
                    return Ok(false);
                }
                if bytes == least {
                    give_addresses_back(allocator, Which::All)?;
                }
                bytes = (bytes / 4).next_multiple_of(granule).max(least);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Gives back reservations of some pools in which nothing is mapped.
pub(crate) fn give_addresses_back(allocator: &Allocator, which: Which) -> Result<(), AllocError> {
    // This also gives back reservations that could not go back before.
    allocator.device().settle();
    let mut guard = allocator.state().lock();
    let empty = guard.take_empty_reservations(which);
    drop(guard);
    let mut failed = Ok(());
    for (addr, bytes) in empty {
        if let Err(error) = allocator.device().driver().unreserve(DevicePtr(addr), bytes) {
            let reservation = aquifer_device::Reservation { ptr: DevicePtr(addr), bytes, mapped: Vec::new() };
            allocator.device().unreserve_later(reservation);
            failed = Err(error.into());
        }
    }
    failed
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use std::sync::Arc;

    use aquifer_device::{Code, Device, Driver, Operation};
    use aquifer_sim::{Fault, Lagging, SimConfig, SimDriver, ViolationKind};

    use super::*;
    use crate::{Allocation, Contents};

    const MIB: u64 = 1 << 20;
    const CAPACITY: u64 = 1 << 30;

    /// A program on a device that lags.
    struct Bench {
        sim: Arc<SimDriver>,
        lagging: Arc<Lagging>,
        device: Device,
        allocator: Allocator,
    }

    impl Bench {
        fn new(lag: u64) -> Bench {
            Bench::on(SimConfig::new(CAPACITY), lag)
        }

        fn on(config: SimConfig, lag: u64) -> Bench {
            let sim = SimDriver::new(config);
            let lagging = Lagging::new(sim.clone(), lag);
            let device = Device::new(lagging.clone());
            let allocator = Allocator::new(&device, "").unwrap();
            Bench { sim, lagging, device, allocator }
        }

        fn alloc(&self, mib: u64) -> Allocation {
            self.lagging.advance();
            let block = self.allocator.alloc_bytes(mib * MIB, self.device.default_stream()).unwrap();
            self.lagging.allocated(block.ptr(), mib * MIB);
            block
        }

        fn free(&self, block: Allocation) {
            self.lagging.advance();
            self.lagging.freed(block.ptr());
            drop(block);
        }

        /// Leaves two free blocks of 64 MiB that the device is using and that a live block
        /// separates.
        fn with_gap(&self) -> Allocation {
            let [low, between, high] = [64, 4, 64].map(|mib| self.alloc(mib));
            [low, high].into_iter().for_each(|block| self.free(block));
            between
        }

        /// Leaves two mappings that linger. Returns the block whose memory was there, and two others.
        fn with_two_lingering(&self) -> [Allocation; 3] {
            let [low, one, middle, other, high] = [64, 4, 64, 4, 64].map(|mib| self.alloc(mib));
            [low, middle, high].into_iter().for_each(|block| self.free(block));
            let block = self.alloc(192);
            assert_eq!((self.lingering(), self.lagging.stalls()), (2, 0));
            [block, one, other]
        }

        fn lingering(&self) -> usize {
            self.allocator.state().shared().paged().map_or(0, |paged| paged.lingering.len())
        }

        fn free_bytes(&self) -> u64 {
            self.device.memory_info().unwrap().free
        }

        /// Nothing is held once the allocator gave its memory back, and nothing went too early.
        fn check_empty(self) {
            self.device.synchronize().unwrap();
            self.allocator.empty_cache().unwrap();
            assert_eq!((self.allocator.memory_reserved(), self.lingering(), self.free_bytes()), (0, 0, CAPACITY));
            assert_eq!(self.lagging.take_violation(), None);
        }
    }

    #[test]
    fn a_stream_uses_its_memory_elsewhere_before_the_device_is_done_with_it() {
        let bench = Bench::new(1000);
        let between = bench.with_gap();
        let reserved = bench.allocator.memory_reserved();
        let block = bench.alloc(128);
        assert_eq!((bench.allocator.memory_reserved(), bench.lagging.stalls()), (reserved, 0));
        assert!(bench.lingering() > 0 && bench.allocator.stats().remaps == 1);
        assert_eq!(bench.free_bytes(), CAPACITY - reserved);
        [block, between].into_iter().for_each(|block| bench.free(block));
        bench.check_empty();
    }

    #[test]
    fn earlier_mappings_go_once_the_device_is_done() {
        let bench = Bench::new(50);
        let _between = bench.with_gap();
        let block = bench.alloc(128);
        assert!(bench.lingering() > 0);
        // An event covers the uses, and the device gets there.
        bench.free(block);
        (0..200).for_each(|_| bench.lagging.advance());
        bench.device.default_stream().tick().cover().unwrap();
        bench.free(bench.alloc(200));
        assert_eq!(bench.lingering(), 0);
        assert_eq!(bench.lagging.take_violation(), None);
    }

    #[test]
    fn another_stream_does_not_get_it_before_the_device_is_done_with_it() {
        let bench = Bench::new(1000);
        let _between = bench.with_gap();
        let block = bench.alloc(128);
        bench.free(block);
        let side = bench.device.stream().unwrap();
        bench.lagging.advance();
        let other = bench.allocator.alloc_bytes(128 * MIB, &side).unwrap();
        bench.lagging.allocated(other.ptr(), 128 * MIB);
        assert_eq!(bench.lagging.take_violation(), None, "unmapped too early, or given out twice");
    }

    #[test]
    fn work_of_another_stream_at_the_new_address_must_wait_for_work_at_the_old_one() {
        let bench = Bench::new(1000);
        let _between = {
            let [low, between, high] = [64, 4, 64].map(|mib| bench.alloc(mib));
            bench.device.default_stream().fill(low.ptr(), 1, 64 * MIB).unwrap();
            [low, high].into_iter().for_each(|block| bench.free(block));
            between
        };
        let (block, side) = (bench.alloc(128), bench.device.stream().unwrap());
        assert!(bench.lingering() > 0);
        let at = block.ptr();
        bench.free(block);
        assert_eq!(bench.sim.take_violations(), []);
        side.fill(at, 2, 128 * MIB).unwrap();
        let found = bench.sim.take_violations();
        assert!(found.iter().any(|violation| violation.kind == ViolationKind::WriteWrite), "{found:?}");
    }

    #[test]
    fn a_move_that_fails_leaves_nothing_behind() {
        let maps = [1, 2, 9, 17].map(|nth| (Operation::Map, nth));
        for (operation, nth) in maps.into_iter().chain([(Operation::SetAccess, 1), (Operation::CreatePhysical, 1)]) {
            let bench = Bench::new(1000);
            let between = bench.with_gap();
            let calls = || bench.device.driver_calls().of(operation);
            let before = calls();
            bench.sim.inject(Fault::Nth { operation: Some(operation), nth, code: Code::OUT_OF_MEMORY });
            // A little more than there is, so that memory is created, too.
            let block = bench.alloc(132);
            assert!(calls() - before >= nth, "{operation:?} {nth}: {} calls", calls() - before);
            [block, between].into_iter().for_each(|block| bench.free(block));
            bench.check_empty();
        }
    }

    #[test]
    fn a_mapping_that_cannot_be_unmapped_lingers_until_a_later_try() {
        for nth in [1, 2] {
            let bench = Bench::new(1000);
            let blocks = bench.with_two_lingering();
            let reserved = bench.allocator.memory_reserved();
            bench.device.synchronize().unwrap();
            bench.sim.inject(Fault::Nth { operation: Some(Operation::Unmap), nth, code: Code(999) });
            let other = bench.alloc(200);
            assert_eq!(bench.lingering(), 1, "the other mapping went, and the request was served");
            assert_eq!(bench.allocator.memory_reserved(), reserved + 200 * MIB);
            bench.sim.inject(Fault::Nth { operation: Some(Operation::Unmap), nth: 1, code: Code(999) });
            bench.allocator.empty_cache().unwrap_err();
            assert_eq!(bench.lingering(), 0, "a trim tries again at its end");
            blocks.into_iter().chain([other]).for_each(|block| bench.free(block));
            bench.check_empty();
        }
    }

    #[test]
    fn a_trim_releases_what_it_can_while_a_mapping_cannot_be_unmapped() {
        let bench = Bench::new(1000);
        let blocks = bench.with_two_lingering();
        blocks.into_iter().for_each(|block| bench.free(block));
        bench.device.synchronize().unwrap();
        for nth in [1, 2] {
            bench.sim.inject(Fault::Nth { operation: Some(Operation::Unmap), nth, code: Code(999) });
        }
        bench.allocator.empty_cache().unwrap_err();
        assert_eq!(bench.allocator.memory_reserved(), 0);
        bench.check_empty();
    }

    #[test]
    fn nothing_moves_early_where_the_driver_maps_memory_only_once() {
        // The second mapping of the probe is refused.
        for operation in [Operation::Map, Operation::SetAccess] {
            let fault = Fault::Nth { operation: Some(operation), nth: 2, code: Code::NOT_SUPPORTED };
            let bench = Bench::on(SimConfig::new(CAPACITY).fault(fault), 1000);
            assert_eq!(bench.allocator.why_segments(), None);
            let between = bench.with_gap();
            let block = bench.alloc(128);
            assert_eq!(bench.lingering(), 0);
            [block, between].into_iter().for_each(|block| bench.free(block));
            bench.check_empty();
        }
    }

    #[test]
    fn sleep_and_an_end_of_the_allocator_leave_no_earlier_mapping() {
        for sleeps in [true, false] {
            let bench = Bench::new(1000);
            let between = bench.with_gap();
            let block = bench.alloc(128);
            assert!(bench.lingering() > 0);
            if sleeps {
                bench.allocator.sleep(Contents::Discard).unwrap();
                assert_eq!((bench.free_bytes(), bench.lingering()), (CAPACITY, 0));
                bench.allocator.wake().unwrap();
            }
            [block, between].into_iter().for_each(|block| bench.free(block));
            let Bench { lagging, device, allocator, .. } = bench;
            drop(allocator);
            device.settle();
            assert_eq!(device.memory_info().unwrap().free, CAPACITY);
            // Sleep unmaps live memory, which the device takes for a violation.
            assert!(sleeps || lagging.take_violation().is_none());
        }
    }
}

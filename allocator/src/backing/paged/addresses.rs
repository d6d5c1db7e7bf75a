//! Addresses: reserving them for a pool, and giving empty reservations back.

use aquifer_device::{DevicePtr, ErrorKind};

use crate::allocator::Allocator;
use crate::core::pools::Which;
use crate::error::AllocError;
use crate::types::Request;

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

//! Attributes the memory of a device to its holders.

use std::time::{Duration, Instant};

use aquifer_device::{MemoryUsers, Operation, Result, fork};

use crate::accounting::attribution::{Attribution, used};
use crate::allocator::{Allocator, all_states};
use crate::core::limits::Holding;
use crate::error::AllocError;
use crate::storage::graph_uses::driver_bytes_of_graphs;

/// Attributes the device's memory to its holders. The caller holds no lock. An answer about the
/// processes of a GPU serves for `max_age`; without `max_age`, processes stay unknown.
pub(crate) fn attribute(allocator: &Allocator, max_age: Option<Duration>) -> Result<Attribution> {
    fork::check(Operation::MemoryInfo)?;
    let device = allocator.device();
    let held = || all_states().into_iter().map(|state| (state, state.shared().held_on(device))).collect::<Vec<_>>();
    let before = held();
    let memory = device.memory_info()?;
    let is_recent = |at: &Instant| !device.info().is_virtual && max_age.is_some_and(|max_age| at.elapsed() < max_age);
    let recent = allocator.outside().lock().last.clone().filter(|(at, _)| is_recent(at));
    let asks = recent.is_none() && max_age.is_some();
    let users = if asks { device.memory_users() } else { MemoryUsers::default() };
    let after = held();

    // Other threads take memory and give it back meanwhile: that is no growth of others.
    let (mut ours, mut least, mut most) = (0_u64, 0_u64, 0_u64);
    for (state, after) in &after {
        let before = before.iter().find(|(other, _)| std::ptr::eq(*other, *state));
        let before = before.map_or_else(Holding::default, |(_, before)| *before);
        ours = ours.saturating_add(after.bytes);
        least = least.saturating_add(before.bytes.min(after.bytes));
        most = most.saturating_add(before.most_until(after));
    }
    let reserved = allocator.state().shared().held_on(device).bytes;
    // Less than this process's allocators hold is said of another process of the same id.
    let own = users.own.filter(|&own| own >= least);
    let (rest_of_process, other_processes, driver) = match (&recent, own) {
        (Some((_, last)), _) => (last.rest_of_process, last.other_processes.clone(), last.driver),
        (None, Some(own)) => (Some(own.saturating_sub(ours)), users.others, users.driver),
        (None, None) => (None, Vec::new(), users.driver),
    };
    let rest = rest_of_process.unwrap_or(0);
    let attributed = other_processes.iter().fold(ours.saturating_add(rest), |sum, one| sum.saturating_add(one.bytes));

    let unattributed = used(memory).saturating_sub(attributed);
    // Where the driver has no pool, it says nothing of graphs.
    let graphs = device.driver().pool_usage().map_or(0, |usage| usage.graphs);
    let graphs = driver_bytes_of_graphs(device.id()).saturating_add(graphs);
    let mut outside = allocator.outside().lock();
    let grown = used(memory).saturating_sub(most).saturating_sub(outside.at_open);
    outside.growth = outside.growth.max(grown);
    if let Some(own) = own {
        outside.least_of_process = outside.least_of_process.min(own.saturating_sub(least));
        let grown = own.saturating_sub(most).saturating_sub(outside.least_of_process);
        outside.growth_of_process = outside.growth_of_process.max(Some(grown));
    }
    let attribution = Attribution {
        total: memory.total,
        free: memory.free,
        reserved,
        other_allocators: ours.saturating_sub(reserved),
        rest_of_process,
        graphs: graphs.min(rest_of_process.unwrap_or(unattributed)),
        other_processes,
        unattributed,
        driver,
        outside_at_open: outside.at_open,
        suggested_headroom: outside.growth_of_process.unwrap_or(outside.growth),
    };
    if asks {
        outside.last = Some((Instant::now(), attribution.clone()));
    }
    Ok(attribution)
}

impl Allocator {
    /// The device's memory by holder: this allocator, others of the process, the rest of the
    /// process, other processes; and a headroom for libraries.
    ///
    /// Asks the driver, and on a GPU NVML, which takes milliseconds at the first call
    /// ([`aquifer_device::Device::memory_users`]).
    ///
    /// # Errors
    /// When the driver cannot tell the device's memory.
    pub fn attribution(&self) -> Result<Attribution, AllocError> {
        Ok(attribute(self, Some(Duration::ZERO))?)
    }
}

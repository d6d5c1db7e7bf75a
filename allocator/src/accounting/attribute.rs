//! Asks who holds the memory of a device.

use std::time::{Duration, Instant};

use aquifer_device::{DriverKind, Result};

use crate::accounting::attribution::{Attribution, used};
use crate::allocator::{Allocator, open_states};

/// Asks who holds the device's memory. No lock may be held. Of a GPU, an answer about processes
/// serves for `max_age`.
pub(crate) fn attribute(allocator: &Allocator, max_age: Duration) -> Result<Attribution> {
    let (device, states) = (allocator.device(), open_states());
    let held = || states.iter().map(|state| state.shared().held_on(device)).collect::<Vec<_>>();
    let before = held();
    let memory = device.memory_info()?;
    let is_recent = |at: &Instant| device.info().kind != DriverKind::Simulated && at.elapsed() < max_age;
    let recent = allocator.outside().lock().last.clone().filter(|(at, _)| is_recent(at));
    let users = if recent.is_none() { device.memory_users() } else { Default::default() };
    let after = held();

    let ours: u64 = after.iter().map(|held| held.bytes).sum();
    let reserved = states.iter().zip(&after).find(|(state, _)| std::ptr::eq(**state, allocator.state()));
    let reserved = reserved.map_or(0, |(_, held)| held.bytes);
    // Memory that these allocators take meanwhile is no growth of others.
    let most: u64 =
        before.iter().zip(&after).fold(0, |sum, (before, after)| sum.saturating_add(before.most_until(after)));
    let (rest_of_process, other_processes, driver) = match &recent {
        Some((_, last)) => (last.rest_of_process, last.other_processes.clone(), last.driver),
        // Less than this process's allocators hold is said of another process of the same id.
        None => match users.own.and_then(|own| own.checked_sub(ours)) {
            Some(rest) => (Some(rest), users.others, users.driver),
            None => (None, Vec::new(), users.driver),
        },
    };
    let rest = rest_of_process.unwrap_or(0);
    let attributed = other_processes.iter().fold(ours.saturating_add(rest), |sum, one| sum.saturating_add(one.bytes));

    let mut outside = allocator.outside().lock();
    let growth = used(memory).saturating_sub(most).saturating_sub(outside.at_open);
    outside.growth = outside.growth.max(growth.min(rest_of_process.unwrap_or(u64::MAX)));
    let attribution = Attribution {
        total: memory.total,
        free: memory.free,
        reserved,
        other_allocators: ours.saturating_sub(reserved),
        rest_of_process,
        other_processes,
        unattributed: used(memory).saturating_sub(attributed),
        driver,
        outside_at_open: outside.at_open,
        suggested_headroom: outside.growth,
    };
    if recent.is_none() {
        outside.last = Some((Instant::now(), attribution.clone()));
    }
    Ok(attribution)
}

//! Rules of the options keep memory from the request, or make some available.

use std::sync::{Arc, Mutex, PoisonError};

use aquifer::memory::Allocation;
use aquifer_allocator::Advice;

use super::stand::in_steps;
use super::{Given, Stand, Story};
use crate::exit::Failure;
use crate::text::Bytes;

/// Half of the available memory, as a fraction of the device.
#[expect(clippy::cast_precision_loss, reason = "a fraction to display")]
pub(super) fn half(given: &Given) -> String {
    let fraction = given.room as f64 / 2.0 / given.total as f64;
    format!("per_process_memory_fraction:{}", (fraction * 1e6).floor() / 1e6)
}

pub(super) fn limit(stand: &mut Stand) -> Result<Story, Failure> {
    stand.fill("weights", stand.percent(35))?;
    let refusal = stand.request(in_steps(stand.percent(30)))?;
    let advice = refusal.report.iter().flat_map(|report| &report.advice);
    let advised = advice.filter_map(|advice| match advice {
        Advice::RaiseLimit { to } => Some(*to),
        _ => None,
    });
    let Some(to) = advised.min() else {
        // There was no report, or no such advice in it.
        let recovered = refusal.report.is_none();
        return Ok(Story { refusal, recovered_by: "nothing".to_owned(), recovered });
    };
    stand.allocator.set_limit(Some(to));
    let recovered = stand.is_served(refusal.requested)?;
    Ok(Story { refusal, recovered_by: format!("raising the limit to {}, as advised", Bytes(to)), recovered })
}

pub(super) fn headroom(stand: &mut Stand) -> Result<Story, Failure> {
    stand.fill("weights", stand.percent(35))?;
    let batch = stand.fill("a batch", stand.percent(20))?;
    let refusal = stand.request(in_steps(stand.percent(38)))?;
    stand.free(|number| batch.contains(&number));
    let recovered = stand.is_served(refusal.requested)?;
    Ok(Story { refusal, recovered_by: format!("freeing {}", Bytes(stand.percent(20))), recovered })
}

pub(super) fn reclaimers(stand: &mut Stand) -> Result<Story, Failure> {
    let weights = stand.percent(20);
    stand.fill("weights", weights)?;
    let mut left = stand.room - weights;
    let asked = Arc::new(Mutex::new(Vec::new()));
    let mut registrations = Vec::new();
    // The last one is not needed.
    for (priority, name, percent) in
        [(10, "prefetched batches", 20), (5, "cached activations", 30), (0, "KV cache", 25)]
    {
        let bytes = in_steps(stand.percent(percent));
        // Unused memory, and that of the first two.
        left -= if priority > 0 { 0 } else { bytes };
        let cache = Mutex::new(Some(stand.allocator.alloc_bytes(bytes, &stand.stream)?));
        let asked = asked.clone();
        registrations.push(stand.allocator.register_reclaimer(priority, name, move |_| {
            let cached = cache.lock().unwrap_or_else(PoisonError::into_inner).take();
            let freed = cached.as_ref().map_or(0, Allocation::bytes);
            asked.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{name} ({})", Bytes(freed)));
            freed
        }));
    }
    let refusal = stand.request(in_steps(left / 11 * 9))?;
    drop(registrations);
    let asked = asked.lock().unwrap_or_else(PoisonError::into_inner);
    let recovered = refusal.report.is_none() && !asked.is_empty();
    let asked = if asked.is_empty() { "none was asked".to_owned() } else { asked.join(", then ") };
    Ok(Story { refusal, recovered_by: format!("reclaimers, by priority: {asked}"), recovered })
}

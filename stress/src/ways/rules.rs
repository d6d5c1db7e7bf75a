//! There is enough, but rules keep the request from it; and rules for getting more.

use std::sync::{Arc, Mutex, PoisonError};

use aquifer::memory::Allocation;
use aquifer_allocator::Advice;

use super::{Given, Refusal, Stand, Story, Way, no_options};
use crate::exit::Failure;
use crate::text::Bytes;

pub(super) const LIMIT: Way = Way {
    name: "limit",
    summary: "asks for more than per_process_memory_fraction allows",
    needs_simulator: None,
    served: false,
    options: half,
    run: limit,
};

pub(super) const HEADROOM: Way = Way {
    name: "headroom",
    summary: "asks for what headroom_mb leaves to libraries",
    needs_simulator: None,
    served: false,
    options: |given| format!("headroom_mb:{}", (given.free - given.room / 4 * 3) >> 20),
    run: headroom,
};

pub(super) const RECLAIMERS: Way = Way {
    name: "reclaimers",
    summary: "asks for more than is free, while parts of the program have registered what they can do without",
    needs_simulator: None,
    served: true,
    options: no_options,
    run: reclaimers,
};

/// Half of what there is to use, as a fraction of the device.
#[expect(clippy::cast_precision_loss, reason = "a fraction that people read")]
fn half(given: &Given) -> String {
    let fraction = given.room as f64 / 2.0 / given.total as f64;
    format!("per_process_memory_fraction:{}", (fraction * 1e6).floor() / 1e6)
}

fn limit(stand: &mut Stand) -> Result<Story, Failure> {
    stand.fill("weights", stand.percent(35))?;
    let refusal = stand.request(stand.unrounded(stand.percent(30)))?;
    let advised = find(&refusal, |advice| match advice {
        Advice::RaiseLimit { to } => Some(*to),
        _ => None,
    });
    let Some(to) = advised else { return Ok(unadvised(refusal)) };
    stand.allocator.set_limit(Some(to));
    let recovered = stand.is_served(refusal.requested)?;
    Ok(Story { refusal, recovered_by: format!("raising the limit to {}, as advised", Bytes(to)), recovered })
}

fn headroom(stand: &mut Stand) -> Result<Story, Failure> {
    stand.fill("weights", stand.percent(35))?;
    let batch = stand.fill("a batch", stand.percent(20))?;
    let refusal = stand.request(stand.unrounded(stand.percent(38)))?;
    stand.free(|number| batch.contains(&number));
    let recovered = stand.is_served(refusal.requested)?;
    Ok(Story { refusal, recovered_by: format!("freeing {}", Bytes(stand.percent(20))), recovered })
}

fn reclaimers(stand: &mut Stand) -> Result<Story, Failure> {
    let weights = stand.percent(20);
    stand.fill("weights", weights)?;
    let mut left = stand.room - weights;
    let asked = Arc::new(Mutex::new(Vec::new()));
    let mut registrations = Vec::new();
    // Of the last one there is no need.
    for (priority, name, percent) in
        [(10, "prefetched batches", 20), (5, "cached activations", 30), (0, "KV cache", 25)]
    {
        let bytes = stand.unrounded(stand.percent(percent));
        // What is not used, and what the first two have.
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
    let refusal = stand.request(stand.unrounded(left / 11 * 9))?;
    drop(registrations);
    let asked = asked.lock().unwrap_or_else(PoisonError::into_inner);
    let recovered = refusal.report.is_none() && !asked.is_empty();
    let asked = if asked.is_empty() { "none was asked".to_owned() } else { asked.join(", then ") };
    Ok(Story { refusal, recovered_by: format!("reclaimers, by priority: {asked}"), recovered })
}

fn find<T>(refusal: &Refusal, find: impl Fn(&Advice) -> Option<T>) -> Option<T> {
    refusal.report.as_ref().and_then(|report| report.advice.iter().find_map(find))
}

/// The report did not say what would help, or there was none.
fn unadvised(refusal: Refusal) -> Story {
    let recovered = refusal.report.is_none();
    Story { refusal, recovered_by: "nothing".to_owned(), recovered }
}

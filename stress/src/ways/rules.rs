//! There is enough, but rules keep the request from it; and rules for getting more.

use std::sync::{Arc, Mutex, PoisonError};

use aquifer_allocator::{Advice, Allocation, Bytes};

use super::{Refusal, Stand, Story, Way, no_options};
use crate::exit::Failure;

pub(super) const LIMIT: Way = Way {
    name: "limit",
    summary: "asks for more than per_process_memory_fraction allows",
    needs_simulator: None,
    options: |_| "per_process_memory_fraction:0.5".to_owned(),
    run: limit,
};

pub(super) const HEADROOM: Way = Way {
    name: "headroom",
    summary: "asks for what headroom_mb leaves to libraries",
    needs_simulator: None,
    options: |room| format!("headroom_mb:{}", (room >> 20) / 4),
    run: headroom,
};

pub(super) const RECLAIMERS: Way = Way {
    name: "reclaimers",
    summary: "asks for more than is free, while parts of the program have registered what they can do without",
    needs_simulator: None,
    options: no_options,
    run: reclaimers,
};

fn limit(stand: &mut Stand) -> Result<Story, Failure> {
    stand.mark("weights", stand.percent(30))?;
    let refusal = stand.request(stand.percent(30))?;
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
    stand.mark("weights", stand.percent(30))?;
    let batch = stand.mark("a batch", stand.percent(20))?;
    let refusal = stand.request(stand.percent(40))?;
    stand.free(|number| number == batch);
    let recovered = stand.is_served(refusal.requested)?;
    Ok(Story { refusal, recovered_by: format!("freeing {}", Bytes(stand.percent(20))), recovered })
}

fn reclaimers(stand: &mut Stand) -> Result<Story, Failure> {
    stand.mark("weights", stand.percent(20))?;
    let asked = Arc::new(Mutex::new(Vec::new()));
    let mut registrations = Vec::new();
    // Of the last one there is no need.
    for (priority, name, percent) in
        [(10, "prefetched batches", 20), (5, "cached activations", 30), (0, "KV cache", 25)]
    {
        let cache = Mutex::new(Some(stand.allocator.alloc(stand.percent(percent), &stand.stream)?));
        let asked = asked.clone();
        registrations.push(stand.allocator.register_reclaimer(priority, name, move |_| {
            let cached = cache.lock().unwrap_or_else(PoisonError::into_inner).take();
            let freed = cached.as_ref().map_or(0, Allocation::bytes);
            asked.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{name} ({})", Bytes(freed)));
            freed
        }));
    }
    let refusal = stand.request(stand.percent(45))?;
    drop(registrations);
    let recovered = refusal.report.is_none();
    let asked = asked.lock().unwrap_or_else(PoisonError::into_inner).join(", then ");
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

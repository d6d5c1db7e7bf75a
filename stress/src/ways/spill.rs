//! There is not enough on the device, but some of what is there can go to the host.

use aquifer::transfer::{Spillable, Spiller, Transfer};

use super::{Stand, Story, Way, no_options};
use crate::exit::Failure;
use crate::text::Bytes;

pub(super) const SPILL: Way = Way {
    name: "spill",
    summary: "asks for more than is free beside caches; is refused, and served once a spiller may move them to the host",
    needs_simulator: None,
    served: false,
    options: no_options,
    run: spill,
};

/// Caches that can be spilled.
const CACHES: u64 = 8;
/// The largest of them: what is spilled takes host memory, of which there is less than a device
/// has.
const CACHE_MAX: u64 = 32 << 20;

fn spill(stand: &mut Stand) -> Result<Story, Failure> {
    let transfer = Transfer::new(&stand.allocator)?;
    let bytes = stand.unrounded((stand.room / 4 / CACHES).clamp(2 << 20, CACHE_MAX));
    // What the runtime needs for itself, and the edges of granules.
    let spare = stand.percent(2).clamp(16 << 20, 64 << 20);
    stand.fill("weights", stand.room.saturating_sub(CACHES * bytes + spare))?;
    if stand.spare > 0 {
        // The caches are small beside what nobody knows whether it can be had, so that must not
        // decide.
        stand.allocator.set_limit(Some(stand.room));
    }
    let mut caches = Vec::new();
    for number in 0..CACHES {
        let contents = vec![content(number); usize::try_from(bytes).unwrap_or(usize::MAX)];
        caches.push(transfer.to_device(contents, &stand.stream)?.wait()?);
    }
    let wanted = stand.unrounded(CACHES / 4 * 3 * bytes + spare);
    let refusal = stand.request(wanted)?;
    let spiller = Spiller::new(&transfer, 0);
    let caches: Vec<Spillable<u8>> = caches.into_iter().map(|cache| spiller.add(cache, 0)).collect::<Result<_, _>>()?;
    let served = stand.is_served(wanted)?;
    let spilled = spiller.stats().host_bytes;
    let mut unharmed = true;
    for (number, cache) in (0..).zip(&caches) {
        let mut contents = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
        let access = cache.access(&stand.stream)?;
        transfer.download_blocking(&access, &mut contents)?;
        unharmed &= contents.iter().all(|&byte| byte == content(number));
    }
    let returns = spiller.stats().returns;
    let recovered = refusal.report.is_some() && served && unharmed;
    let recovered_by = format!("spilling {} to the host, of which {returns} caches came back", Bytes(spilled));
    Ok(Story { refusal, recovered_by, recovered })
}

/// What a cache holds.
fn content(number: u64) -> u8 {
    u8::try_from(number % 251).unwrap_or(u8::MAX).wrapping_add(3)
}

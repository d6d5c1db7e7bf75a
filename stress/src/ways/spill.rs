//! Some of the memory on the device can move to the host.

use aquifer::transfer::{Spillable, Spiller, Transfer};

use super::stand::in_steps;
use super::{Stand, Story};
use crate::exit::Failure;
use crate::text::Bytes;

/// Caches that can be spilled.
const CACHES: u64 = 8;
/// The largest of them: spilled caches use host memory, of which there may be less than device
/// memory.
const CACHE_MAX: u64 = 32 << 20;

pub(super) fn spill(stand: &mut Stand) -> Result<Story, Failure> {
    let transfer = Transfer::new(&stand.allocator)?;
    let bytes = in_steps((stand.room / 4 / CACHES).clamp(2 << 20, CACHE_MAX));
    // For the runtime itself, and for the edges of granules.
    let spare = stand.percent(2).clamp(16 << 20, 64 << 20);
    stand.fill("weights", stand.room.saturating_sub(CACHES * bytes + spare))?;
    if stand.spare > 0 {
        // The caches are smaller than the memory that may or may not be available, so a limit must
        // decide.
        stand.allocator.set_limit(Some(stand.room));
    }
    let mut caches = Vec::new();
    for number in 0..CACHES {
        let contents = vec![content(number); usize::try_from(bytes).unwrap_or(usize::MAX)];
        let mut cache = stand.allocator.alloc(contents.len(), &stand.stream)?;
        cache.upload(contents, &transfer)?.wait()?;
        caches.push(cache);
    }
    let wanted = in_steps(CACHES / 4 * 3 * bytes + spare);
    let refusal = stand.request(wanted)?;
    let spiller = Spiller::new(&transfer, 0)?;
    let caches: Vec<Spillable<u8>> = caches.into_iter().map(|cache| spiller.add(cache, 0)).collect::<Result<_, _>>()?;
    let served = stand.is_served(wanted)?;
    let spilled = spiller.stats().host_bytes;
    let mut unharmed = true;
    for (number, cache) in (0..).zip(&caches) {
        let mut contents = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
        let access = cache.access(&stand.stream)?;
        access.download_blocking(&mut contents, &transfer)?;
        unharmed &= contents.iter().all(|&byte| byte == content(number));
    }
    let returns = spiller.stats().returns;
    let recovered = refusal.report.is_some() && served && unharmed;
    let recovered_by = format!("spilling {} to the host, of which {returns} caches came back", Bytes(spilled));
    Ok(Story { refusal, recovered_by, recovered })
}

/// The byte in a cache.
fn content(number: u64) -> u8 {
    u8::try_from(number % 251).unwrap_or(u8::MAX).wrapping_add(3)
}

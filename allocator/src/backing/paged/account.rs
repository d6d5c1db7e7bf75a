//! Accounting for mapped memory: what is reserved, and the history of mappings.

use crate::history::{Action, Subject};
use crate::state::guard::StateGuard;
use crate::tags::Tag;
use crate::types::{PoolId, StreamId};

pub(crate) fn note_mapping(
    guard: &mut StateGuard,
    action: Action,
    pool: PoolId,
    stream: StreamId,
    addr: u64,
    bytes: u64,
) {
    let pool = guard.pools.history_id(pool);
    let subject = Subject { addr, size: bytes, stream, tag: Tag::default(), pool };
    guard.history.note(action, subject);
}

/// Makes `reserved` the sum of granules and segments (P3).
pub(crate) fn account_for_granules(guard: &mut StateGuard) {
    let Some(paged) = &mut guard.paged else { return };
    let now = [paged.mapped_bytes[0], paged.mapped_bytes[1] + paged.spare_bytes()];
    let before = std::mem::replace(&mut paged.accounted, now);
    let sum = |bytes: [u64; 2]| bytes.iter().sum::<u64>();
    guard.reserved = guard.reserved + sum(now) - sum(before);
    guard.counters.reserved_bytes.replace(before, now);
}

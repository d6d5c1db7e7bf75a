//! Accounting for mapped memory: what is reserved, and the history of mappings.

use crate::core::Core;
use crate::history::{Action, Subject};
use crate::tags::Tag;
use crate::types::{PoolId, StreamId};

impl Core {
    pub(crate) fn note_mapping(&mut self, action: Action, pool: PoolId, stream: StreamId, addr: u64, bytes: u64) {
        let pool = self.pools.history_id(pool);
        let subject = Subject { addr, size: bytes, stream, tag: Tag::default(), pool };
        self.history.note(action, subject);
    }

    /// Makes `reserved` the sum of granules and segments (P3).
    pub(crate) fn account_for_granules(&mut self) {
        let Some(paged) = &mut self.paged else { return };
        let now = [paged.mapped_bytes[0], paged.mapped_bytes[1] + paged.spare_bytes()];
        let before = std::mem::replace(&mut paged.accounted, now);
        let sum = |bytes: [u64; 2]| bytes.iter().sum::<u64>();
        self.reserved = self.reserved + sum(now) - sum(before);
        self.counters.reserved_bytes.replace(before, now);
    }
}

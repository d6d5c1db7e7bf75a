//! Free blocks that belong to other streams.

use super::{BlockId, Heap};
use crate::types::PoolId;

/// How many blocks of one owner are considered, smallest first.
const CANDIDATES: usize = 32;

impl Heap {
    /// The smallest block of a pool that has at least `size` bytes, belongs to another stream, and
    /// has a tick that is at most the result of `until` for its owner.
    pub(crate) fn best_of_others(
        &self,
        stream: u32,
        pool: PoolId,
        size: u64,
        until: impl Fn(u32) -> u64,
    ) -> Option<BlockId> {
        let others = self.indexes(pool).filter(|(owner, _)| owner.stream != stream);
        let best = others.filter_map(|(owner, index)| {
            let mut candidates = index.iter_from_first_fit(size).take(CANDIDATES).peekable();
            candidates.peek()?;
            let until = until(owner.stream);
            candidates.find(|key| key.size() >= size && self.blocks[key.block()].after <= until)
        });
        Some(best.min()?.block())
    }

    /// The latest tick of each other stream that has blocks of a pool which are large enough; and of
    /// the owners of strays.
    pub(crate) fn ticks_of_others(&self, stream: u32, pool: PoolId, size: u64) -> Vec<(u32, u64)> {
        let others = self.indexes(pool).filter(|(owner, _)| owner.stream != stream);
        let mut latest: Vec<(u32, u64)> = others
            .filter_map(|(owner, index)| {
                let ticks = index.iter_from_first_fit(size).take(CANDIDATES).filter(|key| key.size() >= size);
                Some((owner.stream, ticks.map(|key| self.blocks[key.block()].after).max()?))
            })
            .collect();
        latest.extend(self.ticks_of_strays().filter(|&(_, _, of)| of == pool).map(|(owner, after, _)| (owner, after)));
        latest.sort_unstable_by(|one, other| (one.0, other.1).cmp(&(other.0, one.1)));
        latest.dedup_by_key(|&mut (owner, _)| owner);
        latest
    }
}

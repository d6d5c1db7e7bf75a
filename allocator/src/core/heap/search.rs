//! Free blocks that belong to other streams.

use super::Heap;
use crate::types::{After, BlockId, PoolId, StreamId, Use, latest_by_stream};

/// How many blocks of one owner are considered, smallest first.
const CANDIDATES: usize = 32;

impl Heap {
    /// The smallest block of a pool that has at least `size` bytes, belongs to another stream, and
    /// has a tick that is at most the result of `until` for its owner.
    pub(crate) fn best_of_others(
        &self,
        stream: StreamId,
        pool: PoolId,
        size: u64,
        until: impl Fn(StreamId) -> After,
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
    pub(crate) fn ticks_of_others(&self, stream: StreamId, pool: PoolId, size: u64) -> Vec<Use> {
        let others = self.indexes(pool).filter(|(owner, _)| owner.stream != stream);
        let uses = others.flat_map(|(_, index)| {
            let keys = index.iter_from_first_fit(size).take(CANDIDATES).filter(|key| key.size() >= size);
            keys.map(|key| self.blocks[key.block()].last_use()).collect::<Vec<_>>()
        });
        let of_strays = self.ticks_of_strays().filter(|&(_, of)| of == pool).map(|(last_use, _)| last_use);
        latest_by_stream(uses.chain(of_strays)).collect()
    }
}

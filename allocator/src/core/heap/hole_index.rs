//! The holes that are not held: by pool, stream and address, and whether a block is one.

use std::collections::BTreeMap;

use super::members::Members;
use crate::types::{BlockId, PoolId, StreamId};

/// A set of holes.
#[derive(Debug, Default)]
pub(super) struct HoleIndex {
    by_address: BTreeMap<(PoolId, StreamId, u64), BlockId>,
    /// The same holes. Their bits are close together in the cache, where blocks' records are not.
    members: Members,
}

impl HoleIndex {
    pub(super) fn insert(&mut self, pool: PoolId, stream: StreamId, addr: u64, id: BlockId) {
        self.by_address.insert((pool, stream, addr), id);
        self.members.insert(id);
    }

    /// Takes out the hole of a pool and stream at an address, which must be in the set.
    pub(super) fn remove(&mut self, pool: PoolId, stream: StreamId, addr: u64) {
        let id = self.by_address.remove(&(pool, stream, addr));
        id.into_iter().for_each(|id| self.members.remove(id));
    }

    pub(super) fn contains(&self, id: BlockId) -> bool {
        self.members.contains(id)
    }

    pub(super) fn len(&self) -> usize {
        self.by_address.len()
    }

    /// The holes of a pool in a stream's regions, by address.
    pub(super) fn of(&self, pool: PoolId, stream: StreamId) -> impl Iterator<Item = BlockId> + '_ {
        self.by_address.range((pool, stream, 0)..=(pool, stream, u64::MAX)).map(|(_, &id)| id)
    }

    /// Every hole, pool by pool.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.by_address.values().copied()
    }

    /// True if a hole is in the set, at its place.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn is_noted(&self, pool: PoolId, stream: StreamId, addr: u64, id: BlockId) -> bool {
        self.by_address.get(&(pool, stream, addr)) == Some(&id) && self.members.contains(id)
    }

    /// True if no other blocks are taken for holes.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn is_consistent(&self) -> bool {
        self.members.count() == self.by_address.len()
    }
}

//! The pools of a heap, by number.
//!
//! Every heap has the default pools. A private pool is here only while it has regions in this heap,
//! so a heap costs nothing for pools that other streams use.

use std::ops::{Index, IndexMut};

use super::foreign::Away;
use super::index::Bins;
use crate::size_class::PoolKind;

/// A pool of the heap: requests of a pool are served from its own blocks. There are a small and a
/// large default pool, and those of private pools.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) options: HeapPoolOptions,
    /// Free blocks of the heap's home stream.
    pub(super) own: Bins,
    pub(super) away: Away,
    /// Number of regions.
    pub(super) regions: usize,
}

/// How a pool of the heap differs from others of its kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeapPoolOptions {
    /// True if blocks are handed out whole.
    pub(crate) no_split: bool,
    /// The private pool that it belongs to, as history numbers them; 0 for the default pools.
    pub(crate) history_id: u32,
}

impl Pool {
    fn new(options: HeapPoolOptions) -> Pool {
        Pool { options, own: Bins::default(), away: Away::default(), regions: 0 }
    }

    /// The index of `owner`'s free blocks.
    #[inline]
    pub(super) fn index_mut(&mut self, home: u32, owner: u32) -> &mut Bins {
        if owner == home { &mut self.own } else { self.away.index_mut(owner) }
    }
}

/// The kind of a pool, by its number.
#[inline]
pub(crate) fn kind_of(pool: u16) -> PoolKind {
    if pool.is_multiple_of(2) { PoolKind::Small } else { PoolKind::Large }
}

/// The pools that a heap has. Indexing is for the default ones and for those of its blocks.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    default: Vec<Pool>,
    /// Private pools by number, less that of the first one.
    private: Vec<Option<Box<Pool>>>,
}

impl Pools {
    /// Adds the default pools.
    pub(super) fn add_default(&mut self) {
        self.default.extend([(); 2].map(|()| Pool::new(HeapPoolOptions::default())));
    }

    fn place(&self, number: u16) -> Option<usize> {
        usize::from(number).checked_sub(self.default.len())
    }

    /// Adds a private pool, unless it is here already.
    pub(super) fn add_private(&mut self, number: u16, options: HeapPoolOptions) {
        let Some(place) = self.place(number) else { return };
        if place >= self.private.len() {
            self.private.resize_with(place + 1, || None);
        }
        self.private[place].get_or_insert_with(|| Box::new(Pool::new(options)));
    }

    /// Notes that a region of a pool is gone. A private pool without regions goes, too.
    pub(super) fn region_left(&mut self, number: u16) {
        let pool = &mut self[number];
        pool.regions -= 1;
        if pool.regions > 0 {
            return;
        }
        let Some(place) = self.place(number) else { return };
        self.private[place] = None;
        let used = self.private.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        self.private.truncate(used);
    }

    #[inline]
    pub(crate) fn get(&self, number: u16) -> Option<&Pool> {
        match self.default.get(usize::from(number)) {
            Some(pool) => Some(pool),
            None => self.private.get(self.place(number)?)?.as_deref(),
        }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, number: u16) -> Option<&mut Pool> {
        let place = usize::from(number);
        if place < self.default.len() {
            return self.default.get_mut(place);
        }
        self.private.get_mut(place - self.default.len())?.as_deref_mut()
    }

    /// The pools that are here, in order of their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Pool> + '_ {
        self.default.iter().chain(self.private.iter().flatten().map(|pool| &**pool))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Pool> + '_ {
        self.default.iter_mut().chain(self.private.iter_mut().flatten().map(|pool| &mut **pool))
    }

    /// The numbers of the pools that are here, in order.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u16> + '_ {
        let places = (0..=u16::MAX).take(self.default.len() + self.private.len());
        places.filter(|&number| self.get(number).is_some())
    }

    #[cfg(all(test, not(aquifer_shuttle)))]
    pub(crate) fn private_count(&self) -> usize {
        self.private.iter().flatten().count()
    }
}

impl Index<u16> for Pools {
    type Output = Pool;

    #[inline]
    fn index(&self, number: u16) -> &Pool {
        self.get(number).unwrap_or_else(|| unreachable!("a heap has no block of a pool that it lacks"))
    }
}

impl IndexMut<u16> for Pools {
    #[inline]
    fn index_mut(&mut self, number: u16) -> &mut Pool {
        self.get_mut(number).unwrap_or_else(|| unreachable!("a heap has no block of a pool that it lacks"))
    }
}

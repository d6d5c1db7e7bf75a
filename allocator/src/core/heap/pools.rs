//! The pools of a heap, by number.
//!
//! The default pools are always there. A private pool is here only while it has regions.

use std::ops::{Index, IndexMut};

use super::block::Members;
use super::index::Bins;
use crate::types::{PoolId, StreamId};

/// A pool of the heap: requests of a pool are served from its own blocks. There are a small and a
/// large default pool, and those of private pools.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) options: HeapPoolOptions,
    /// The free blocks of each owner.
    of: Vec<Option<Box<Bins>>>,
    /// The owners that may have free blocks.
    with_free: Members,
    /// Number of regions.
    pub(super) regions: usize,
}

/// Whose free blocks an index has: those of a stream in its own regions, or its strays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) stream: StreamId,
    pub(crate) has_strays: bool,
}

impl Owner {
    /// A stream in its own regions.
    #[inline]
    pub(crate) fn in_own_regions(stream: StreamId) -> Owner {
        Owner { stream, has_strays: false }
    }

    /// The owner of a stream's blocks in the regions of another one, or of its own.
    #[inline]
    pub(super) fn in_region_of(stream: StreamId, region: StreamId) -> Owner {
        Owner { stream, has_strays: stream != region }
    }

    #[inline]
    fn number(self) -> u32 {
        self.stream.0 << 1 | u32::from(self.has_strays)
    }
}

impl From<u32> for Owner {
    fn from(number: u32) -> Owner {
        Owner { stream: StreamId(number >> 1), has_strays: number & 1 == 1 }
    }
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
        Pool { options, of: Vec::new(), with_free: Members::default(), regions: 0 }
    }

    /// The index of an owner's free blocks, if it ever had any.
    pub(super) fn of(&self, owner: Owner) -> Option<&Bins> {
        self.of.get(owner.number() as usize)?.as_deref()
    }

    #[inline]
    pub(super) fn of_mut(&mut self, owner: Owner) -> Option<&mut Bins> {
        self.of.get_mut(owner.number() as usize)?.as_deref_mut()
    }

    /// The index of an owner's free blocks, for one to be put in, or to be taken out.
    #[inline]
    pub(super) fn index_mut(&mut self, owner: Owner) -> &mut Bins {
        let at = owner.number();
        self.with_free.insert(at);
        if !matches!(self.of.get(at as usize), Some(Some(_))) {
            self.add(at as usize);
        }
        self.of[at as usize].as_deref_mut().unwrap_or_else(|| unreachable!("it was added"))
    }

    #[cold]
    fn add(&mut self, at: usize) {
        if at >= self.of.len() {
            self.of.resize_with(at + 1, || None);
        }
        self.of[at] = Some(Box::default());
    }

    /// The indexes that are not empty, by stream.
    pub(super) fn owners(&self) -> impl Iterator<Item = (Owner, &Bins)> + '_ {
        let owners = self.with_free.iter().map(Owner::from);
        owners.filter_map(|owner| Some((owner, self.of(owner).filter(|index| !index.is_empty())?)))
    }

    /// Forgets owners that have no free block now.
    fn forget_empty(&mut self) {
        let is_empty = |&at: &u32| self.of(Owner::from(at)).is_none_or(Bins::is_empty);
        let empty: Vec<u32> = self.with_free.iter().filter(is_empty).collect();
        empty.into_iter().for_each(|at| self.with_free.remove(at));
    }
}

/// The pools that a heap has. Indexing is for the default ones and for those of its blocks.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    default: Vec<Pool>,
    /// Private pools by number, less that of the first one.
    private: Vec<Option<Box<Pool>>>,
}

impl Pools {
    /// The default pools.
    pub(super) fn new() -> Pools {
        Pools { default: (0..2).map(|_| Pool::new(HeapPoolOptions::default())).collect(), private: Vec::new() }
    }

    fn place(&self, number: PoolId) -> Option<usize> {
        usize::from(number.number()).checked_sub(self.default.len())
    }

    /// Adds a private pool, unless it is here already.
    pub(super) fn add_private(&mut self, number: PoolId, options: HeapPoolOptions) {
        let Some(place) = self.place(number) else { return };
        if place >= self.private.len() {
            self.private.resize_with(place + 1, || None);
        }
        self.private[place].get_or_insert_with(|| Box::new(Pool::new(options)));
    }

    /// Notes that a region of a pool is gone. A private pool without regions goes, too.
    pub(super) fn region_left(&mut self, number: PoolId) {
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
    pub(crate) fn get(&self, number: PoolId) -> Option<&Pool> {
        match self.default.get(usize::from(number.number())) {
            Some(pool) => Some(pool),
            None => self.private.get(self.place(number)?)?.as_deref(),
        }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, number: PoolId) -> Option<&mut Pool> {
        let place = usize::from(number.number());
        if place < self.default.len() {
            return self.default.get_mut(place);
        }
        self.private.get_mut(place - self.default.len())?.as_deref_mut()
    }

    /// The numbers of the pools that are here, in order.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = PoolId> + '_ {
        let all = (0..=u16::MAX).take(self.default.len() + self.private.len());
        all.map(PoolId::numbered).filter(|&number| self.get(number).is_some())
    }

    /// Forgets owners that have no free block in the default pools now. Private pools are too many
    /// to be looked at each time, and mostly have one owner.
    pub(super) fn forget_empty(&mut self) {
        self.default.iter_mut().for_each(Pool::forget_empty);
    }
}

impl Index<PoolId> for Pools {
    type Output = Pool;

    #[inline]
    fn index(&self, number: PoolId) -> &Pool {
        self.get(number).unwrap_or_else(|| unreachable!("a heap has no block of a pool that it lacks"))
    }
}

impl IndexMut<PoolId> for Pools {
    #[inline]
    fn index_mut(&mut self, number: PoolId) -> &mut Pool {
        self.get_mut(number).unwrap_or_else(|| unreachable!("a heap has no block of a pool that it lacks"))
    }
}

//! The keys of a crowded bin: an ordered set in sorted runs.
//!
//! Invariants: every run is sorted and filled up with [`Key::NONE`]; the runs are in order; no run is empty, except the first one if it is
//! the only one. The first run is part of the structure itself, so that finding one of few keys costs one line.
//!
//! At 10 000 live blocks of mixed sizes a third of all insertions are into bins of more than eight keys, single sizes mostly, where only
//! the address decides. There, moving keys by as many places as it takes cost 1.4 mispredicted branches a pair.

use super::Key;

/// Greatest number of keys in a run.
const RUN: usize = 63;
/// The same while there are few runs. A run as short as this is changed by looking at each of its places, without a branch on the key's
/// place, which follows no pattern.
const SHORT: usize = 15;
/// From this many runs on, runs may be long, because each new run moves the list of all runs.
const MANY: usize = 64;

/// A sorted list of keys in runs.
#[derive(Debug, Default)]
pub(super) struct Runs {
    first: Run,
    /// The first key of each further run; the runs follow.
    starts: Vec<Key>,
    #[expect(clippy::vec_box, reason = "runs move within the list, and a run is 1 KiB")]
    more: Vec<Box<Run>>,
    /// Empty runs, for reuse: a bin that keeps growing and shrinking allocates no host memory.
    #[expect(clippy::vec_box, reason = "as above")]
    spare: Vec<Box<Run>>,
}

/// A sorted run of keys, filled up with [`Key::NONE`], of which there is always one at the end.
#[derive(Debug)]
struct Run {
    keys: [Key; RUN + 1],
    len: usize,
}

impl Runs {
    /// The run that a key belongs to, as an index into `more`; `None` is the first run.
    #[inline]
    fn run_of(&self, key: Key) -> Option<usize> {
        if self.more.is_empty() { None } else { self.starts.partition_point(|&start| start <= key).checked_sub(1) }
    }

    /// The first key not below `least`.
    #[inline]
    pub(super) fn first_from(&self, least: Key) -> Option<Key> {
        let at = self.run_of(least);
        let run = at.map_or(&self.first, |at| &self.more[at]);
        let key = run.keys[run.position(least)];
        if key != Key::NONE { Some(key) } else { self.starts.get(at.map_or(0, |at| at + 1)).copied() }
    }

    pub(super) fn last_below(&self, key: Key) -> Option<Key> {
        let runs = self.more.iter().take(self.run_of(key).map_or(0, |at| at + 1)).rev().map(|run| &**run);
        runs.chain([&self.first]).find_map(|run| run.position(key).checked_sub(1).map(|at| run.keys[at]))
    }

    pub(super) fn insert(&mut self, key: Key) {
        let (at, many) = (self.run_of(key), self.more.len() >= MANY);
        let run = at.map_or(&mut self.first, |at| &mut self.more[at]);
        if run.len < if many { RUN } else { SHORT } {
            run.insert(key);
            return;
        }
        let mut upper = self.spare.pop().unwrap_or_default();
        run.split(&mut upper);
        let next = at.map_or(0, |at| at + 1);
        self.starts.insert(next, upper.keys[0]);
        self.more.insert(next, upper);
        self.insert(key);
    }

    /// Removes a key that is there.
    pub(super) fn remove(&mut self, key: Key) {
        match self.run_of(key) {
            None => {
                self.first.remove(key);
                if self.first.len == 0 && !self.more.is_empty() {
                    std::mem::swap(&mut self.first, &mut self.more[0]);
                    self.drop_run(0);
                }
            }
            Some(at) => {
                self.more[at].remove(key);
                self.starts[at] = self.more[at].keys[0];
                if self.more[at].len == 0 {
                    self.drop_run(at);
                }
            }
        }
    }

    /// Takes the smallest key out; [`Key::NONE`] if there is none.
    pub(super) fn pop_first(&mut self) -> Key {
        let key = self.first.keys[0];
        if key != Key::NONE {
            self.remove(key);
        }
        key
    }

    /// Every key in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Key> + '_ {
        let runs = std::iter::once(&self.first).chain(self.more.iter().map(|run| &**run));
        runs.flat_map(|run| run.keys.iter().take(run.len).copied())
    }

    /// Takes an empty run out of the list.
    #[cold]
    fn drop_run(&mut self, at: usize) {
        self.starts.remove(at);
        let run = self.more.remove(at);
        debug_assert_eq!((run.len, run.keys[0]), (0, Key::NONE));
        self.spare.push(run);
    }
}

impl Default for Run {
    fn default() -> Self {
        Run { keys: [Key::NONE; RUN + 1], len: 0 }
    }
}

impl Run {
    /// Number of keys smaller than `key`, by a binary search of fixed length, without branches.
    #[inline]
    fn position(&self, key: Key) -> usize {
        if self.is_short() { self.search(key, [8, 4, 2, 1]) } else { self.search(key, [32, 16, 8, 4, 2, 1]) }
    }

    #[inline]
    fn search<const N: usize>(&self, key: Key, steps: [usize; N]) -> usize {
        steps.into_iter().fold(0, |at, step| at + step * usize::from(self.keys[at + step - 1] < key))
    }

    #[inline]
    fn is_short(&self) -> bool {
        self.len <= SHORT
    }

    fn insert(&mut self, key: Key) {
        if self.len < SHORT {
            for at in (1..SHORT).rev() {
                self.keys[at] = self.keys[at].min(key).max(self.keys[at - 1]);
            }
            self.keys[0] = self.keys[0].min(key);
        } else {
            let at = self.position(key);
            self.keys.copy_within(at..self.len, at + 1);
            self.keys[at] = key;
        }
        self.len += 1;
    }

    fn remove(&mut self, key: Key) {
        debug_assert!(self.keys.contains(&key));
        // The key after the last one is always `NONE`, and moves up with the others.
        if self.is_short() {
            for at in 0..SHORT {
                self.keys[at] = if self.keys[at] < key { self.keys[at] } else { self.keys[at + 1] };
            }
        } else {
            let at = self.position(key);
            self.keys.copy_within(at + 1..=self.len, at);
        }
        self.len -= 1;
    }

    /// Moves the upper half of the keys to another run, which must be empty.
    #[cold]
    fn split(&mut self, upper: &mut Run) {
        let half = self.len / 2;
        upper.keys[..self.len - half].copy_from_slice(&self.keys[half..self.len]);
        upper.len = self.len - half;
        self.keys[half..].fill(Key::NONE);
        self.len = half;
    }
}

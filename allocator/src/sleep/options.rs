//! What of an allocator's memory sleeps, and what happens to its contents.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::core::pools::{PoolKey, PoolTable};
use crate::tags::Tag;
use crate::types::PoolId;

/// Fate of the contents of memory while it sleeps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Contents {
    /// The contents are lost: after [`crate::Allocator::wake`] the memory is uninitialised. That
    /// goes for memory of graphs' pools, too, in which kernels may keep state, such as counters of
    /// a library's workspace that are set once: save these pools ([`Part::pool`],
    /// [`SleepOptions::with`]).
    Discard,
    /// The contents are lost, and all bytes are 0 after waking up.
    Zero,
    /// The contents of live memory, and of memory that graphs use, are kept in pinned host memory,
    /// and restored from there.
    SaveToHost,
    /// The contents of live memory are kept in a file, and restored from there. The file must not
    /// exist before, and no other program may change it. It is removed once the contents are back,
    /// or with the allocator. Errors of the file are [`crate::AllocError::SavedFile`]; copies go
    /// through 16 MiB of pinned host memory.
    SaveToFile(PathBuf),
}

/// A part of an allocator's memory that may sleep while the rest is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part(Selected);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Selected {
    Tag(Arc<str>),
    Untagged,
    Pool(PoolKey),
}

impl Part {
    /// The allocations with this tag: see [`crate::TagScope`].
    pub fn tag(name: &str) -> Part {
        Part(Selected::Tag(name.into()))
    }

    /// The allocations without a tag.
    pub fn untagged() -> Part {
        Part(Selected::Untagged)
    }

    /// The part that [`Part::pool`] (`pools/private_pool.rs`) gives.
    pub(crate) fn of_pool(key: PoolKey) -> Part {
        Part(Selected::Pool(key))
    }

    /// True if an allocation from a heap pool belongs to it; or, without a tag, the free memory of
    /// that heap pool.
    pub(crate) fn has(&self, pools: &PoolTable, pool: PoolId, tag: Option<Tag>) -> bool {
        match &self.0 {
            Selected::Tag(name) => tag.and_then(Tag::name).is_some_and(|tag| tag == *name),
            Selected::Untagged => tag == Some(Tag::default()),
            Selected::Pool(key) => pools.owner_of(pool).is_some_and(|private| private.id == key.id),
        }
    }
}

/// What of an allocator's memory sleeps, and how: see [`crate::Allocator::sleep`].
///
/// ```
/// use std::time::Duration;
/// use aquifer::memory::{Contents, Part, SleepOptions};
/// // All memory sleeps. The weights are kept in host memory, all else is lost.
/// let all = SleepOptions::all(Contents::Discard).with(Part::tag("weights"), Contents::SaveToHost);
/// // Only allocations tagged "kv_cache" sleep.
/// let part = SleepOptions::part(Part::tag("kv_cache"), Contents::Discard).waiting(Duration::from_secs(1));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SleepOptions {
    parts: Vec<(Part, Contents)>,
    /// The fate of the contents of all else; `None` if only the parts sleep.
    others: Option<Contents>,
    pub(crate) patience: Duration,
}

impl SleepOptions {
    /// All of the allocator's memory sleeps.
    pub fn all(contents: Contents) -> SleepOptions {
        SleepOptions { parts: Vec::new(), others: Some(contents), patience: Duration::ZERO }
    }

    /// Only this part sleeps, and what is added by [`SleepOptions::with`].
    pub fn part(part: Part, contents: Contents) -> SleepOptions {
        SleepOptions { parts: vec![(part, contents)], others: None, patience: Duration::ZERO }
    }

    /// This part sleeps, too, or has other contents than the rest. For an allocation that belongs
    /// to several parts, the one named first counts.
    #[must_use]
    pub fn with(mut self, part: Part, contents: Contents) -> SleepOptions {
        self.parts.push((part, contents));
        self
    }

    /// Waits at most that long for the end of what keeps the allocator awake, instead of failing at
    /// once. If all memory is to sleep, other threads get no access guards and reservations
    /// meanwhile ([`crate::AllocError::Asleep`]), unless they keep the allocator awake already.
    #[must_use]
    pub fn waiting(self, patience: Duration) -> SleepOptions {
        SleepOptions { patience, ..self }
    }

    /// True if all memory sleeps.
    pub(crate) fn are_for_all(&self) -> bool {
        self.others.is_some()
    }

    /// The fate of an allocation's contents, or, without a tag, of the free memory of a heap pool;
    /// `None` if it stays awake.
    pub(crate) fn fate(&self, pools: &PoolTable, pool: PoolId, tag: Option<Tag>) -> Option<&Contents> {
        let part = self.parts.iter().find(|(part, _)| part.has(pools, pool, tag));
        part.map(|(_, contents)| contents).or(self.others.as_ref())
    }
}

impl From<Contents> for SleepOptions {
    fn from(contents: Contents) -> SleepOptions {
        SleepOptions::all(contents)
    }
}

//! What stays awake although it is to sleep, and why.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::core::Core;
use crate::core::heap::State;
use crate::core::paged::granules::{POOL, Purpose};
use crate::core::pools::Which;
use crate::format::Bytes;
use crate::sleep::options::SleepOptions;
use crate::tags::Tag;

/// Memory that stays awake although it is to sleep: [`Allocator::staying_awake`].
///
/// [`Allocator::staying_awake`]: crate::Allocator::staying_awake
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StayingAwake {
    /// Its addresses, in one allocation, or in the memory that graphs of a private pool use.
    pub range: Range<u64>,
    /// The tag of the allocation: see [`crate::TagScope`].
    pub tag: Option<Arc<str>>,
    /// What keeps it.
    pub why: KeptBy,
}

/// What keeps memory awake that is to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeptBy {
    /// A [`crate::PinnedMapping`] in its frame: another party registered the addresses.
    Pin,
    /// Graphs that share a pool have it at several addresses.
    Graphs,
    /// It is [`crate::Exportable`]: other processes may have its handle.
    Export,
    /// It lies in a segment, which has no addresses apart from its memory.
    Segment,
    /// Memory that is not to sleep has a part of its frame.
    SharedFrame,
}

impl fmt::Display for StayingAwake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.range;
        write!(f, "{} at {start:#x}", Bytes(end - start))?;
        if let Some(tag) = &self.tag {
            write!(f, ", tagged {tag:?}")?;
        }
        f.write_str(match self.why {
            KeptBy::Pin => ": pinned",
            KeptBy::Graphs => ": graphs have it at several addresses",
            KeptBy::Export => ": exportable",
            KeptBy::Segment => ": in a segment",
            KeptBy::SharedFrame => ": its frame has other memory, too",
        })
    }
}

/// Memory in use: its addresses, its tag if an allocation has it, and whether it is to sleep.
type InUse = (Range<u64>, Option<Tag>, bool);

impl Core {
    /// What is in use and is to sleep, but stays awake, by address.
    pub(crate) fn staying_awake(&self, options: &SleepOptions) -> Vec<StayingAwake> {
        let (mut staying, mut in_use) = (Vec::new(), Vec::<InUse>::new());
        let is_to_sleep = |pool, tag| options.fate(&self.pools, pool, tag).is_some();
        for (region, _, block) in self.heap.all_blocks() {
            let tag = match block.state {
                State::Live => Some(Tag(block.tag)),
                state if state.is_free() && !self.pools.is_among(block.pool, Which::NotForGraphs) => None,
                _ => continue,
            };
            match is_to_sleep(block.pool, tag) {
                true if !region.is_paged() => {
                    staying.extend(tag.map(|tag| (block.range(), Some(tag), KeptBy::Segment)))
                }
                sleeps => in_use.push((block.range(), tag, sleeps)),
            }
        }
        let paged = &self.paged;
        for (&base, owned) in paged.owned.iter().filter(|(_, owned)| owned.size > 0) {
            let (range, sleeps) = (base..base + owned.size, is_to_sleep(POOL, Some(owned.tag)));
            if paged.purpose_of(base) == Some(Purpose::Exportable) {
                staying.extend(sleeps.then_some((range, Some(owned.tag), KeptBy::Export)));
            } else {
                in_use.push((range, Some(owned.tag), sleeps));
            }
        }
        in_use.sort_unstable_by_key(|(range, ..)| range.start);
        for frame in paged.frames().map(|frame| frame.range) {
            let first = in_use.partition_point(|(range, ..)| range.end <= frame.start);
            let count = in_use[first..].partition_point(|(range, ..)| range.start < frame.end);
            let inside = &in_use[first..first + count];
            let why = match inside.iter().any(|(.., sleeps)| !sleeps) {
                _ if self.pins.are_in(frame.clone()) => KeptBy::Pin,
                _ if paged.has_old_mapping(&frame) => KeptBy::Graphs,
                true if !options.are_for_all() => KeptBy::SharedFrame,
                _ => continue,
            };
            let part = |range: &Range<u64>| range.start.max(frame.start)..range.end.min(frame.end);
            let asked = inside.iter().filter(|(.., sleeps)| *sleeps);
            staying.extend(asked.map(|(range, tag, _)| (part(range), *tag, why)));
        }
        listed(staying)
    }
}

/// Each range with its tag and its reason, by address.
fn listed(mut staying: Vec<(Range<u64>, Option<Tag>, KeptBy)>) -> Vec<StayingAwake> {
    staying.sort_unstable_by_key(|(range, ..)| range.start);
    let one = |(range, tag, why): (Range<u64>, Option<Tag>, KeptBy)| StayingAwake {
        range,
        tag: tag.and_then(Tag::name),
        why,
    };
    staying.into_iter().map(one).collect()
}

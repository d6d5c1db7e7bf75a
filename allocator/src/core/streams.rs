//! The streams that the allocator knows, how far each of them got, and when its next progress event
//! is due.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_device::internal::Timeline;
use aquifer_device::{Stream, Tick};

use crate::core::policy::{EVENT_SHARE, EVENT_SPACING, EVENTS_AT_START};
use crate::types::{After, StreamId, Use};

#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// By number. `None` for a number that no stream has had here so far.
    known: Vec<Option<Known>>,
}

#[derive(Debug)]
struct Known {
    timeline: Arc<Timeline>,
    progress: Progress,
}

impl Streams {
    /// Makes a stream known. Says with `progress` when its progress events are due.
    pub(crate) fn add(&mut self, stream: &Stream, progress: Progress) {
        let at = StreamId::of(stream).index();
        if at >= self.known.len() {
            self.known.resize_with(at + 1, || None);
        }
        self.known[at] = Some(Known { timeline: stream.timeline().clone(), progress });
    }

    #[inline]
    fn get(&self, stream: StreamId) -> Option<&Known> {
        self.known.get(stream.index())?.as_ref()
    }

    #[inline]
    pub(crate) fn timeline(&self, stream: StreamId) -> Option<&Arc<Timeline>> {
        self.get(stream).map(|known| &known.timeline)
    }

    pub(crate) fn timelines(&self) -> impl Iterator<Item = &Arc<Timeline>> + '_ {
        self.known.iter().flatten().map(|known| &known.timeline)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.timelines().map(|timeline| StreamId(timeline.id()))
    }

    #[inline]
    pub(crate) fn progress_mut(&mut self, stream: StreamId) -> Option<&mut Progress> {
        self.known.get_mut(stream.index())?.as_mut().map(|known| &mut known.progress)
    }

    /// After all work that was enqueued on the stream so far.
    #[inline]
    pub(crate) fn enqueued(&self, stream: StreamId) -> After {
        self.timeline(stream).map_or(After::NOTHING, |timeline| After::enqueued(timeline))
    }

    /// A use that ends with the work enqueued so far.
    pub(crate) fn use_so_far(&self, stream: StreamId) -> Use {
        Use { stream, after: self.enqueued(stream) }
    }

    /// After all work of the stream that the host knows to be done. A stream that is not known here
    /// has no work to be waited for.
    pub(crate) fn known_done(&self, stream: StreamId) -> After {
        self.timeline(stream).map_or(After::ALL, |timeline| After::known_done(timeline))
    }

    /// True if the use is known done.
    pub(crate) fn is_done(&self, one: Use) -> bool {
        one.after <= self.known_done(one.stream)
    }

    /// Those of the uses that are not known done.
    pub(crate) fn not_done(&self, uses: impl Iterator<Item = Use>) -> Vec<Tick> {
        uses.filter(|&one| !self.is_done(one)).filter_map(|one| self.tick(one)).collect()
    }

    /// The tick at which a use ends; `None` if the stream is not known here.
    pub(crate) fn tick(&self, Use { stream, after }: Use) -> Option<Tick> {
        Some(self.timeline(stream)?.tick_at(after.last_tick()))
    }

    /// True if a stream of the device captures. Where no stream is known, nothing was allocated.
    pub(crate) fn any_captures(&self) -> bool {
        self.timelines().next().is_some_and(|timeline| timeline.device_captures())
    }

    /// True if the stream captures, or is gone.
    pub(crate) fn captures(&self, stream: StreamId) -> bool {
        self.timeline(stream).is_some_and(|timeline| timeline.device_id_unless_capturing() == u32::MAX)
    }

    /// True if an event after the use was due on the stream; recording it may have failed.
    pub(crate) fn may_be_covered(&self, Use { stream, after }: Use) -> bool {
        self.timeline(stream).is_some_and(|timeline| after < After::enqueued(timeline))
    }

    /// Chooses the stream that can free the most granules, counting up to `granules`, and the
    /// earliest tick by which it does.
    pub(crate) fn first_enough(&self, not_done: &BTreeMap<Use, u64>, granules: u64) -> Option<Tick> {
        let mut sums: BTreeMap<StreamId, (u64, After)> = BTreeMap::new();
        for (&Use { stream, after }, &count) in not_done {
            let (sum, latest) = sums.entry(stream).or_default();
            if *sum < granules {
                (*sum, *latest) = (*sum + count, after);
            }
        }
        let (&stream, &(_, after)) = sums.iter().max_by_key(|(_, (sum, _))| *sum)?;
        self.tick(Use { stream, after })
    }
}

/// When a stream's next progress event is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    /// Bytes freed so far, without those that the next request took again unchanged, and searches
    /// (allocations) made so far.
    pub(crate) freed: u64,
    pub(crate) searches: u64,
    /// The next event is due when `freed` reaches this,
    due_at: u64,
    /// and not before `searches` reaches this.
    not_before: u64,
    /// Events recorded.
    recorded: u64,
}

impl Default for Progress {
    /// No event is ever due.
    fn default() -> Progress {
        Progress { freed: 0, searches: 0, due_at: u64::MAX, not_before: 0, recorded: 0 }
    }
}

impl Progress {
    /// Events are due from now on.
    pub(crate) fn started() -> Progress {
        Progress { due_at: 0, ..Progress::default() }
    }

    /// True if an event is due now, which counts as recorded then. `reserved` are bytes held from
    /// the device.
    #[inline]
    pub(crate) fn is_due(&mut self, reserved: u64) -> bool {
        self.freed >= self.due_at && self.searches >= self.not_before && self.begin(reserved)
    }

    #[cold]
    fn begin(&mut self, reserved: u64) -> bool {
        self.due_at = self.freed + (reserved / EVENT_SHARE).max(1);
        // If nothing was freed since the start, there is nothing to learn.
        if self.freed > 0 {
            self.recorded += 1;
            self.not_before = self.recorded.saturating_sub(EVENTS_AT_START) * EVENT_SPACING;
        }
        self.freed > 0
    }
}

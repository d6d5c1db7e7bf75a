//! What sleeps of an allocator: what must stop meanwhile, and which contents are lost.

use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_device::fork::{Condvar, Mutex};

use crate::plan::Asleep;

/// The tags of buffers: none, and two that sleep apart.
pub(crate) const TAGS: [&str; 3] = ["", "weights", "cache"];

/// What has a tag of its own: memory that work uses without access guards.
pub(crate) const BARE: &str = "bare";

/// Kinds of memory whose contents are lost apart: by the tags, and that of bare work.
const KINDS: usize = 4;

/// The kind of memory with the tag [`BARE`].
pub(crate) const BARE_KIND: usize = KINDS - 1;

/// The sleep of an allocator.
#[derive(Debug, Default)]
pub(crate) struct Sleeping {
    /// Held by the thread that puts all memory, or a pool, to sleep, or wakes everything up.
    pub(crate) control: Mutex<()>,
    pub(crate) bare: Mutex<Bare>,
    /// Notified when bare work ends.
    ended: Condvar,
    /// How often contents of each kind were lost. Counted before and after falling asleep.
    lost: [AtomicU64; KINDS],
    /// How often the allocator was put to sleep, all of it or a part.
    pub(crate) begun: AtomicU64,
    /// The value of `begun` when everything was last woken up.
    pub(crate) woken: AtomicU64,
}

/// Bare work: it must not meet memory that sleeps.
#[derive(Debug, Default)]
pub(crate) struct Bare {
    threads: usize,
    pub(crate) is_stopped: bool,
}

/// Bare work of a thread.
pub(crate) struct BareWork<'a>(&'a Sleeping);

impl Drop for BareWork<'_> {
    fn drop(&mut self) {
        self.0.bare.lock().threads -= 1;
        self.0.ended.notify_all();
    }
}

impl Sleeping {
    /// Begins bare work, unless it has to stop.
    pub(crate) fn begin_bare_work(&self) -> Option<BareWork<'_>> {
        let mut bare = self.bare.lock();
        bare.threads += usize::from(!bare.is_stopped);
        (!bare.is_stopped).then(|| BareWork(self))
    }

    pub(crate) fn stop_bare_work(&self) {
        let mut bare = self.bare.lock();
        bare.is_stopped = true;
        while bare.threads > 0 {
            bare = self.ended.wait(bare);
        }
    }

    /// True if requests and access guards may be refused because memory sleeps. Only a program of
    /// one thread knows that it is awake.
    pub(crate) fn may_refuse(&self, threads: usize) -> bool {
        let begun = self.begun.load(Ordering::Relaxed);
        begun > 0 && (threads > 1 || begun > self.woken.load(Ordering::Relaxed))
    }

    /// How often contents of a kind were lost so far.
    pub(crate) fn lost(&self, kind: usize) -> u64 {
        self.lost[kind].load(Ordering::Relaxed)
    }

    pub(crate) fn note_lost(&self, what: Asleep, saved: bool) {
        let loses = |kind: usize| match what {
            Asleep::All | Asleep::Pool(_) => !saved,
            Asleep::AllButTag => !saved && kind != 2,
            Asleep::FirstTag => !saved && kind == 1,
            Asleep::SecondTag => !saved && kind == 2,
            Asleep::Untagged => !saved && kind == 0,
        };
        let lost = self.lost.iter().enumerate().filter(|&(kind, _)| loses(kind));
        lost.for_each(|(_, lost)| _ = lost.fetch_add(1, Ordering::Relaxed));
    }
}

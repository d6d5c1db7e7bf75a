//! Sleep of an allocator while threads work: what must stop meanwhile, and which contents are lost.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aquifer::memory::{AllocError, Contents, Part, SleepOptions};
use aquifer_allocator::WakeLock;
use aquifer_device::fork::{Condvar, Mutex};

use crate::plan::Asleep;
use crate::player::Player;
use crate::world::World;

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
    control: Mutex<()>,
    bare: Mutex<Bare>,
    /// Notified when bare work ends.
    ended: Condvar,
    /// How often contents of each kind were lost. Counted before and after falling asleep.
    lost: [AtomicU64; KINDS],
    /// How often the allocator was put to sleep, all of it or a part.
    begun: AtomicU64,
    /// The value of `begun` when everything was last woken up.
    woken: AtomicU64,
}

/// Bare work: it must not meet memory that sleeps.
#[derive(Debug, Default)]
struct Bare {
    threads: usize,
    is_stopped: bool,
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

    fn stop_bare_work(&self) {
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

    fn note_lost(&self, what: Asleep, saved: bool) {
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

impl World {
    /// Keeps the allocator awake while contents are compared that may be lost otherwise. `None` if
    /// it sleeps.
    pub(crate) fn keep_awake(&self) -> Option<WakeLock> {
        self.allow(self.memory.keep_awake())
    }
}

impl Player<'_> {
    /// The part that sleeps; `None` for all memory.
    fn part(&self, what: Asleep) -> Option<Part> {
        Some(match what {
            Asleep::All | Asleep::AllButTag => return None,
            Asleep::FirstTag => Part::tag(TAGS[1]),
            Asleep::SecondTag => Part::tag(TAGS[2]),
            Asleep::Untagged => Part::untagged(),
            Asleep::Pool(pick) => Part::pool(&self.pools[crate::player::at(&self.pools, pick)?]),
        })
    }

    pub(crate) fn sleep(&mut self, what: Asleep, save: bool, waits: bool) {
        let (world, sleeping) = (self.world, &self.world.sleeping);
        let contents = || if save { Contents::SaveToHost } else { Contents::Discard };
        let stops_bare_work = matches!(what, Asleep::All | Asleep::AllButTag | Asleep::Pool(_));
        let options = match self.part(what) {
            Some(part) => SleepOptions::part(part, contents()),
            None if matches!(what, Asleep::Pool(_)) => return,
            None => SleepOptions::all(contents()),
        };
        let options = match what {
            Asleep::AllButTag => options.with(Part::tag(TAGS[2]), Contents::SaveToHost),
            _ => options,
        };
        // For no time, or for ever: how long other threads take is not counted in time here.
        let options = if waits { options.waiting(Duration::MAX) } else { options };
        let control = stops_bare_work.then(|| sleeping.control.lock());
        if stops_bare_work {
            sleeping.stop_bare_work();
        }
        sleeping.begun.fetch_add(1, Ordering::Relaxed);
        sleeping.note_lost(what, save);
        let slept = world.memory.sleep(options);
        sleeping.note_lost(what, save);
        let is_awake = slept.is_err() && world.memory.sleeping_bytes() == 0;
        world.served(slept);
        if stops_bare_work && is_awake {
            sleeping.bare.lock().is_stopped = false;
        }
        drop(control);
    }

    pub(crate) fn wake(&mut self, what: Asleep) {
        let (world, sleeping) = (self.world, &self.world.sleeping);
        world.end_uploads();
        if let Some(part) = self.part(what) {
            self.judge_waking(world.memory.wake_parts(&[part]));
            return;
        }
        let control = sleeping.control.lock();
        let begun = sleeping.begun.load(Ordering::Relaxed);
        let woken = world.memory.wake();
        if woken.is_ok() {
            sleeping.woken.store(begun, Ordering::Relaxed);
            sleeping.bare.lock().is_stopped = false;
            let (bytes, is_asleep) = (world.memory.sleeping_bytes(), world.memory.is_asleep());
            if world.threads == 1 && (bytes > 0 || is_asleep) {
                world.report(format!("after waking up, {bytes} bytes sleep"));
            }
        }
        self.judge_waking(woken);
        drop(control);
    }

    /// Memory that others took meanwhile may be lacking.
    fn judge_waking(&self, woken: Result<(), AllocError>) {
        match woken {
            Err(AllocError::Device(error)) if error.is_out_of_memory() => self.world.check_lack(&error),
            other => drop(self.world.served(other)),
        }
    }
}

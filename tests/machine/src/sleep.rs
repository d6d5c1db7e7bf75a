//! Steps that put memory to sleep and wake it up while threads work.

use std::sync::atomic::Ordering;
use std::time::Duration;

use aquifer::memory::{AllocError, Contents, Part, SleepOptions};
use aquifer_allocator::WakeLock;

use crate::plan::Asleep;
use crate::player::{Player, at};
use crate::sleeping::TAGS;
use crate::world::World;

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
            Asleep::Pool(pick) => Part::pool(&self.pools[at(&self.pools, pick)?]),
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

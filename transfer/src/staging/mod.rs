//! Staging: how memory that is not page-locked, and files, get to the device and back.
//!
//! A few chunks of page-locked memory form a ring. Threads fill some chunks, or store what was fetched into them, while the copy engine works
//! on others, so that it need not wait for the host. Transfers take turns by the chunk, so a small one is not stuck behind a large one, and more urgent
//! ones go first.
//!
//! The parts, in the order in which data flows:
//! * `ends`: where bytes come from and go to; `spread`: where they lie there;
//! * `work`: what is done with one piece of a transfer;
//! * `ring`: which task is next (`task` defines tasks, `lanes` how many chunks a stream may hold);
//! * `copies`: which piece of a copy between host memory is next; `on_host`: what such a copy comes after;
//! * `floor`: how threads share the ring and these copies; `crew`: the threads; `tune`: the choice of sizes;
//! * `schedule`: the same ring with a `virtual_crew` on a simulated device in virtual time, to show that the copy engine is kept busy;
//! * `file`: files.
//!
//! A transfer ends in one way only, whatever fails: its [`Job`] is settled, and from then on nobody touches its host end. An error of a
//! source, a target or the driver fails the transfer that it occurs in, and chunks go on to others. When the device is lost, all transfers
//! fail.

mod config;
mod copies;
mod crew;
mod ends;
mod file;
mod floor;
mod lanes;
mod made_up;
mod on_host;
mod ring;
mod schedule;
mod spread;
mod stats;
mod task;
#[cfg(test)]
mod tests;
mod tune;
mod virtual_crew;
mod work;

use std::fmt;
use std::sync::Arc;

use aquifer_device::{Operation, Stream, Tick, fork};

pub(crate) use config::PAGE;
pub use config::{DirectIo, StagingConfig};
pub(crate) use ends::{Gathered, HostCopy, HostSource, HostTarget, Scattered};
pub use file::FileReport;
pub(crate) use file::FileSource;
pub use schedule::{ScheduleReport, VirtualSchedule};
pub(crate) use spread::Spread;
pub use stats::StagingStats;

use crate::error::TransferError;
use crate::job::Job;
use crate::pinned::PinnedPool;
use crate::waiter::Waiter;
use crew::Crew;
use on_host::OnHost;
pub(crate) use work::{DeviceEnd, guarded};
use work::{HostEnd, Work};

/// The staging ring of a runtime. Nothing is page-locked and no thread runs before its first use. When it is dropped, the transfers under
/// way complete, and then its threads end and its memory goes back to the pool.
pub(crate) struct Staging {
    crew: Arc<Crew>,
    config: StagingConfig,
}

impl Staging {
    /// A ring of memory of `pool`.
    pub(crate) fn new(pool: &PinnedPool, config: StagingConfig) -> Staging {
        Staging { crew: Crew::new(pool, config), config }
    }

    /// How the ring was asked to be.
    pub(crate) fn config(&self) -> &StagingConfig {
        &self.config
    }

    /// Copies all of `source` to `to`, claimed for writing, by copies on `stream`. Returns at once. The claim ends when the last copy is
    /// enqueued. Transfers of lower `priority` go first.
    ///
    /// # Errors
    /// Ends of different lengths, memory of another device than the stream's, a stream that captures, a device that is lost. What goes
    /// wrong later is the job's.
    pub(crate) fn upload(
        &self,
        source: Arc<dyn HostSource>,
        to: DeviceEnd,
        stream: &Stream,
        priority: i32,
    ) -> Result<Arc<Job>, TransferError> {
        self.begin(Work::new(HostEnd::Source(source), to, stream, priority)?)
    }

    /// Copies all of `from`, claimed for reading, to `target`, by copies on `stream`. Returns at once. The claim ends when the bytes are in
    /// the target.
    ///
    /// # Errors
    /// As [`Staging::upload`].
    pub(crate) fn download(
        &self,
        from: DeviceEnd,
        target: Arc<dyn HostTarget>,
        stream: &Stream,
        priority: i32,
    ) -> Result<Arc<Job>, TransferError> {
        self.begin(Work::new(HostEnd::Target(target), from, stream, priority)?)
    }

    /// Makes a copy between host memory, of at least a byte, once the ticks are done. Returns at once. What the copy claims is let go before
    /// the job is settled.
    pub(crate) fn copy_on_host(&self, copy: Box<dyn HostCopy>, before: Vec<Tick>, waiter: &Arc<Waiter>) -> Arc<Job> {
        let copy = OnHost::new(copy);
        let job = copy.job().clone();
        on_host::begin(&self.crew, waiter, copy, before);
        job
    }

    fn begin(&self, work: Work) -> Result<Arc<Job>, TransferError> {
        fork::check(Operation::CopyToDevice)?;
        let job = work.job().clone();
        if work.bytes() == 0 {
            work.end(Ok(()));
        } else {
            self.crew.submit(work)?;
        }
        Ok(job)
    }

    /// What the ring is made of, and what it did.
    pub(crate) fn stats(&self) -> StagingStats {
        StagingStats::of(&self.crew)
    }
}

impl Drop for Staging {
    /// Waits for nothing: this may be the last handle, dropped by a thread of the ring.
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        self.crew.floor.close();
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staging").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

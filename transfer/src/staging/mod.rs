//! Staging: transfers of files, and of memory that is not pinned.
//!
//! A few chunks of pinned memory form a ring. Threads fill some chunks, or store the contents
//! of fetched ones, while the copy engine works on others, so that it need not wait for the host.
//! Transfers alternate by the chunk, so a small one is not stuck behind a large one, and more
//! urgent ones go first.
//!
//! The parts, from the bottom up:
//! * `endpoints`: the host ends of transfers;
//! * `staged_transfer`: a transfer, and the steps of its pieces;
//! * `ring`: the next task (`task` defines tasks, `windows` limits the chunks of a stream);
//! * `scheduler`: the threads that share the ring; `workers`: their work; `tune`: the choice of
//!   sizes;
//! * `file`: files.
//!
//! A transfer ends in one way only: its [`Job`] is settled, and from then on no thread touches its
//! host end. An error of a source, a target or the driver fails its transfer alone, and the chunks
//! serve other transfers. When the device is lost, all transfers fail.

mod config;
mod endpoints;
mod file;
mod ring;
mod scheduler;
mod staged_transfer;
mod task;
#[cfg(test)]
mod tests;
mod tune;
mod windows;
mod workers;

use std::sync::Arc;

use aquifer_device::{Operation, Stream, fork};

pub use config::{DirectIo, PAGE, StagingConfig, StagingStats};
pub use endpoints::HostSource;
pub(crate) use endpoints::{HostTarget, InRows};
pub use file::FileReport;
pub(crate) use file::FileSource;

use staged_transfer::StagedTransfer;

use crate::error::TransferError;
use crate::job::Job;
use crate::pinned::PinnedPool;
pub(crate) use staged_transfer::{DeviceEndpoint, HostEndpoint};
use workers::Workers;

/// The staging ring of a runtime. Nothing is pinned and no thread runs before its first use.
/// When it is dropped, the transfers in flight complete; then its threads end and its memory goes
/// back to the pool.
pub(crate) struct Staging {
    workers: Arc<Workers>,
    config: StagingConfig,
}

impl Staging {
    /// A ring of memory of `pool`.
    pub(crate) fn new(pool: &PinnedPool, config: StagingConfig) -> Staging {
        Staging { workers: Workers::new(pool, config), config }
    }

    /// The configuration.
    pub(crate) fn config(&self) -> &StagingConfig {
        &self.config
    }

    /// Begins to copy all bytes between a host end and a device end of one length, by copies on
    /// `stream`, which must be a stream of the memory's device for all threads. Transfers of lower
    /// `priority` go first. An upload's reservation ends when the last copy is enqueued, that of a
    /// download when the bytes are in the target.
    ///
    /// # Errors
    /// A lost device, and errors of the driver. The job has later errors.
    pub(crate) fn begin(
        &self,
        host: HostEndpoint,
        device: DeviceEndpoint,
        stream: &Stream,
        priority: i32,
    ) -> Result<Arc<Job>, TransferError> {
        fork::check(Operation::CopyToDevice)?;
        let transfer = StagedTransfer::new(host, device, stream, priority)?;
        let job = transfer.job().clone();
        if transfer.bytes() == 0 {
            transfer.end(Ok(()));
        } else {
            self.workers.submit(transfer)?;
        }
        Ok(job)
    }

    /// Sizes and counters.
    pub(crate) fn stats(&self) -> StagingStats {
        self.workers.stats()
    }
}

impl Drop for Staging {
    /// Waits for nothing: this may be the last handle, dropped by a thread of the ring.
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        self.workers.scheduler.close();
    }
}

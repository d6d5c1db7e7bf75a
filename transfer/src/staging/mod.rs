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
//! * `scheduler`: the threads that share the ring; `workers`: their work;
//! * `file`: files.
//!
//! A transfer ends in one way only: its [`Job`](crate::job::Job) is settled, and from then on no
//! thread touches its host end. An error of a source, a target or the driver fails its transfer
//! alone, and the chunks serve other transfers. When the device is lost, all transfers fail.

mod endpoints;
mod file;
mod ring;
mod scheduler;
mod staged_transfer;
mod task;
#[cfg(test)]
mod tests;
mod windows;
mod workers;

pub use endpoints::HostSource;
pub(crate) use endpoints::{HostTarget, InRows};
pub use file::FileSource;
pub(crate) use file::open as open_file;
pub(crate) use staged_transfer::{DeviceEndpoint, HostEndpoint};
pub(crate) use workers::Staging;

#[cfg(test)]
pub(crate) use tests::cores as cores_of_tests;

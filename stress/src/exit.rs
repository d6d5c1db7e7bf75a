//! Exit codes, and failures by their cause.

use std::io;
use std::process::ExitCode;

use aquifer::Error;
use aquifer::device::{DeviceError, OpenError};
use aquifer::kernels::KernelError;
use aquifer::memory::AllocError;
use aquifer::transfer::TransferError;
use aquifer_allocator::snapshot::SaveError;

use aquifer_trace::PlayError;
use aquifer_trace::input::InputError;

/// The exit codes, for `--help`.
pub const CODES: &str = "\
Exit codes (if several apply, the last one in this list):
  0  success
  3  out of memory: a request of a replayed program was refused, or no device is large enough;
     explain, advise and report end with 0 then, because it is the answer to what they are asked
  4  an input file cannot be read or is damaged; the other files were processed all the same
  1  a failure at run time: a device that cannot be opened, a driver that fails, output that cannot
     be written, memory that `oom` found damaged or could not get back
  2  incorrect usage: an unknown command or option, or an invalid device or option string
  5  violations: the simulated device's race detector found unordered work, or `run --check` found
     what is certain to be wrong
`run` ends as its program does otherwise.";

/// The outcome of the program. Graver ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Outcome {
    /// Everything was done.
    Done,
    /// The command needs more memory.
    OutOfMemory,
    /// An input file is damaged or cannot be read.
    BadInput,
    /// Something failed while running.
    Failed,
    /// The command line is invalid.
    Usage,
    /// The race detector or `run --check` found violations.
    Violations,
    /// The exit code of a program that `run` ran.
    Program(u8),
}

impl Outcome {
    /// The exit code.
    pub fn code(self) -> u8 {
        match self {
            Outcome::Done => 0,
            Outcome::Failed => 1,
            Outcome::Usage => 2,
            Outcome::OutOfMemory => 3,
            Outcome::BadInput => 4,
            Outcome::Violations => 5,
            Outcome::Program(code) => code,
        }
    }
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> ExitCode {
        outcome.code().into()
    }
}

/// Why a command, or its work on one file, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The command line is invalid.
    #[error("{0}")]
    Usage(String),
    /// The input is damaged or cannot be read.
    #[error(transparent)]
    Input(#[from] InputError),
    /// A library that a program needs is missing.
    #[error("{0}")]
    Library(String),
    /// The device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The command needs more memory.
    #[error("{0}")]
    OutOfMemory(String),
    /// A demonstration did not show its subject.
    #[error("{0}")]
    NotShown(String),
    /// A program could not be played.
    #[error(transparent)]
    Play(#[from] PlayError),
    /// The driver failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A kernel could not be launched.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The allocator or a transfer failed.
    #[error(transparent)]
    Transfer(#[from] Error),
    /// A file could not be written, or a program not run.
    #[error("{}: {cause}", path.display())]
    File {
        /// The file.
        path: std::path::PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },
    /// A snapshot could not be saved.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// Standard output cannot be written.
    #[error("standard output: {0}")]
    Output(io::Error),
    /// The reader of standard output has closed it. Not reported.
    #[error("standard output was closed")]
    OutputClosed,
}

impl From<TransferError> for Failure {
    fn from(error: TransferError) -> Failure {
        Failure::Transfer(error.into())
    }
}

impl Failure {
    /// The outcome for it.
    pub fn outcome(&self) -> Outcome {
        match self {
            Failure::Usage(_) => Outcome::Usage,
            Failure::Input(_) => Outcome::BadInput,
            Failure::OutOfMemory(_) => Outcome::OutOfMemory,
            Failure::Play(PlayError { error, .. }) if is_refusal(error) => Outcome::OutOfMemory,
            Failure::Transfer(error) if is_refusal(error) => Outcome::OutOfMemory,
            Failure::OutputClosed => Outcome::Done,
            _ => Outcome::Failed,
        }
    }
}

/// Whether a request was refused for lack of memory. A driver may also report a lack of memory for
/// calls that release or need none; that is a failure of the driver.
fn is_refusal(error: &Error) -> bool {
    matches!(
        error,
        Error::Alloc(AllocError::OutOfMemory(_) | AllocError::TooLarge { .. })
            | Error::Transfer(TransferError::OutOfPinned { .. } | TransferError::OutOfHostMemory { .. })
    )
}

impl From<AllocError> for Failure {
    fn from(error: AllocError) -> Failure {
        Failure::Transfer(error.into())
    }
}

impl From<io::Error> for Failure {
    /// An error of writing to standard output.
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::Output(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use aquifer::Device;
    use aquifer::device::sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn a_lack_of_memory_where_none_is_requested_is_a_failure() {
        let config = SimConfig::parse("1GiB,fault_rate=any:1:out_of_memory").unwrap();
        let error = Device::new(SimDriver::new(config)).stream().unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert_eq!(Failure::from(AllocError::from(error.clone())).outcome(), Outcome::Failed);
        assert_eq!(Failure::from(Error::from(error)).outcome(), Outcome::Failed);
        assert_eq!(Failure::from(AllocError::TooLarge { requested: 1 << 60 }).outcome(), Outcome::OutOfMemory);
    }

    #[test]
    fn codes_are_distinct_and_documented() {
        let all = [
            Outcome::Done,
            Outcome::OutOfMemory,
            Outcome::BadInput,
            Outcome::Failed,
            Outcome::Usage,
            Outcome::Violations,
        ];
        let mut position = 0;
        for outcome in all {
            let found = CODES.find(&format!("\n  {}  ", outcome.code()));
            assert!(found.is_some_and(|found| found >= position), "{outcome:?} is missing, or out of order");
            position = found.unwrap_or(position);
        }
        assert!(all.is_sorted());
    }
}

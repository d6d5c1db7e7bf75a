//! The greatest values of one pass through a recorded program.

use crate::cli::ConfigArg;
use crate::exit::Failure;
use crate::harness::{OnOom, Player};
use crate::input::Program;
use crate::session::Session;
use crate::subject::{Aquifer, Refused, Subject};

/// The greatest values, and how often all cached memory was released.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct Peaks {
    /// Bytes in live blocks.
    pub allocated: u64,
    /// Bytes held from the device.
    pub reserved: u64,
    /// Times that all cached memory was released to try again.
    pub retries: u64,
}

struct Watched {
    inner: Aquifer,
    peaks: Peaks,
}

impl Subject for Watched {
    type Handle = <Aquifer as Subject>::Handle;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Self::Handle, Refused> {
        let handle = self.inner.alloc(bytes, stream);
        self.peaks.allocated = self.peaks.allocated.max(self.inner.allocator.allocated_bytes());
        self.peaks.reserved = self.peaks.reserved.max(self.inner.allocator.reserved_bytes());
        handle
    }

    fn free(&mut self, handle: Self::Handle) {
        self.inner.free(handle);
    }

    fn record_stream(&mut self, handle: &Self::Handle, stream: u16) -> Result<(), Refused> {
        self.inner.record_stream(handle, stream)
    }
}

/// Plays the program once, on a device of its own, and looks at the allocator after every allocation. That is exact: both
/// quantities rise in allocations only, and in each of them last.
///
/// # Errors
/// Those of the device and the allocator.
pub fn peaks(session: &Session, program: &Program, config: &ConfigArg) -> Result<Peaks, Failure> {
    let device = session.open()?;
    let inner = Aquifer::new(session, &device, config, program.streams.len())?;
    let mut watched = Watched { inner, peaks: Peaks::default() };
    Player::new(program).pass(&mut watched, OnOom::Skip)?;
    Ok(Peaks { retries: watched.inner.retries(), ..watched.peaks })
}

//! Ways to run out of memory, and out of it again.
//!
//! Each sets memory up, asks for more than it can get, and does what the report advises. Nothing of that may harm what was
//! written before, or the allocator.

mod device;
mod heap;
mod rules;
mod spill;
mod stand;

use crate::exit::Failure;
pub use stand::{Refusal, Stand};

/// One way to run out of memory.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Way {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it does.
    pub summary: &'static str,
    /// Why it needs a simulated device, if it does.
    pub needs_simulator: Option<&'static str>,
    /// The options that it sets, for a device with so many bytes to use.
    pub options: fn(u64) -> String,
    run: fn(&mut Stand) -> Result<Story, Failure>,
}

/// What came of it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Story {
    /// The request, and what was said about it.
    pub refusal: Refusal,
    /// What was done about it.
    pub recovered_by: String,
    /// Whether the request, or the one that was made instead, was served then.
    pub recovered: bool,
}

/// All ways, in the order in which they are best read.
pub const ALL: [Way; 9] = [
    device::TOO_BIG,
    heap::FRAGMENTED,
    device::OTHER_PROCESS,
    heap::PENDING,
    rules::LIMIT,
    rules::HEADROOM,
    heap::PRIVATE_POOL,
    rules::RECLAIMERS,
    spill::SPILL,
];

impl Way {
    /// Goes this way.
    ///
    /// # Errors
    /// When something other than a lack of memory comes up.
    pub fn go(&self, stand: &mut Stand) -> Result<Story, Failure> {
        (self.run)(stand)
    }
}

/// No options.
fn no_options(_: u64) -> String {
    String::new()
}

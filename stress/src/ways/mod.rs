//! Ways to run out of memory, and out of it again.
//!
//! Each sets memory up, asks for more than it can get, and does what the report advises. Nothing of
//! that may harm what was written before, or the allocator.

mod device;
mod heap;
mod rules;
mod spill;
mod stand;

use crate::exit::{Failure, Outcome};
use crate::text::Bytes;
pub use stand::{Given, Refusal, Stand};

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
    /// Whether its request is served in the end, by what the allocator does about the lack of
    /// memory itself.
    pub served: bool,
    /// The options that it sets.
    pub options: fn(&Given) -> String,
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
    /// When something other than a lack of memory comes up; when memory runs out too early, or not
    /// at all.
    pub fn go(&self, stand: &mut Stand) -> Result<Story, Failure> {
        let story = match (self.run)(stand) {
            Err(failure) if failure.outcome() == Outcome::OutOfMemory => return Err(too_early(&failure)),
            other => other?,
        };
        if story.refusal.report.is_none() && !self.served {
            let requested = Bytes(story.refusal.requested);
            return Err(not_shown(&format!("{requested} were to be refused, and were served")));
        }
        Ok(story)
    }
}

/// What the way needs at first could not be had.
fn too_early(failure: &Failure) -> Failure {
    not_shown(&format!("memory ran out before the request that was to be refused: {failure}"))
}

fn not_shown(why: &str) -> Failure {
    Failure::NotShown(format!("nothing is shown here; a larger device or fewer options may help: {why}"))
}

/// No options.
fn no_options(_: &Given) -> String {
    String::new()
}

//! Ways to run out of memory, and to recover.
//!
//! Each sets memory up, asks for more than it can get, and follows the report's advice. Neither
//! must damage the content of live blocks or the allocator.

mod device;
mod heap;
mod rules;
mod spill;
mod stand;

use std::str::FromStr;

use crate::exit::{Failure, Outcome};
use crate::text::Bytes;
pub use stand::{Given, Refusal, Stand};

/// One way to run out of memory.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Way {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its description.
    pub summary: &'static str,
    /// The reason to need a simulated device, if it does.
    pub needs_simulator: Option<&'static str>,
    /// Whether the allocator finds memory for its request by itself.
    pub served: bool,
    /// The options that it sets.
    pub options: fn(&Given) -> String,
    run: fn(&mut Stand) -> Result<Story, Failure>,
}

/// The result of a way.
#[derive(Debug)]
#[non_exhaustive]
pub struct Story {
    /// The request and its answer.
    pub refusal: Refusal,
    /// The measure that was taken.
    pub recovered_by: String,
    /// Whether the request, or a smaller one, was served then.
    pub recovered: bool,
}

/// All ways, in the order of the documentation.
pub const ALL: [Way; 9] = [
    Way::new("too_big", "asks for more than the device has", device::too_big),
    Way {
        options: |_| "backing:segments".to_owned(),
        ..Way::new(
            "fragmented",
            "asks for three quarters of what is free, which is in pieces of 4 MiB",
            heap::fragmented,
        )
    },
    Way {
        needs_simulator: Some("another process can be told to take memory only on a simulated device"),
        ..Way::new("other_process", "asks for what another process holds", device::other_process)
    },
    Way {
        served: true,
        ..Way::new(
            "pending",
            "asks for what was given back while a side stream, which is late, still uses it",
            heap::pending,
        )
    },
    Way {
        options: rules::half,
        ..Way::new("limit", "asks for more than per_process_memory_fraction allows", rules::limit)
    },
    Way {
        options: |given| format!("headroom_mb:{}", (given.free - given.room / 4 * 3) >> 20),
        ..Way::new("headroom", "asks for what headroom_mb leaves to libraries", rules::headroom)
    },
    Way::new("private_pool", "asks for what a private pool keeps for a graph", heap::private_pool),
    Way {
        served: true,
        ..Way::new(
            "reclaimers",
            "asks for more than is free, while parts of the program have registered what they can do without",
            rules::reclaimers,
        )
    },
    Way::new(
        "spill",
        "asks for more than is free beside caches; is refused, and served once a spiller may move them to the host",
        spill::spill,
    ),
];

impl FromStr for Way {
    type Err = String;

    fn from_str(name: &str) -> Result<Way, String> {
        ALL.into_iter()
            .find(|way| way.name == name)
            .ok_or_else(|| format!("there is no way {name:?}; there are {}", ALL.map(|way| way.name).join(", ")))
    }
}

impl Way {
    const fn new(name: &'static str, summary: &'static str, run: fn(&mut Stand) -> Result<Story, Failure>) -> Way {
        Way { name, summary, needs_simulator: None, served: false, options: |_| String::new(), run }
    }

    /// Runs it.
    ///
    /// # Errors
    /// When something other than a lack of memory fails; when memory runs out too early, or not at
    /// all.
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

/// Memory ran out during the setup.
fn too_early(failure: &Failure) -> Failure {
    not_shown(&format!("memory ran out before the request that was to be refused: {failure}"))
}

fn not_shown(why: &str) -> Failure {
    Failure::NotShown(format!("nothing is shown here; a larger device or fewer options may help: {why}"))
}
